// SPDX-License-Identifier: Apache-2.0
// A warp's dot product of two rows, in the same order for every layout: a column's logit has the
// same bits whether or not it is the target's.
#pragma once

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/logit_map.cuh"

namespace logitless::cuda {

template <class T>
__device__ void add_products(const uint4& x, const uint4& w, float* sum) {
  float a[Pack<T>::width], b[Pack<T>::width];
  unpack<T>(x, a);
  unpack<T>(w, b);
#pragma unroll
  for (int n = 0; n < Pack<T>::width; ++n) *sum = fmaf(a[n], b[n], *sum);
}

// A lane's part of x . w, 16 bytes at a time. Copies x unless `to` is null. Packs are loaded as
// their bits: an array of 16-bit elements would take a register for each.
template <class T>
__device__ float dot_packs(const uint4* x, const uint4* w, int packs, uint4* to, int lane) {
  // Several loads come before the first store, because the compiler moves no load past a store.
  constexpr int many = 4;
  float sum = 0;
  for (int j = lane; j < packs; j += many * 32) {
    uint4 a[many], b[many];
#pragma unroll
    for (int i = 0; i < many; ++i) {
      if (j + i * 32 < packs) a[i] = x[j + i * 32], b[i] = w[j + i * 32];
    }
#pragma unroll
    for (int i = 0; i < many; ++i) {
      if (j + i * 32 >= packs) break;
      if (to != nullptr) to[j + i * 32] = a[i];
      add_products<T>(a[i], b[i], &sum);
    }
  }
  return sum;
}
// Like dot_packs, in the same order, for rows of any layout. Pads the copy with zeros to `pitch`.
template <class T>
__device__ float dot_elements(const RowReader<T>& x, const RowReader<T>& w, int64_t pitch, T* to,
                              int lane) {
  float sum = 0;
#pragma unroll 1
  for (int64_t j = lane * Pack<T>::width; j < pitch; j += 32 * Pack<T>::width) {
    const uint4 a = x(j);
    if (to != nullptr) *reinterpret_cast<uint4*>(to + j) = a;
    add_products<T>(a, w(j), &sum);
  }
  return sum;
}

// A warp computes z of a column, with the bits that gather.cu gives a target's.
template <class T>
__device__ float logit_of(const TensorView& inputs, const TensorView& weights,
                          const TensorView& biases, const MapFactors& map, int64_t i, int column,
                          int lane) {
  constexpr int width = Pack<T>::width;
  const int64_t hidden = weights.shape[1];
  const RowReader<T> input(inputs, i, hidden), weight(weights, column, hidden);
  float sum;
  if (input.aligned && weight.aligned && hidden % width == 0) {
    sum = dot_packs<T>(reinterpret_cast<const uint4*>(input.data),
                       reinterpret_cast<const uint4*>(weight.data),
                       static_cast<int>(hidden / width), nullptr, lane);
  } else {
    sum = dot_elements<T>(input, weight, hidden, nullptr, lane);
  }
  sum = warp_sum(sum);
  if (present(biases)) sum += load(biases, column);
  return map_raw(map, sum);
}

}  // namespace logitless::cuda
