// SPDX-License-Identifier: Apache-2.0
// The row formulas of docs/semantics.md, in f32, shared by the backends that are judged (the
// reference has its own).
//   loss_i = a (nll + lambda lse^2),  nll = (1-eps) c_t (lse - z_t) + (eps/V) sum_j c_j (lse - z_j)
//   dz_ij  = probability p_ij - smoothing c_j - onehot [j=t] - entropy p_ij (log p_ij + H)
#pragma once

#include <cmath>
#include <cstdint>

#include "logitless/ops.h"

#ifdef __CUDACC__
#define LOGITLESS_HOST_DEVICE __host__ __device__
#else
#define LOGITLESS_HOST_DEVICE
#endif

namespace logitless {

// raw -> z = softcap(scale raw) / temperature, and what dz/draw needs.
struct LogitMap {
  float scale = 1;
  float softcap = 0;  // 0: none
  float inv_softcap = 0;
  float temperature = 1;
  float inv_temperature = 1;
  bool identity() const { return scale == 1 && softcap == 0 && temperature == 1; }
};

inline LogitMap logit_map(const LossOptions& o) {
  return {o.logit_scale, o.softcap, o.softcap > 0 ? 1 / o.softcap : 0, o.temperature,
          1 / o.temperature};
}

// What the loss of a row needs of it.
struct RowState {
  float reference = 0;           // m, the row maximum or near it
  float log_sum = 0;             // log sum_j exp(z_j - m)
  float target_logit = 0;        // z_t
  float weighted_logit_sum = 0;  // sum_j c_j z_j; only with label smoothing
  float entropy = 0;             // only where asked for
  int64_t argmax = -1;           // only where asked for
  LOGITLESS_HOST_DEVICE float lse() const { return reference + log_sum; }
};

// The constants of a call.
struct LossConstants {
  float smoothing = 0;            // eps
  float smoothing_per_class = 0;  // eps / V
  float class_weight_sum = 0;     // sum_j c_j over the whole vocabulary
  float z_loss = 0;               // lambda
};

// target_weight = c_t, token_weight = a_i.
LOGITLESS_HOST_DEVICE inline float row_loss(const LossConstants& k, const RowState& s,
                                            float target_weight, float token_weight) {
  const float lse = s.lse();
  const float onehot = (1 - k.smoothing) * target_weight;
  // 0 times the inf of a masked target is 0; a NaN of the row stays.
  float loss = onehot == 0 ? 0 * lse : onehot * ((s.reference - s.target_logit) + s.log_sum);
  if (k.smoothing > 0)
    loss += k.smoothing_per_class * (k.class_weight_sum * lse - s.weighted_logit_sum);
  loss *= token_weight;
  // The weight before the square, which may overflow: a token of weight 0 has no loss.
  if (k.z_loss > 0) loss += token_weight * k.z_loss * lse * lse;
  return loss;
}

// The coefficients of dz of one row, without the call's common factor (see GradientScale).
struct RowGradient {
  float reference = 0;  // p_j = exp((z_j - reference) - log_sum)
  float log_sum = 0;
  float probability = 0;    // factor of p_j
  float smoothing = 0;      // factor of c_j, subtracted
  float onehot = 0;         // subtracted at the target
  float entropy = 0;        // factor of p_j (log p_j + H), subtracted
  float entropy_value = 0;  // H
};

// g = upstream gradient of this row's loss, already relative to the call's common factor; the
// others likewise.
LOGITLESS_HOST_DEVICE inline RowGradient row_gradient(const LossConstants& k, const RowState& s,
                                                      float target_weight, float token_weight,
                                                      float g, float grad_lse,
                                                      float grad_target_logit, float grad_entropy) {
  const float ga = g * token_weight;
  const float w = (1 - k.smoothing) * target_weight + k.smoothing_per_class * k.class_weight_sum;
  const float z_term = k.z_loss > 0 ? 2 * k.z_loss * s.lse() : 0;
  return {.reference = s.reference,
          .log_sum = s.log_sum,
          .probability = ga * (w + z_term) + grad_lse,
          .smoothing = ga * k.smoothing_per_class,
          .onehot = ga * (1 - k.smoothing) * target_weight - grad_target_logit,
          .entropy = grad_entropy,
          .entropy_value = s.entropy};
}

}  // namespace logitless
