// SPDX-License-Identifier: Apache-2.0
// Device functions that every kernel is made of: elements of any dtype as f32, exp and tanh to an
// ulp or two, the map from raw to z, sums and maxima over a warp or a block in fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "logitless/ops.h"
#include "src/loss.h"

namespace logitless::cuda {

constexpr unsigned whole_warp = 0xFFFFFFFFu;

__device__ inline float infinity() { return __int_as_float(0x7F800000); }
__device__ inline float nan_value() { return __int_as_float(0x7FC00000); }

// --- elements ---

__device__ inline float to_f32(float x) { return x; }
__device__ inline float to_f32(__half x) { return __half2float(x); }
__device__ inline float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T from_f32(float x);
template <>
__device__ inline float from_f32<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_f32<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_f32<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <class T>
inline constexpr DType dtype_of = DType::f32;
template <>
inline constexpr DType dtype_of<__half> = DType::f16;
template <>
inline constexpr DType dtype_of<__nv_bfloat16> = DType::bf16;

// f(T{}) with the C++ type of a floating dtype.
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

// The same in a kernel.
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

// A thread moves this at a time.
template <class T>
struct alignas(16) Pack {
  static constexpr int width = 16 / sizeof(T);
  T x[width];
};

// 32 bits of elements: one f32, or two of 16 bits, the first in the low half.
__device__ inline float bf16_of(uint32_t bits, int i) {
  return __uint_as_float(i == 0 ? bits << 16 : bits & 0xffff0000u);
}
template <class T>
__device__ inline void unpack(uint32_t bits, float* x) {
  if constexpr (sizeof(T) == 4) {
    x[0] = __uint_as_float(bits);
  } else if constexpr (dtype_of<T> == DType::bf16) {
    x[0] = bf16_of(bits, 0);
    x[1] = bf16_of(bits, 1);
  } else {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(bits));
    x[0] = pair.x;
    x[1] = pair.y;
  }
}
template <class T>
__device__ inline uint32_t pack(float x, float y) {
  if constexpr (dtype_of<T> == DType::bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}
template <class T>
__device__ inline uint32_t pack(const float* x) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(x[0]);
  } else {
    return pack<T>(x[0], x[1]);
  }
}

template <class T>
__device__ inline T* address(const TensorView& v, int64_t i = 0, int64_t j = 0) {
  return reinterpret_cast<T*>(static_cast<char*>(v.data) + v.byte_offset) + i * v.stride[0] +
         j * v.stride[1];
}

// Element (i, j) of a view of any floating dtype; of a vector with j = 0.
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
__device__ inline int64_t load_int(const TensorView& v, int64_t i) {
  return v.dtype == DType::i64 ? *address<const int64_t>(v, i) : *address<const int32_t>(v, i);
}
__device__ inline void store_int(const TensorView& v, int64_t i, int64_t x) {
  if (v.dtype == DType::i64) {
    *address<int64_t>(v, i) = x;
  } else {
    *address<int32_t>(v, i) = static_cast<int32_t>(x);
  }
}
__device__ inline bool present(const TensorView& v) { return v.rank != -1; }

// --- functions ---

constexpr float log2e = 0x1.715476p0f, ln2 = 0x1.62e430p-1f;
constexpr float least_exponent = -87.3365f;  // exp is subnormal below, and taken as 0

// 2^x by the one instruction: 2 ulp; subnormal ones are 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp x for x <= 0, -inf included; NaN stays. Two roundings of x log2(e) are kept apart, so that
// the error is that of the last instruction (2 ulp) for any x.
__device__ inline float exp_nonpositive(float x) {
  constexpr float log2e_low = 0x1.4ae0cp-26f;
  const float product = x * log2e;
  const float rest = fmaf(x, log2e, -product) + x * log2e_low;
  const float y = exp2_fast(product);
  // 2^rest = 1 + rest ln 2; where x is -inf `rest` is NaN.
  const float exact = fmaf(y, rest * ln2, y);
  return x < least_exponent ? 0.0f : exact;
}
// exp x for any x: what is above 88 is inf.
__device__ inline float exp_any(float x) { return x > 88.0f ? infinity() : exp_nonpositive(x); }

