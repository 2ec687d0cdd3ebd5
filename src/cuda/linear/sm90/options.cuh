// SPDX-License-Identifier: Apache-2.0
// The map from raw to z and its slope, for kernels with options.
#pragma once

#include "src/cuda/linear/sm90/forward.cuh"

namespace logitless::cuda::sm90 {

// z of a capped logit must be within the 3 u32 of its bound: if the product is about 0 and the
// logit is mostly bias, nothing else in the bound allows for more. The formula depends on tanh's
// argument y:
//   y <= 0.6   map_small: tanh y = y + y^3 P(y^2), coefficients of Cephes' tanhf (y < 0.625)
//   y <= 1.4   map_large: the same with a longer polynomial (relative error 0.12 u32 as fitted)
//   beyond     map_larger: 1 - 2 / (e^2y + 1) by ex2.approx and rcp.approx, rounded before it is
//              multiplied: z to 2.9 u32 as simulated (9 at 0.6)
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
// A select: both values are already computed, so no branch is needed.
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
  const float y = raw * (0.5f * o.map.inward), y2 = y * y, z = raw * o.map.slope;
  float p = o.large_terms[8];
#pragma unroll
  for (int n = 7; n >= 0; --n) p = fmaf(p, y2, o.large_terms[n]);
  return fmaf(z, p * y2, z);
}
// Returns map_large's z or, where tanh is near 1, outward * tanh with one rounding each: there the
// softcap's slope is a small difference, in which every rounding counts.
__device__ inline float map_larger(const TileOptions& o, float outward, float raw,
                                   float otherwise) {
  const float e = exp2_fast(fabsf(raw) * o.map.inward * log2e);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1.0f));
  const float far = copysignf(fmaf(-2.0f, inverse, 1.0f), raw) * outward;
  return select_above(fabsf(raw) * (0.5f * o.map.inward), most_of_polynomial, far, otherwise);
}

// Returns E or dz times the softcap's slope.
__device__ inline float capped(float backward, float z, float e) {
  const float t = z * backward;
  return e * fmaf(-t, t, 1.0f);
}
// z divided by a temperature. Its inverse has two parts, so only the quotient is rounded.
__device__ inline float divided(float z, const TokenMap& m) {
  const float quotient = z * m.inverse;
  return quotient + fmaf(z, m.inverse_low, fmaf(z, m.inverse, -quotient));
}

}  // namespace logitless::cuda::sm90
