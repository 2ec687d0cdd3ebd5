// SPDX-License-Identifier: Apache-2.0
// The map from raw to z, and its slope with a softcap; tanh is accurate to an ulp or two.
#pragma once

#include "src/cuda/numbers.cuh"
#include "src/row/coefficients.h"

namespace logitless::cuda {

// tanh(y / 2) for y in [0, 40], by exp - 1 in two parts; NaN stays NaN.
__device__ inline float tanh_of_half(float y) {
  const float magic = 12582912.0f;  // 1.5 2^23: adding it rounds to an integer
  const float n = fmaf(y, 0x1.715476p0f, magic) - magic;
  const float r = fmaf(-n, 0x1.7f7d1cp-20f, fmaf(-n, 0x1.62e4p-1f, y));
  const float r2 = r * r;
  const float c01 = fmaf(0x1.555492p-3f, r, 0x1.fffffcp-2f);
  const float c23 = fmaf(0x1.1239e2p-7f, r, 0x1.5558f2p-5f);
  const float q = fmaf(fmaf(0x1.6a2434p-10f, r2, c23), r2, c01);
  const float scale = __int_as_float((static_cast<int>(n) + 127) << 23);
  const float s = fmaf(r2, q, r);          // exp r - 1
  const float s_low = fmaf(r2, q, r - s);  // the rounding error of s
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
  // A select, because fminf would drop NaN. Above the limit t is 1: with a tiny scale the limit is
  // FLT_MAX, whose tanh may be below 1, and only infinity exceeds it (src/row/map.h).
  const bool is_one = size > f.limit;
  size = is_one ? f.limit : size;
  const float y = fmaf(size, f.inward, size * f.inward_low);
  const float t = is_one ? 1.0f : tanh_of_half(y);
  const float z = fmaf(t, f.outward, t * f.outward_low);
  return signbit(raw) ? -z : z;
}

// draw / dz without the constant slope: 1 - t^2 for t = z / cap, from 1 - |t|, the distance of z
// from the cap. It is exact where t is near 1, while t itself has been rounded three times.
__device__ inline float cap_slope(const MapFactors& f, float z) {
  if (!f.capped) return 1.0f;
  const float low = f.outward < 0.0f ? -f.outward_low : f.outward_low;
  const float left = ((fabsf(f.outward) - fabsf(z)) + low) * f.backward;
  return left * (2.0f - left);
}

}  // namespace logitless::cuda
