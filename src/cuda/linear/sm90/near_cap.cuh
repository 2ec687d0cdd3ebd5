// SPDX-License-Identifier: Apache-2.0
// Near a softcap's limit, a code of the logit is kept in place of E, for form_dz.cu.
#pragma once

#include "src/cuda/numbers.cuh"
#include "src/row/coefficients.h"

namespace logitless::cuda::sm90 {

// E is rounded by up to 2^-8, so z computed from it is known to 2^-8, and the slope 1 - (z / cap)^2
// has a relative error of 2^-8 b, b = 2 |z| / (cap^2 - z^2). The roundings of E and dz already use
// up the contract's bound, so this is too much if all logits of a row are equal and below 0. Beyond
// near_cap a negative number is kept in place of E: the sign of z and a code of the distance, 1 -
// |z| / cap, in the upper sixteen bits (form_dz.cu). For distances below 2^-5 the code is five bits
// of the exponent and nine of the mantissa, as the slope needs; above, it counts parts of the cap,
// as z needs. Either error is below that of E's rounding, and b is at most 0.11 for caps from 15
// on. The limit is not closer to 0, because a warp's logits would not count as large there
// (most_of_small: tanh 0.6 is 0.54).
constexpr float near_cap = 0.55f;  // |z| relative to the cap
// The upper bits of 2^-24, less 128: the least code is 128, a normal number as bf16.
constexpr uint32_t first_left_code = (103u << 9) - 128;
// A part is cap / 14336; half a part is 2^-9 for a cap of 56.
constexpr float least_counted = 0x1p-5f, parts = 14336;
constexpr uint32_t first_counted_code = (122u << 9) - first_left_code;
constexpr uint32_t counted_codes =
    first_counted_code - static_cast<uint32_t>(least_counted * parts);
static_assert(counted_codes + parts * (1 - near_cap) < 0x3f80, "with a sign: an infinity or NaN");
__device__ inline float encode_left(const MapFactors& map, float z) {
  const float left = fmaxf(fmaf(-fabsf(z), map.backward, 1.0f), 0x1p-24f);
  // The low bits of 2^23 + x are x, rounded; a conversion instruction takes four times as long.
  const uint32_t count = __float_as_uint(fmaf(left, parts, 0x1p23f)) - 0x4b000000u;
  const uint32_t code = left < least_counted ? (__float_as_uint(left) >> 14) - first_left_code
                                             : count + counted_codes;
  return __uint_as_float((0x8000u | (z < 0 ? 0x4000u : 0u) | code) << 16);
}
// Returns z and the softcap's slope there, from the middle of the code's interval.
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
