// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/engine.h"

#include <cmath>

namespace logitless::cuda::sm90 {
namespace {

// Whether E gives softcapped logits well enough: z = z_target + log E is known to half of an ulp of
// E, 2^-8, which is little beside the softcap, whose square is the slope's unit. Two capped logits
// are up to 2 cap nats apart, and the target's probability is at least e^(-2 cap) / V; both must be
// normal numbers.
bool e_tells_slope(const MapFactors& map, int64_t vocab) {
  const double cap = std::fabs(map.outward);
  return cap >= 15 && std::exp2(-124.0) * static_cast<double>(vocab) * std::exp(2 * cap) < 1;
}

}  // namespace

bool HopperEngine::serves(const DeviceInfo& device) const {
  return has_code() && device.major == 9;
}

bool HopperEngine::serves(const Call& op, const LinearShape& s) const {
  const Tensor& w = op.weight;
  const bool rows = s.copies_weight || w.stride[1] == 1 || s.hidden == 1;
  return s.dtype != DType::f32 && rows && (s.copies_weight || tiled::is_aligned(w));
}

bool HopperEngine::forms_in_place(const LinearCall& call) const {
  const LinearShape& s = call.shape;
  // The kernel that keeps what form_dz reads has no room for these.
  const bool more = s.maps || s.sums.has(SumKind::squares | SumKind::above);
  return !more && e_tells_slope(call.map, s.vocab);
}

DeviceSpeed HopperEngine::speed(const DeviceInfo& device) const {
  return {.multiprocessors = static_cast<double>(device.multiprocessors)};
}

}  // namespace logitless::cuda::sm90
