// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/engine.h"

#include <cmath>

namespace logitless::cuda::sm90 {
namespace {

// Whether softcapped logits can be computed from E: z = z_target + log E is known to 2^-8, half an
// ulp of E, which is small relative to the softcap, in units of which the slope is computed. Two
// capped logits are up to 2 cap nats apart, and the target's probability is at least e^(-2 cap) /
// V; both must be normal numbers.
bool e_tells_slope(const MapFactors& map, int64_t vocab) {
  const double cap = std::fabs(map.outward);
  return cap >= 15 && std::exp2(-124.0) * static_cast<double>(vocab) * std::exp(2 * cap) < 1;
}

}  // namespace

bool HopperEngine::serves(const DeviceInfo& device) const {
  return has_code() && device.major == 9;
}

bool HopperEngine::serves(const Call& op, const LinearShape& s) const {
  return s.dtype != DType::f32 && has_aligned_rows(op.weight, s);
}

bool HopperEngine::forms_in_place(const LinearCall& call) const {
  const LinearShape& s = call.shape;
  // Maps per row, squares, and counts above the target leave no registers for what form_dz needs.
  const bool more = s.maps || s.sums.has(SumKind::squares | SumKind::above);
  return !more && e_tells_slope(call.map, s.vocab);
}

DeviceSpeed HopperEngine::speed(const DeviceInfo& device) const {
  return {.multiprocessors = static_cast<double>(device.multiprocessors)};
}

}  // namespace logitless::cuda::sm90