// tanh(y / 2) for y in [0, 40] by exp - 1 in two parts; NaN stays.
__device__ inline float tanh_of_half(float y) {
  const float magic = 12582912.0f;  // 1.5 2^23
  const float n = fmaf(y, 0x1.715476p0f, magic) - magic;
  const float r = fmaf(-n, 0x1.7f7d1cp-20f, fmaf(-n, 0x1.62e4p-1f, y));
  const float r2 = r * r;
  const float c01 = fmaf(0x1.555492p-3f, r, 0x1.fffffcp-2f);
  const float c23 = fmaf(0x1.1239e2p-7f, r, 0x1.5558f2p-5f);
  const float q = fmaf(fmaf(0x1.6a2434p-10f, r2, c23), r2, c01);
  const float scale = __int_as_float((static_cast<int>(n) + 127) << 23);
  const float s = fmaf(r2, q, r);          // exp r - 1
  const float s_low = fmaf(r2, q, r - s);  // what s lost
  const float whole = scale - 1.0f;
  const float e = fmaf(scale, s, whole);
  const float e_low = fmaf(scale, s_low, fmaf(scale, s, whole - e));
  const float sum = e + 2.0f;
  const float sum_low = (fminf(e, 2.0f) - (sum - fmaxf(e, 2.0f))) + e_low;
  const float inverse = __frcp_rn(sum);
  const float quotient = e * inverse;
  const float rest = fmaf(-quotient, sum, e) + fmaf(-quotient, sum_low, e_low);
  return y == y ? fmaf(rest, inverse, quotient) : y;
}

__device__ inline float map_raw(const MapFactors& f, float raw) {
  if (!f.capped) return f.identity ? raw : raw * f.slope;
  float size = fabsf(raw);
  // Not fminf: NaN stays. And t is set, not only `size`: of a tiny scale the limit's own tanh may
  // be less than 1, but what is above the limit is infinite.
  const bool is_one = size > f.limit;
  size = is_one ? f.limit : size;
  const float y = fmaf(size, f.inward, size * f.inward_low);
  const float t = is_one ? 1.0f : tanh_of_half(y);
  const float z = fmaf(t, f.outward, t * f.outward_low);
  return signbit(raw) ? -z : z;
}

// d(draw) / dz beyond the constant slope: 1 - (c / softcap)^2.
__device__ inline float cap_slope(const MapFactors& f, float z) {
  if (!f.capped) return 1.0f;
  const float t = z * f.backward;
  return fmaf(-t, t, 1.0f);
}

// --- reductions, all threads get the result ---

__device__ inline float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(whole_warp, x, offset);
  return x;
}
__device__ inline double warp_sum(double x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(whole_warp, x, offset);
  return x;
}
__device__ inline int warp_sum(int x) { return __reduce_add_sync(whole_warp, x); }
__device__ inline float warp_max(float x) {  // a NaN does not count
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(whole_warp, x, offset));
  }
  return x;
}
__device__ inline int warp_min(int x) { return __reduce_min_sync(whole_warp, x); }

// Reduces over a block of up to 32 whole warps; `combine` is one of the functions above's
// operation.
template <class T, class WarpReduce>
__device__ T block_reduce(T x, T neutral, WarpReduce&& warp_reduce) {
  __shared__ T partial[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = (blockDim.x + 31) / 32;
  x = warp_reduce(x);
  __syncthreads();  // the last use of `partial` is over
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  x = lane < warps ? partial[lane] : neutral;
  return warp_reduce(x);
}
template <class T>
__device__ T block_sum(T x) {
  return block_reduce(x, T{0}, [](T v) { return warp_sum(v); });
}
__device__ inline float block_max(float x) {
  return block_reduce(x, -infinity(), [](float v) { return warp_max(v); });
}

}  // namespace logitless::cuda
