// SPDX-License-Identifier: Apache-2.0
// What the kernels of a linear op share: which rows of a chunk count, and sums over slabs.
#pragma once

#include "src/cuda/linear/linear.h"
#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

// E = exp(z - z_t) serves an anchor z_t up to this magnitude; beyond, its rounding is an exponent,
// and the row is made again.
constexpr float most_anchor = 0x1p20f;

// Returns this block's number along the second axis of two_axes.
__device__ inline int64_t block_of_second_axis() {
  return int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
}

// Returns how many rows of the chunk count: the first ones.
__device__ inline int valid_rows(const Chunk& chunk) {
  const int64_t left = chunk.tokens.scalars->valid - chunk.first;
  return static_cast<int>(max(int64_t{0}, min(left, int64_t{chunk.rows})));
}

// Says it of a row of the chunk, without asking for the number of all.
__device__ inline bool is_valid(const Chunk& chunk, int row) {
  return chunk.first + row < chunk.tokens.scalars->valid;
}

// Element (row, j) of a panel, j counted from its first column.
template <class E>
__device__ inline E* panel_element(const Panel& panel, int64_t row, int64_t j) {
  E* data = reinterpret_cast<E*>(panel.data);
  if (panel.blocks) return data + (j / 64 * panel.pitch + row) * 64 + j % 64;
  return data + row * panel.pitch + j;
}

// Adds up, of 64 columns, what 32 rows of 8 threads have of 8 columns each, added up in the rows'
// order.
struct ColumnParts {
  static constexpr int parts = 32;
  float part[parts][64];

  __device__ void put(int row, int column, const float (&own)[8]) {
#pragma unroll
    for (int n = 0; n < 8; ++n) part[row][column + n] = own[n];
  }
  __device__ float sum() const {  // of column threadIdx.x
    float all = 0;
#pragma unroll
    for (int i = 0; i < parts; ++i) all += part[i][threadIdx.x];
    return all;
  }
};

// f(T{}) with the type of E and of the scaled input, which f16 has not.
template <class F>
void with_stored(DType dtype, F&& f) {
  if (dtype == DType::f32) {
    f(float{});
  } else {
    f(__nv_bfloat16{});
  }
}

// A row of a matrix, `count` elements, as 16 bytes at a time with zeros behind.
template <class T>
struct RowReader {
  const T* data;
  int64_t stride, count;
  bool aligned;
  __device__ RowReader(const TensorView& view, int64_t row, int64_t columns)
      : data(address<const T>(view, row)),
        stride(view.stride[1]),
        count(columns),
        aligned((stride == 1 || columns == 1) && reinterpret_cast<uintptr_t>(data) % 16 == 0) {}
  __device__ Pack<T> operator()(int64_t j) const {
    if (aligned && j + Pack<T>::width <= count) {
      return *reinterpret_cast<const Pack<T>*>(data + j);
    }
    Pack<T> pack;
#pragma unroll
    for (int n = 0; n < Pack<T>::width; ++n) {
      pack.x[n] = j + n < count ? data[(j + n) * stride] : from_f32<T>(0.0f);
    }
    return pack;
  }
};

// Column d of [count, pitch] slabs, in order.
__device__ inline float sum_of_slabs(const float* slabs, int count, int64_t pitch, int64_t d) {
  float sum = 0;
  for (int slab = 0; slab < count; ++slab) sum += slabs[slab * pitch + d];
  return sum;
}

}  // namespace logitless::cuda
