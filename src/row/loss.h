// SPDX-License-Identifier: Apache-2.0
// The loss of a row (docs/semantics.md) in f32, for CPU and CUDA; other backends have their own.
//   loss_i = a (nll + lambda lse^2),  nll = (1-eps) c_t (lse - z_t) + (eps/V) sum_j c_j (lse - z_j)
#pragma once

#include <cstdint>

#include "logitless/ops.h"
#include "src/host_device.h"
#include "src/row/coefficients.h"
#include "src/row/state.h"

namespace logitless {

// `whole` is V of the whole vocabulary and `sum` the sum of its class weights.
LOGITLESS_HOST_DEVICE inline LossConstants loss_constants(const LossOptions& o, int64_t whole,
                                                          double sum) {
  LossConstants k{.smoothing = o.label_smoothing, .z_loss = o.z_loss};
  if (!(k.smoothing > 0)) return k;
  const double smoothing = k.smoothing;
  k.smoothing_per_class = static_cast<float>(smoothing / static_cast<double>(whole));
  k.class_weight_sum = static_cast<float>(sum);
  return k;
}

// target_weight is c_t, token_weight a_i.
LOGITLESS_HOST_DEVICE inline float row_loss(const LossConstants& k, const RowState& s,
                                            float target_weight, float token_weight) {
  const float lse = s.lse();
  const float onehot = (1 - k.smoothing) * target_weight;
  // 0 times the inf of a masked target is 0; a NaN of the row stays NaN.
  float loss = onehot == 0 ? 0 * lse : onehot * ((s.reference - s.target_logit) + s.log_sum);
  if (k.smoothing > 0)
    loss += k.smoothing_per_class * (k.class_weight_sum * lse - s.weighted_logit_sum);
  loss *= token_weight;
  // Multiplies by the weight before squaring, which may overflow: weight 0 means no loss.
  if (k.z_loss > 0) loss += token_weight * k.z_loss * lse * lse;
  return loss;
}

}  // namespace logitless
