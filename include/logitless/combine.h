// SPDX-License-Identifier: Apache-2.0
// Combines what Forward wrote of one token on each shard of the vocabulary, on the host: a few
// operations a token. Combine in shard order for the same bits everywhere. The op Combine (ops.h)
// does this where the tensors are, for all tokens. The formulas are those of docs/semantics.md,
// "Combine":
//   m = max m_s    a_s = (m_s - m) + log s_s    log s = log sum_s exp a_s    P_s = exp(a_s - log s)
//   H = sum_s P_s (H_s - log P_s)    sum_p_squared = sum_s P_s^2 Q_s, Q_s the shard's own
//   max_logprob = max_s (M_s + log P_s), M_s the shard's own
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "logitless/ops.h"

namespace logitless {

// What Forward wrote of one token on a shard, or what several shards combine to.
struct TokenState {
  // The shard's row maximum, or near it.
  float row_reference = -std::numeric_limits<float>::infinity();
  float row_log_sum = 0;
  float target_logit =
      -std::numeric_limits<float>::infinity();  // -inf if another shard has the target
  float entropy = 0;
  float weighted_logit_sum = 0;
  int64_t argmax = -1;  // a column of the whole vocabulary
  float sum_p_squared = 0;
  float mean_logit = 0;  // the sum over the shard's columns, divided by V of the whole vocabulary
  float max_logprob = 0;
};

// Combines two states in f64, rounding each number to f32 once. A shard whose logits are all -inf
// has no probability: NaN in the rest of its state does not matter.
inline TokenState combine(const TokenState& a, const TokenState& b) {
  constexpr float least = -std::numeric_limits<float>::infinity();
  const auto reference_of = [](const TokenState& s) {
    return s.row_log_sum == least ? least : s.row_reference;
  };
  const float ma = reference_of(a), mb = reference_of(b);
  const bool a_leads = ma >= mb;
  TokenState c;
  c.row_reference = a_leads || std::isnan(ma) ? ma : mb;
  const auto log_of = [&](float m, const TokenState& s) {
    return m == least ? double(least) : (double(m) - c.row_reference) + s.row_log_sum;
  };
  const double la = log_of(ma, a), lb = log_of(mb, b);
  // The greater probability is 1 / (1 + e), the lesser e / (1 + e). With a NaN `more` is false.
  const bool more = la >= lb;
  const double apart = more ? lb - la : la - lb, e = std::exp(apart), rest = std::log1p(e);
  c.row_log_sum = float((more ? la : lb) + rest);
  const double most = 1 / (1 + e), fewest = e * most;
  const double pa = more ? most : fewest, ra = more ? -rest : apart - rest;  // ra = log pa
  const double pb = more ? fewest : most, rb = more ? apart - rest : -rest;
  c.entropy = float((pa == 0 ? 0 : pa * (a.entropy - ra)) + (pb == 0 ? 0 : pb * (b.entropy - rb)));
  c.target_logit = a.target_logit > b.target_logit || std::isnan(a.target_logit) ? a.target_logit
                                                                                 : b.target_logit;
  c.weighted_logit_sum = float(double(a.weighted_logit_sum) + b.weighted_logit_sum);
  c.sum_p_squared =
      float((pa == 0 ? 0 : pa * pa * a.sum_p_squared) + (pb == 0 ? 0 : pb * pb * b.sum_p_squared));
  c.mean_logit = float(double(a.mean_logit) + b.mean_logit);
  const double highest_a = pa == 0 ? least : a.max_logprob + ra;
  const double highest_b = pb == 0 ? least : b.max_logprob + rb;
  c.max_logprob = float(highest_a >= highest_b || std::isnan(highest_a) ? highest_a : highest_b);
  c.argmax = b.argmax < 0 || (a.argmax >= 0 && a_leads) ? a.argmax : b.argmax;
  return c;
}

// Merges two shards' lists of their k largest logits into the whole vocabulary's, as the op Combine
// does. The outputs must not overlap the inputs.
inline void combine_top(int64_t k, const float* a_logits, const int64_t* a_ids,
                        const float* b_logits, const int64_t* b_ids, float* logits, int64_t* ids) {
  const bool unordered = k > 0 && (std::isnan(a_logits[0]) || std::isnan(b_logits[0]));
  for (int64_t r = 0, a = 0, b = 0; r < k; ++r) {
    if (unordered) {
      logits[r] = std::numeric_limits<float>::quiet_NaN(), ids[r] = r;
      continue;
    }
    // The id -1 means no column, and sorts last.
    const bool equal = a_logits[a] == b_logits[b];
    const bool first = equal ? uint64_t(a_ids[a]) <= uint64_t(b_ids[b]) : a_logits[a] > b_logits[b];
    logits[r] = first ? a_logits[a] : b_logits[b];
    ids[r] = first ? a_ids[a] : b_ids[b];
    (first ? a : b) += 1;
  }
}

inline float lse(const TokenState& s) { return s.row_reference + s.row_log_sum; }

// The log-probability of the target, never above 0; NaN if the state is.
inline float logprob(const TokenState& s) {
  const float x = (s.target_logit - s.row_reference) - s.row_log_sum;
  return x > 0 ? 0 : x;
}

// The loss of one valid token. target_weight is c_t, class_weight_sum the sum of c_j over the whole
// vocabulary of `vocab_size`, absent without class weights. A term whose factor is 0 is 0, even if
// its logit is -inf.
inline float token_loss(const TokenState& s, const LossOptions& o, int64_t vocab_size,
                        float target_weight = 1, std::optional<double> class_weight_sum = {},
                        float token_weight = 1) {
  const double whole = double(s.row_reference) + s.row_log_sum;
  const double onehot = (1.0 - o.label_smoothing) * target_weight;
  double loss = onehot == 0 ? 0 * whole
                            : onehot * ((double(s.row_reference) - s.target_logit) + s.row_log_sum);
  if (o.label_smoothing > 0) {
    const double sum = class_weight_sum.value_or(double(vocab_size));
    loss += double(o.label_smoothing) / double(vocab_size) * (sum * whole - s.weighted_logit_sum);
  }
  if (o.z_loss > 0) loss += o.z_loss * whole * whole;
  return float(token_weight * loss);
}

}  // namespace logitless
