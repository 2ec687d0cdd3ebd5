// SPDX-License-Identifier: Apache-2.0
// Elements of the caller's tensors in kernels: a dtype as a type, and an element of a view of any
// floating dtype as f32.
#pragma once

#include "logitless/tensor.h"
#include "src/cuda/numbers.cuh"

namespace logitless::cuda {

template <class T>
inline constexpr DType dtype_of = DType::f32;
template <>
inline constexpr DType dtype_of<__half> = DType::f16;
template <>
inline constexpr DType dtype_of<__nv_bfloat16> = DType::bf16;

// Calls f(T{}) with the C++ type of a floating dtype.
template <class F>
void with_dtype(DType dtype, F&& f) {
  if (dtype == DType::f32) {
    f(float{});
  } else if (dtype == DType::f16) {
    f(__half{});
  } else {
    f(__nv_bfloat16{});
  }
}

template <class F>
__device__ void with_dtype_on_device(DType dtype, F&& f) {
  if (dtype == DType::f32) {
    f(float{});
  } else if (dtype == DType::f16) {
    f(__half{});
  } else {
    f(__nv_bfloat16{});
  }
}

template <class T>
__device__ inline T* address(const TensorView& v, int64_t i = 0, int64_t j = 0) {
  return reinterpret_cast<T*>(static_cast<char*>(v.data) + v.byte_offset) + i * v.stride[0] +
         j * v.stride[1];
}

// Element (i, j) of a view of any floating dtype; a vector has j = 0.
__device__ inline float load(const TensorView& v, int64_t i = 0, int64_t j = 0) {
  if (v.dtype == DType::f32) return *address<const float>(v, i, j);
  if (v.dtype == DType::f16) return to_f32(*address<const __half>(v, i, j));
  return to_f32(*address<const __nv_bfloat16>(v, i, j));
}
__device__ inline void store(const TensorView& v, int64_t i, int64_t j, float x) {
  if (v.dtype == DType::f32) {
    *address<float>(v, i, j) = x;
  } else if (v.dtype == DType::f16) {
    *address<__half>(v, i, j) = from_f32<__half>(x);
  } else {
    *address<__nv_bfloat16>(v, i, j) = from_f32<__nv_bfloat16>(x);
  }
}
__device__ inline int64_t load_int(const TensorView& v, int64_t i, int64_t j = 0) {
  return v.dtype == DType::i64 ? *address<const int64_t>(v, i, j)
                               : *address<const int32_t>(v, i, j);
}
__device__ inline void store_int(const TensorView& v, int64_t i, int64_t x) {
  if (v.dtype == DType::i64) {
    *address<int64_t>(v, i) = x;
  } else {
    *address<int32_t>(v, i) = static_cast<int32_t>(x);
  }
}
__device__ inline bool present(const TensorView& v) { return v.rank != -1; }

}  // namespace logitless::cuda
