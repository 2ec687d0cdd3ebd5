// SPDX-License-Identifier: Apache-2.0
// Helpers of the kernels between the products: rows of a matrix as packs, and sums over slabs.
#pragma once

#include "src/cuda/linear/chunk.cuh"
#include "src/cuda/linear/linear.h"
#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

// This block's number along the second axis of two_axes.
__device__ inline int64_t block_of_second_axis() {
  return int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
}

// Adds the sums of 64 columns from 32 rows of 8 threads with 8 columns each, in the rows' order.
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

// Calls f(T{}) with the type of E and of the scaled input. E of f16 is codes, so any 16 bits serve.
template <class F>
void with_stored(DType dtype, F&& f) {
  if (dtype == DType::f32) {
    f(float{});
  } else {
    f(__nv_bfloat16{});
  }
}

// Reads a row of `count` elements, 16 bytes at a time, as if zeros followed the last one.
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
  __device__ uint4 operator()(int64_t j) const {
    if (aligned && j + Pack<T>::width <= count) {
      return *reinterpret_cast<const uint4*>(data + j);
    }
    Pack<T> pack;
#pragma unroll
    for (int n = 0; n < Pack<T>::width; ++n) {
      pack.x[n] = j + n < count ? data[(j + n) * stride] : from_f32<T>(0.0f);
    }
    return reinterpret_cast<const uint4&>(pack);
  }
};

// Sums column d of [count, pitch] slabs, in order.
__device__ inline float sum_of_slabs(const float* slabs, int count, int64_t pitch, int64_t d) {
  float sum = 0;
  for (int slab = 0; slab < count; ++slab) sum += slabs[slab * pitch + d];
  return sum;
}

}  // namespace logitless::cuda
