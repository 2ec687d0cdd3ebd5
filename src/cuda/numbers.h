// SPDX-License-Identifier: Apache-2.0
// The map from raw logits to z, as the kernels apply it.
#pragma once

#include <cfloat>
#include <cmath>

#include "logitless/ops.h"

namespace logitless::cuda {

// raw -> z, with the factors each rounded once, those of the softcap in two parts:
//   z = slope raw  or  z = outward tanh(inward |raw| / 2) with raw's sign.
struct MapFactors {
  float slope = 1;                     // scale / temperature
  float inward = 0, inward_low = 0;    // 2 |scale / softcap|
  float limit = 0;                     // above this |raw|, tanh is 1
  float outward = 0, outward_low = 0;  // softcap / temperature with the sign of scale
  float backward = 0;                  // temperature / softcap
  bool capped = false, identity = true;
};

inline MapFactors map_factors(const LossOptions& o) {
  MapFactors f{};
  f.slope = static_cast<float>(static_cast<double>(o.logit_scale) / o.temperature);
  f.capped = o.softcap > 0;
  f.identity = !f.capped && o.logit_scale == 1 && o.temperature == 1;
  if (!f.capped) return f;
  const double inward = 2 * std::fabs(static_cast<double>(o.logit_scale)) / o.softcap;
  const double outward =
      std::copysign(static_cast<double>(o.softcap) / o.temperature, o.logit_scale);
  f.inward = static_cast<float>(inward);
  f.inward_low = static_cast<float>(inward - f.inward);
  // Of a tiny scale the limit is the largest finite number, whose own tanh may be less than 1: only
  // infinity is above it. Scale 0 has no limit: 0 times an infinite logit is NaN.
  f.limit =
      o.logit_scale == 0 ? HUGE_VALF : static_cast<float>(std::fmin(21 / inward, double{FLT_MAX}));
  f.outward = static_cast<float>(outward);
  f.outward_low = static_cast<float>(outward - f.outward);
  f.backward = static_cast<float>(static_cast<double>(o.temperature) / o.softcap);
  return f;
}

}  // namespace logitless::cuda
