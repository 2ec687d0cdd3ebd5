// SPDX-License-Identifier: Apache-2.0
// This file combines shards of the vocabulary, with the bounds of what an f64 fold and roundings to
// f32 may make of them.
#include "src/reference/shards.h"

#include <cmath>
#include <limits>

#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// So much of its summands a sum in f64 may lose, whatever cancels.
constexpr double kFolded = 0x1p-40;

// Makes an estimate of a sum, which is rounded to f32 once; `magnitude` is that of its summands.
Estimate rounded(double value, double magnitude) {
  return {value, 2 * u32 * std::fabs(value) + kFolded * magnitude + tiny32};
}

// Makes an estimate of the shards' sum.
Estimate sum_of(const std::vector<double>& values, const Shards& shards, int64_t token) {
  if (values.empty()) return {};
  double sum = 0, magnitude = 0;
  for (int64_t s = 0; s < shards.count; ++s) {
    const double x = values[s * shards.tokens + token];
    sum += x;
    magnitude += std::fabs(x);
  }
  return rounded(sum, magnitude);
}

// Returns the shards of a token that have some probability, or may have: NaN may.
std::vector<int64_t> shards_with_probability(const Shards& shards, int64_t token) {
  std::vector<int64_t> found;
  for (int64_t s = 0; s < shards.count; ++s) {
    const int64_t at = s * shards.tokens + token;
    if (shards.row_reference[at] != -kInfinity && shards.row_log_sum[at] != -kInfinity) {
      found.push_back(at);
    }
  }
  return found;
}

// Returns the greatest of them, or NaN where one is NaN.
double highest(const std::vector<double>& values, const std::vector<int64_t>& places) {
  double most = -kInfinity;
  for (const int64_t at : places) {
    if (std::isnan(values[at])) return values[at];
    if (values[at] > most) most = values[at];
  }
  return most;
}

// Makes m, log s, entropy and sum_p_squared of the shards with probability.
void add_probabilities(const Shards& shards, const std::vector<int64_t>& places, WholeRow* row) {
  row->reference = highest(shards.row_reference, places);
  std::vector<double> a;
  for (const int64_t at : places) {
    a.push_back((shards.row_reference[at] - row->reference) + shards.row_log_sum[at]);
  }
  size_t leader = 0;
  for (size_t k = 1; k < a.size(); ++k) {
    if (std::isnan(a[k]) || a[k] > a[leader]) leader = k;
  }
  // The leader's own probability is 1 less what the others have, however little that is: its
  // logarithm is then not 0.
  double others = 0;
  for (size_t k = 0; k < a.size(); ++k) others += k == leader ? 0 : std::exp(a[k] - a[leader]);
  const double log_total = std::log1p(others);
  // Without any probability there is no sum, as in a row of -inf.
  const double log_sum =
      a.empty() ? std::numeric_limits<double>::quiet_NaN() : a[leader] + log_total;
  row->log_sum = rounded(log_sum, 1 + std::fabs(log_sum));
  double entropy = 0, entropy_size = 0, squares = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    const double log_p = (a[k] - a[leader]) - log_total, p = std::exp(log_p);
    if (p == 0) continue;
    if (!shards.entropy.empty()) {
      const double h = shards.entropy[places[k]];
      entropy += p * (h - log_p);
      entropy_size += p * (std::fabs(h) + std::fabs(log_p));
    }
    if (!shards.sum_p_squared.empty()) squares += p * p * shards.sum_p_squared[places[k]];
  }
  if (std::isnan(log_sum)) entropy = squares = log_sum;
  row->entropy = rounded(entropy, entropy_size);
  row->sum_p_squared = rounded(squares, squares);
}

// Nothing is added up, so nothing of one shard is another than it was given.
void take_the_only_one(const Shards& shards, int64_t token, WholeRow* row) {
  row->reference = shards.row_reference[token];
  row->log_sum = {shards.row_log_sum[token], 0};
  if (!shards.entropy.empty()) row->entropy = {shards.entropy[token], 0};
  if (!shards.sum_p_squared.empty()) row->sum_p_squared = {shards.sum_p_squared[token], 0};
}

std::vector<int64_t> accepted_argmax(const Shards& shards, int64_t token, const WholeRow& row,
                                     const std::vector<int64_t>& places) {
  if (shards.argmax.empty()) return {-1};
  for (const int64_t at : places) {
    if (shards.row_reference[at] == row.reference) return {shards.argmax[at]};
  }
  // There is a NaN, or nothing but -inf: any column may be named.
  std::vector<int64_t> any;
  for (int64_t s = 0; s < shards.count; ++s) {
    any.push_back(shards.argmax[s * shards.tokens + token]);
  }
  return any;
}

}  // namespace

Shards read_shards(const Call& call) {
  Shards shards;
  shards.count = call.shards();
  shards.tokens = call.tokens();
  const auto given = [](const TensorView& view) {
    return view ? read(view) : std::vector<double>{};
  };
  shards.row_reference = read(call.shard_row_reference);
  shards.row_log_sum = read(call.shard_row_log_sum);
  shards.target_logit = read(call.shard_target_logit);
  shards.entropy = given(call.shard_entropy);
  shards.weighted_logit_sum = given(call.shard_weighted_logit_sum);
  shards.sum_p_squared = given(call.shard_sum_p_squared);
  shards.mean_logit = given(call.shard_mean_logit);
  if (call.shard_argmax) shards.argmax = read_indices(call.shard_argmax);
  return shards;
}

WholeRow combine(const Shards& shards, int64_t token) {
  WholeRow row;
  std::vector<int64_t> all;
  for (int64_t s = 0; s < shards.count; ++s) all.push_back(s * shards.tokens + token);
  const std::vector<int64_t> places = shards_with_probability(shards, token);
  if (shards.count == 1) {
    take_the_only_one(shards, token, &row);
  } else {
    add_probabilities(shards, places, &row);
  }
  row.target_logit = highest(shards.target_logit, all);
  row.weighted_logit_sum = sum_of(shards.weighted_logit_sum, shards, token);
  row.mean_logit = sum_of(shards.mean_logit, shards, token);
  row.argmax = accepted_argmax(shards, token, row, places);
  return row;
}

Estimate combined_lse(const WholeRow& row) {
  const double lse = row.reference + row.log_sum.value;
  return {lse, 2 * u32 * (std::fabs(row.log_sum.value) + std::fabs(lse)) + kFolded};
}

Estimate combined_logprob(const WholeRow& row) {
  const double distance = row.target_logit - row.reference;
  const double log_p = distance - row.log_sum.value, value = log_p > 0 ? 0 : log_p;
  return {value, combined_lse(row).error + 2 * u32 * (std::fabs(distance) + std::fabs(value))};
}

}  // namespace logitless::reference
