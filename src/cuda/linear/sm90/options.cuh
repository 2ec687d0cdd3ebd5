// SPDX-License-Identifier: Apache-2.0
// What options change of a logit: the map from raw to z and its slope, what is kept near a softcap.
#pragma once

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/units.cuh"

namespace logitless::cuda::sm90 {

struct TileOptions {
  MapFactors map;             // where rows have maps of their own: as if no temperature were given
  const TokenMap* row_map;    // [N]  by token; null: `map` is all rows'
  const float* row_slope;     // [rows of the chunk]  theirs, where there is row_map
  const float* bias;          // [V + padding]  null: none
  const float* class_weight;  // [V + padding]  null: 1
  bool smoothing, entropy;    // terms of dz
  float small;                // |raw| up to which tanh is the short polynomial
  float near_cap;             // sums_kept: |z| beyond which what is left to the cap is kept
  float terms[5];             // of raw^3, raw^5 ...: the polynomial with its factors
  float large_terms[9];       // large_tanh: from here, not from registers
};

// Returns `x`, which the compiler takes for a new value at every place.
__device__ inline bool again(bool x) {
  int value = x;
  asm volatile("" : "+r"(value));
  return value != 0;
}

// z of a capped logit, within the 3 u32 of its bound: where a bias carries a logit whose product is
// about 0 there is nothing else to make good for more. By tanh's argument y:
//   y <= 0.6   map_small: tanh y = y + y^3 P(y^2), coefficients and range of Cephes' tanhf
//   y <= 1.4   map_large: the same with a longer polynomial (relative error 0.12 u32 as fitted)
//   beyond     map_large: 1 - 2 / (e^2y + 1), to 2.5 u32 by ex2.approx and rcp.approx (9 at 0.6)
constexpr float most_of_small = 0.6f, most_of_polynomial = 1.4f;
constexpr float tanh_3 = -3.33332819422e-1f, tanh_5 = 1.33314422036e-1f,
                tanh_7 = -5.37397155531e-2f, tanh_9 = 2.06390887954e-2f,
                tanh_11 = -5.70498872745e-3f;

__device__ inline float map_small(const TileOptions& o, float raw) {
  const float raw2 = raw * raw;
  float p = fmaf(o.terms[4], raw2, o.terms[3]);
  p = fmaf(p, raw2, o.terms[2]);
  p = fmaf(p, raw2, o.terms[1]);
  p = fmaf(p, raw2, o.terms[0]);
  return raw * fmaf(p, raw2, o.map.slope);
}
// Both are there: no branch.
__device__ inline float select_above(float x, float bound, float above, float otherwise) {
  float z;
  asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\nselp.f32 %0, %3, %4, p;\n}\n"
      : "=f"(z)
      : "f"(x), "f"(bound), "f"(above), "f"(otherwise));
  return z;
}
constexpr float large_tanh[9] = {-0x1.555536p-2f,  0x1.110c0ep-3f,  -0x1.b987cep-5f,
                                 0x1.620b58p-6f,   -0x1.100ac6p-7f, 0x1.722b4cp-9f,
                                 -0x1.892978p-11f, 0x1.117034p-13f, -0x1.674f2ep-17f};
__device__ inline float map_large(const TileOptions& o, float raw) {
  const MapFactors& f = o.map;
  const float y = raw * (0.5f * f.inward), y2 = y * y, z = raw * f.slope;
  float p = o.large_terms[8];
#pragma unroll
  for (int n = 7; n >= 0; --n) p = fmaf(p, y2, o.large_terms[n]);
  const float near = fmaf(z, p * y2, z);
  const float e = exp2_fast(fabsf(raw) * f.inward * log2e);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1.0f));
  const float far = copysignf(fmaf(-2.0f, inverse, 1.0f), raw) * f.outward;
  return select_above(fabsf(y), most_of_polynomial, far, near);
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(whole_warp, x, 1));
  return fmaxf(x, __shfl_xor_sync(whole_warp, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(whole_warp, x, 1);
  return x + __shfl_xor_sync(whole_warp, x, 2);
}

// E or dz times the softcap's slope.
__device__ inline float capped(float backward, float z, float e) {
  const float t = z * backward;
  return e * fmaf(-t, t, 1.0f);
}
// z over a temperature, whose inverse has two parts: of the roundings of a quotient one is left.
__device__ inline float divided(float z, const TokenMap& m) {
  const float quotient = z * m.inverse;
  return quotient + fmaf(z, m.inverse_low, fmaf(z, m.inverse, -quotient));
}

// From E, rounded by 2^-8 at most, z is known to 2^-8, and the slope 1 - (z / cap)^2 to 2^-8 b of
// itself, b = 2 |z| / (cap^2 - z^2): beside E's own rounding and that of dz, which take what the
// contract grants, so much too much where all logits of a row are alike and below 0. Beyond
// near_cap a negative number is kept in E's place: the sign of z and a code of what is left,
// 1 - |z| / cap, in the sixteen upper bits (form_dz.cu). Below 2^-5 the code is five bits of its
// exponent and nine of its mantissa, as the slope wants; above it counts parts of the cap, as z
// does. Either is worth less than E's rounding, and b is 0.11 at most, of caps from 15 on. Nearer 0
// a warp's logits are no longer taken for large (most_of_small: tanh 0.6 is 0.54).
constexpr float near_cap = 0.55f;                        // of the cap
constexpr uint32_t first_left_code = (103u << 9) - 128;  // of 2^-24; codes begin at a normal number
constexpr float least_counted = 0x1p-5f, parts = 14336;  // of a cap: of 50, half of one is 2^-9
constexpr uint32_t first_counted_code = (122u << 9) - first_left_code;
constexpr uint32_t counted_codes =
    first_counted_code - static_cast<uint32_t>(least_counted * parts);
static_assert(counted_codes + parts * (1 - near_cap) < 0x3f80, "with a sign: an infinity or NaN");
__device__ inline float encode_left(const MapFactors& map, float z) {
  const float left = fmaxf(fmaf(-fabsf(z), map.backward, 1.0f), 0x1p-24f);
  // The last bits of 2^23 + x are x, rounded: a conversion takes four times as long.
  const uint32_t count = __float_as_uint(fmaf(left, parts, 0x1p23f)) - 0x4b000000u;
  const uint32_t code = left < least_counted ? (__float_as_uint(left) >> 14) - first_left_code
                                             : count + counted_codes;
  return __uint_as_float((0x8000u | (z < 0 ? 0x4000u : 0u) | code) << 16);
}
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// z, and the softcap's slope there, from the middle of what the code stands for.
__device__ inline float decode_left(const MapFactors& map, float kept, float* slope) {
  const uint32_t bits = __float_as_uint(kept), code = bits >> 16 & 0x3fff;
  const float left = code < first_counted_code
                         ? __uint_as_float(((code + first_left_code) << 14) | 0x2000u)
                         : static_cast<float>(code - counted_codes) * (1 / parts);
  *slope = left * (2 - left);
  const float z = (1 - left) * fabsf(map.outward);
  return (bits >> 30 & 1) != 0 ? -z : z;
}

}  // namespace logitless::cuda::sm90
