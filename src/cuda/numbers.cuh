// SPDX-License-Identifier: Apache-2.0
// Device functions for every kernel: elements of any type as f32, exp to an ulp or two, sums and
// maxima over a warp or a block in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace logitless::cuda {

constexpr unsigned whole_warp = 0xFFFFFFFFu;

__device__ inline float infinity() { return __int_as_float(0x7F800000); }
__device__ inline float nan_value() { return __int_as_float(0x7FC00000); }

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

// 16 bytes of elements, moved at once.
template <class T>
struct alignas(16) Pack {
  static constexpr int width = 16 / sizeof(T);
  T x[width];
};

// Unpack and pack 32 bits of elements: one f32, or two of 16 bits, the first in the low half.
__device__ inline float bf16_of(uint32_t bits, int i) {
  return __uint_as_float(i == 0 ? bits << 16 : bits & 0xffff0000u);
}
template <class T>
__device__ inline void unpack(uint32_t bits, float* x) {
  if constexpr (sizeof(T) == 4) {
    x[0] = __uint_as_float(bits);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    x[0] = bf16_of(bits, 0);
    x[1] = bf16_of(bits, 1);
  } else {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(bits));
    x[0] = pair.x;
    x[1] = pair.y;
  }
}
// 16 bytes of elements as f32.
template <class T>
__device__ inline void unpack(const uint4& bits, float (&x)[Pack<T>::width]) {
  constexpr int each = Pack<T>::width / 4;
  unpack<T>(bits.x, x);
  unpack<T>(bits.y, x + each);
  unpack<T>(bits.z, x + 2 * each);
  unpack<T>(bits.w, x + 3 * each);
}
template <class T>
__device__ inline uint32_t pack(float x, float y) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
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

// Codes: 16-bit logarithms of E = exp(z - z_t), kept for f16 inputs. f16 lacks the range for E
// itself: it ends 11 nats above the target's logit, and is subnormal 10 below. A code counts 800ths
// of log2 E from 2^-30 to 2^51, so that E is known to half a step, 0.9 of an f16's rounding. It is
// 0 if E is below 2^-30, for -inf or NaN, and if the column is left out.
constexpr float codes_of_two = 800, least_log2 = -30;
// Returns two codes, the first in the low half. Above 2^51 a code is meaningless.
__device__ inline uint32_t encode_logs(float log2_first, float log2_second) {
  // The low bits of 2^23 + x are x, rounded.
  constexpr float zero = 0x1p23f - least_log2 * codes_of_two;
  const float first = fmaf(fmaxf(log2_first, least_log2), codes_of_two, zero);
  const float second = fmaf(fmaxf(log2_second, least_log2), codes_of_two, zero);
  return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x5410);
}
// Returns log2 E.
__device__ inline float decode_log(uint32_t code) {
  return fmaf(__uint_as_float(0x4b000000u | code) - 0x1p23f, 1 / codes_of_two, least_log2);
}

// The address that PTX uses for shared memory.
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

constexpr float log2e = 0x1.715476p0f, ln2 = 0x1.62e430p-1f;
constexpr float least_exponent = -87.3365f;  // below this exp is subnormal, and taken as 0

// 2^x by a single instruction, to 2 ulp; a subnormal result becomes 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 x by a single instruction: to 2 ulp, and to 2^-22 for x between 1/2 and 2.
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp x for x <= 0, -inf included; NaN stays NaN. x log2(e) is computed in two parts, so that the
// error is that of exp2_fast (2 ulp) for any x.
__device__ inline float exp_nonpositive(float x) {
  constexpr float log2e_low = 0x1.4ae0cp-26f;
  const float product = x * log2e;
  const float rest = fmaf(x, log2e, -product) + x * log2e_low;
  const float y = exp2_fast(product);
  // 2^rest = 1 + rest ln 2. For x = -inf `rest` is NaN, and the result does not use it.
  const float exact = fmaf(y, rest * ln2, y);
  return x < least_exponent ? 0.0f : exact;
}
// exp x for any x; inf above 88.
__device__ inline float exp_any(float x) { return x > 88.0f ? infinity() : exp_nonpositive(x); }

// Reductions over threads, all of which get the result.

__device__ inline float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(whole_warp, x, offset);
  return x;
}
__device__ inline double warp_sum(double x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(whole_warp, x, offset);
  return x;
}
__device__ inline int warp_sum(int x) { return __reduce_add_sync(whole_warp, x); }
__device__ inline float warp_max(float x) {  // ignores NaN
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(whole_warp, x, offset));
  }
  return x;
}
__device__ inline int warp_min(int x) { return __reduce_min_sync(whole_warp, x); }

// A reduction over a block of up to 32 whole warps; `warp_reduce` is one of the functions above.
template <class T, class WarpReduce>
__device__ T block_reduce(T x, T neutral, WarpReduce&& warp_reduce) {
  __shared__ T partial[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = (blockDim.x + 31) / 32;
  x = warp_reduce(x);
  __syncthreads();  // `partial` is free after this
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
