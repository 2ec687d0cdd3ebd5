// SPDX-License-Identifier: Apache-2.0
// Folds a token's shards of the vocabulary, one after the other and in f64, for the CPU and CUDA
// (docs/semantics.md, "Combine"; the other backends have their own).
//   m = max m_s    a_s = (m_s - m) + log s_s    log s = log sum_s exp a_s    P_s = exp(a_s - log s)
//   H = sum_s P_s (H_s - log P_s)    sum_p_squared = sum_s P_s^2 Q_s
//   max_logprob = max_s (M_s + log P_s)
#pragma once

#include <cmath>
#include <cstdint>

#include "logitless/fields.h"
#include "src/call.h"
#include "src/host_device.h"

namespace logitless {

// One token's state on a shard, or on all shards so far; what is not given is 0, argmax -1.
struct ShardState {
  float reference = 0;     // m
  float target_logit = 0;  // -inf if in another shard
  double log_sum = 0;      // log s
  double entropy = 0, sum_p_squared = 0;
  double weighted_logit_sum = 0, mean_logit = 0, max_logprob = 0;
  int64_t argmax = -1;
};

// Returns the combined state of `first` and of `second`, whose columns follow. A shard without
// probability adds nothing, even if the rest of its state is NaN.
LOGITLESS_HOST_DEVICE inline ShardState fold(const ShardState& first, const ShardState& second) {
  const double nothing = -INFINITY;
  const auto reference_of = [](const ShardState& s) {
    return s.log_sum == -INFINITY ? -INFINITY : s.reference;
  };
  const float m1 = reference_of(first), m2 = reference_of(second);
  const bool first_leads = m1 >= m2;
  ShardState all;
  all.reference = first_leads || m1 != m1 ? m1 : m2;  // NaN stays NaN
  const auto log_of = [&](float m, const ShardState& s) {
    return m == -INFINITY ? nothing : (static_cast<double>(m) - all.reference) + s.log_sum;
  };
  const double a1 = log_of(m1, first), a2 = log_of(m2, second);
  // With a NaN neither is greater, and the difference is NaN.
  const bool more = a1 >= a2;
  const double apart = more ? a2 - a1 : a1 - a2, e = std::exp(apart), rest = std::log1p(e);
  all.log_sum = (more ? a1 : a2) + rest;
  // The greater probability is 1 / (1 + e), the other is e times that; r is the logarithm of each.
  const double most = 1 / (1 + e), least = e * most;
  const double p1 = more ? most : least, r1 = more ? -rest : apart - rest;
  const double p2 = more ? least : most, r2 = more ? apart - rest : -rest;
  all.entropy =
      (p1 == 0 ? 0 : p1 * (first.entropy - r1)) + (p2 == 0 ? 0 : p2 * (second.entropy - r2));
  all.sum_p_squared = (p1 == 0 ? 0 : p1 * p1 * first.sum_p_squared) +
                      (p2 == 0 ? 0 : p2 * p2 * second.sum_p_squared);
  const double highest1 = p1 == 0 ? nothing : first.max_logprob + r1;
  const double highest2 = p2 == 0 ? nothing : second.max_logprob + r2;
  all.max_logprob = highest1 >= highest2 || highest1 != highest1 ? highest1 : highest2;
  all.target_logit =
      first.target_logit > second.target_logit || first.target_logit != first.target_logit
          ? first.target_logit
          : second.target_logit;
  all.weighted_logit_sum = first.weighted_logit_sum + second.weighted_logit_sum;
  all.mean_logit = first.mean_logit + second.mean_logit;
  all.argmax =
      second.argmax < 0 || (first.argmax >= 0 && first_leads) ? first.argmax : second.argmax;
  return all;
}

// Folds the shards that state_of(s) reads, reading the next one while one is folded. A single shard
// is returned unchanged.
template <class StateOf>
LOGITLESS_HOST_DEVICE inline ShardState fold_shards(int64_t shards, const StateOf& state_of) {
  ShardState all = state_of(0), next = shards > 1 ? state_of(1) : all;
  for (int64_t s = 1; s < shards; ++s) {
    const ShardState here = next;
    if (s + 1 < shards) next = state_of(s + 1);
    all = fold(all, here);
  }
  return all;
}

// Combine's inputs, each [P, N], by their names in Call.
struct ShardViews {
  TensorView shard_row_reference, shard_row_log_sum, shard_target_logit, shard_entropy;
  TensorView shard_argmax, shard_weighted_logit_sum, shard_sum_p_squared, shard_mean_logit;
  TensorView shard_max_logprob;
};
inline ShardViews shard_views(const Call& call) {
  ShardViews views;
  const auto take = [](const char*, Access, TensorView& view, const Tensor& t) { view = t; };
  for_each_shard_tensor(views, call, take);
  return views;
}

// Reads a token's state on one shard: number(view) and index(view) read an element.
template <class Number, class Index>
LOGITLESS_HOST_DEVICE inline ShardState shard_state(const ShardViews& v, const Number& number,
                                                    const Index& index) {
  ShardState s;
  s.reference = number(v.shard_row_reference);
  s.target_logit = number(v.shard_target_logit);
  s.log_sum = number(v.shard_row_log_sum);
  s.entropy = number(v.shard_entropy);
  s.sum_p_squared = number(v.shard_sum_p_squared);
  s.weighted_logit_sum = number(v.shard_weighted_logit_sum);
  s.mean_logit = number(v.shard_mean_logit);
  s.max_logprob = number(v.shard_max_logprob);
  s.argmax = index(v.shard_argmax);
  return s;
}

// Rounds to the f32 members of Row, which are named like those of RowStatistics.
template <class Row>
LOGITLESS_HOST_DEVICE inline Row rounded(const ShardState& all) {
  Row row;
  row.reference = all.reference;
  row.log_sum = static_cast<float>(all.log_sum);
  row.target_logit = all.target_logit;
  row.weighted_logit_sum = static_cast<float>(all.weighted_logit_sum);
  row.entropy = static_cast<float>(all.entropy);
  row.argmax = all.argmax;
  row.sum_p_squared = static_cast<float>(all.sum_p_squared);
  row.mean_logit = static_cast<float>(all.mean_logit);
  row.shards_max_logprob = static_cast<float>(all.max_logprob);
  row.of_shards = true;
  return row;
}

}  // namespace logitless
