// SPDX-License-Identifier: Apache-2.0
// The map from raw to z, and its factors in f32, computed on the host.
#pragma once

#include <cfloat>
#include <cmath>

#include "logitless/ops.h"
#include "src/row/coefficients.h"

namespace logitless {

// raw -> z = softcap(scale raw) / temperature, and what dz/draw needs.
struct LogitMap {
  float scale = 1;
  float softcap = 0;  // 0: none
  float temperature = 1;
  bool identity() const { return scale == 1 && softcap == 0 && temperature == 1; }
};

inline LogitMap logit_map(const LossOptions& o) {
  return {o.logit_scale, o.softcap, o.temperature};
}

inline MapFactors map_factors(const LogitMap& map) {
  MapFactors f{};
  f.slope = static_cast<float>(static_cast<double>(map.scale) / map.temperature);
  f.capped = map.softcap > 0;
  f.identity = map.identity();
  if (!f.capped) return f;
  const double inward = 2 * std::fabs(static_cast<double>(map.scale)) / map.softcap;
  const double outward =
      std::copysign(static_cast<double>(map.softcap) / map.temperature, map.scale);
  f.inward = static_cast<float>(inward);
  f.inward_low = static_cast<float>(inward - f.inward);
  // With a tiny scale 21 / inward is beyond f32. The limit is then the largest finite number, which
  // only infinity exceeds, although tanh may be below 1 there. A scale of 0 has no limit: 0 times
  // an infinite logit is NaN.
  f.limit =
      map.scale == 0 ? HUGE_VALF : static_cast<float>(std::fmin(21 / inward, double{FLT_MAX}));
  f.outward = static_cast<float>(outward);
  f.outward_low = static_cast<float>(outward - f.outward);
  // The inverse of the rounded `outward`, so that its product with a z at the cap is within
  // rounding of 1.
  f.backward = static_cast<float>(1 / std::fabs(static_cast<double>(f.outward)));
  return f;
}

}  // namespace logitless
