// SPDX-License-Identifier: Apache-2.0
// Each statistic of a token in two ways: from its row, with bounds for f32 arithmetic, and from its
// shards, with bounds for a fold in f64 and one rounding to f32.
#include "src/reference/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
// The relative error of an f64 sum, in units of its terms' magnitudes, however they cancel.
constexpr double kFolded = 0x1p-40;

// A sum that is rounded to f32 once; `magnitude` is the sum of its summands' magnitudes.
Estimate rounded(double value, double magnitude) {
  return {value, 2 * u32 * std::fabs(value) + kFolded * magnitude + tiny32};
}

// Returns the shards' values of an input; empty if it was not given.
const std::vector<double>& given(const WholeRow& whole, std::string_view name) {
  static const std::vector<double> nothing;
  const auto found = whole.given.find(name);
  return found == whole.given.end() ? nothing : found->second;
}

Estimate sum_of(const std::vector<double>& values) {
  if (values.empty()) return {};
  double sum = 0, magnitude = 0;
  for (const double x : values) sum += x, magnitude += std::fabs(x);
  return rounded(sum, magnitude);
}

// NaN if any is NaN.
double highest(const std::vector<double>& values) {
  double most = -kInfinity;
  for (const double x : values) {
    if (std::isnan(x)) return x;
    most = std::max(most, x);
  }
  return most;
}

// Computes m, log s and the logarithms of the shards' probabilities.
void add_probabilities(WholeRow* whole) {
  const std::vector<double>& reference = given(*whole, "shard_row_reference");
  const std::vector<double>& log_sum = given(*whole, "shard_row_log_sum");
  std::vector<double> references;
  for (size_t s = 0; s < reference.size(); ++s) {
    if (reference[s] == -kInfinity || log_sum[s] == -kInfinity) continue;
    whole->places.push_back(s);
    references.push_back(reference[s]);
  }
  if (whole->is_one()) {  // nothing is added, so every number must be as given
    whole->reference = reference[0];
    whole->log_sum = {log_sum[0], 0};
    return;
  }
  whole->reference = highest(references);
  std::vector<double> a;
  for (const size_t s : whole->places) {
    a.push_back((reference[s] - whole->reference) + log_sum[s]);
  }
  size_t leader = 0;
  for (size_t k = 1; k < a.size(); ++k) {
    if (std::isnan(a[k]) || a[k] > a[leader]) leader = k;
  }
  // The largest shard's probability is 1 minus the others', so that its logarithm is not 0 however
  // small that is.
  double others = 0;
  for (size_t k = 0; k < a.size(); ++k) others += k == leader ? 0 : std::exp(a[k] - a[leader]);
  const double log_total = std::log1p(others);
  for (const double x : a) whole->log_probability.push_back((x - a[leader]) - log_total);
  // Without any probability there is no sum, as in a row of -inf.
  const double total = a.empty() ? kNan : a[leader] + log_total;
  whole->log_sum = rounded(total, 1 + std::fabs(total));
}

// The sum of term(p, log p, x) over the shards with probability.
template <class Term>
Estimate fold(const WholeRow& whole, std::string_view name, const Term& term) {
  const std::vector<double>& values = given(whole, name);
  if (values.empty()) return {};
  if (whole.is_one()) return {values[0], 0};
  if (std::isnan(whole.log_sum.value)) return rounded(kNan, kNan);
  double sum = 0, magnitude = 0;
  for (size_t k = 0; k < whole.places.size(); ++k) {
    const double log_p = whole.log_probability[k], p = std::exp(log_p);
    if (p == 0) continue;
    const Estimate x = term(p, log_p, values[whole.places[k]]);
    sum += x.value;
    magnitude += x.error;
  }
  return rounded(sum, magnitude);
}

bool has_bounds(const RowOf& of) { return !of.row.logit_error.empty(); }

Estimate lse(const RowOf& of) { return {of.row.lse, of.row.lse_error}; }

Estimate target_logit(const RowOf& of) { return logit_at(of, of.token.column); }
Estimate whole_target_logit(const WholeRow& whole) { return {whole.target_logit, 0}; }

Estimate entropy(const RowOf& of) { return {of.row.entropy, of.row.entropy_error}; }
Estimate whole_entropy(const WholeRow& whole) {
  return fold(whole, "shard_entropy", [](double p, double log_p, double h) -> Estimate {
    return {p * (h - log_p), p * (std::fabs(h) + std::fabs(log_p))};
  });
}

// Of logits that are equal in f32 the first column wins, as in the order of top_ids.
size_t highest_column(const Row& row) {
  size_t best = 0;
  for (size_t j = 0; j < row.z.size() && !std::isnan(row.z[best]); ++j) {
    if (static_cast<float>(row.z[j]) > static_cast<float>(row.z[best]) || std::isnan(row.z[j])) {
      best = j;
    }
  }
  return best;
}

Index argmax(const RowOf& of) {
  const Row& row = of.row;
  const size_t best = highest_column(row);
  const int64_t start = of.call.vocab_start();
  Index index{static_cast<int64_t>(best) + start, {}};
  for (size_t j = 0; j < row.z.size(); ++j) {
    const double slack = has_bounds(of) ? row.logit_error[j] + row.logit_error[best] : 0;
    // With a NaN among the logits any column may be named.
    if (std::isnan(row.z[best]) || row.z[j] >= row.z[best] - slack) {
      index.accepted.push_back(static_cast<int64_t>(j) + start);
    }
  }
  return index;
}
Index whole_argmax(const WholeRow& whole) {
  const std::vector<double>& values = given(whole, "shard_argmax");
  if (values.empty()) return {-1, {-1}};
  for (const size_t s : whole.places) {
    if (given(whole, "shard_row_reference")[s] != whole.reference) continue;
    const auto named = static_cast<int64_t>(values[s]);
    return {named, {named}};
  }
  // With NaN, or only -inf, any column may be named.
  Index any{static_cast<int64_t>(values[0]), {}};
  for (const double x : values) any.accepted.push_back(static_cast<int64_t>(x));
  return any;
}

}  // namespace

Estimate logit_at(const RowOf& of, int64_t column) {
  if (column < 0) return {-kInfinity, 0};
  const double z = of.row.z[column];
  if (!has_bounds(of)) return {z, 0};
  return {z, of.row.logit_error[column] + 2 * u32 * std::fabs(z)};
}

Estimate row_reference(const RowOf& of) {
  const Row& row = of.row;
  if (!has_bounds(of) || !std::isfinite(row.reference)) return {row.reference, 0};
  double most = row.reference;
  for (size_t j = 0; j < row.z.size(); ++j) most = std::max(most, row.z[j] + row.logit_error[j]);
  return {row.reference, most - row.reference};
}
Estimate row_log_sum(const RowOf& of) {
  const Row& row = of.row;
  return {row.log_sum, row.lse_error - u32 * std::fabs(row.lse) + row_reference(of).error};
}

namespace {

Estimate whole_reference(const WholeRow& whole) { return {whole.reference, 0}; }
Estimate whole_log_sum(const WholeRow& whole) { return whole.log_sum; }

Estimate weighted_sum(const Row& row, const std::vector<double>& class_weight) {
  Estimate sum;
  const double log_v = std::log2(static_cast<double>(row.z.size()));
  for (size_t j = 0; j < row.z.size(); ++j) {
    const double c = class_weight[j];
    if (c == 0) continue;
    sum.value += c * row.z[j];
    if (row.logit_error.empty()) continue;
    sum.error += std::fabs(c) * (row.logit_error[j] + u32 * (log_v + 2) * std::fabs(row.z[j]));
  }
  sum.error += u32 * std::fabs(sum.value);
  if (!row.logit_error.empty()) sum.error += static_cast<double>(row.z.size()) * tiny32;
  return sum;
}
Estimate weighted_logit_sum(const RowOf& of) {
  return weighted_sum(of.row, of.tokens.class_weight);
}
Estimate whole_weighted_logit_sum(const WholeRow& whole) { return whole.weighted_logit_sum; }

}  // namespace

Estimate logprob(const RowOf& of) {
  if (of.token.column < 0) return {-kInfinity, 0};
  const Row& row = of.row;
  const double z = row.z[of.token.column], log_p = (z - row.reference) - row.log_sum;
  const double value = log_p > 0 ? 0 : log_p;
  if (!has_bounds(of)) return {value, 0};
  return {value, row.lse_error + row.logit_error[of.token.column] + 2 * u32 * std::fabs(z) +
                     2 * u32 * std::fabs(value)};
}
namespace {

Estimate whole_logprob(const WholeRow& whole) {
  const double distance = whole.target_logit - whole.reference;
  const double log_p = distance - whole.log_sum.value, value = log_p > 0 ? 0 : log_p;
  return {value, combined_lse(whole).error + 2 * u32 * (std::fabs(distance) + std::fabs(value))};
}

// Whether a column's logit is above the target's, and whether after rounding it must be, or may be.
struct Above {
  bool is, surely, perhaps;
};
Above above_target(const RowOf& of, size_t j) {
  const Row& row = of.row;
  const auto column = static_cast<size_t>(of.token.column);
  const double z = row.z[j], target = row.z[column];
  if (j == column) return {false, false, false};
  if (std::isnan(z) || std::isnan(target)) return {false, false, true};
  const double rounding = std::isfinite(target) ? 2 * u32 * std::fabs(target) : 0;
  const double slack = has_bounds(of) ? row.logit_error[j] + row.logit_error[column] + rounding : 0;
  const bool is = z > target;
  // Two infinities are equal whatever their errors.
  return {is, is && z - target > slack, is || (std::isfinite(z) && target - z <= slack)};
}

Index rank(const RowOf& of) {
  const Row& row = of.row;
  Index index{0, {}};
  int64_t least = 0, most = 0;
  for (size_t j = 0; j < row.z.size(); ++j) {
    const Above above = above_target(of, j);
    index.value += above.is ? 1 : 0;
    least += above.surely ? 1 : 0;
    most += above.perhaps ? 1 : 0;
  }
  if (std::ranges::any_of(row.z, [](double z) { return std::isnan(z); })) {
    least = 0, most = static_cast<int64_t>(row.z.size()) - 1;
  }
  for (int64_t r = least; r <= most; ++r) index.accepted.push_back(r);
  return index;
}

Estimate sum_p_squared(const RowOf& of) {
  const Row& row = of.row;
  Estimate sum;
  for (size_t j = 0; j < row.z.size(); ++j) {
    const double p = row.probability[j];
    sum.value += p * p;
    if (has_bounds(of)) sum.error += 2 * p * row.probability_error[j];
  }
  const double log_v = std::log2(static_cast<double>(row.z.size()));
  sum.error += 4 * u32 * (log_v + 3) * sum.value + tiny32;
  return sum;
}
Estimate whole_sum_p_squared(const WholeRow& whole) {
  return fold(whole, "shard_sum_p_squared", [](double p, double, double squares) -> Estimate {
    return {p * p * squares, p * p * squares};
  });
}

Estimate mean_logit(const RowOf& of) {
  const auto classes = static_cast<double>(of.call.vocab_total());
  Estimate sum = weighted_sum(of.row, std::vector<double>(of.row.z.size(), 1.0));
  sum.value /= classes;
  sum.error = sum.error / classes + u32 * std::fabs(sum.value) + tiny32;
  return sum;
}
Estimate whole_mean_logit(const WholeRow& whole) {
  return sum_of(given(whole, "shard_mean_logit"));
}

Estimate max_logprob(const RowOf& of) {
  if (of.row.log_sum == -kInfinity) return {kNan, 0};  // a shard of -inf alone
  return {-of.row.log_sum, row_log_sum(of).error};
}
Estimate whole_max_logprob(const WholeRow& whole) {
  const std::vector<double>& values = given(whole, "shard_max_logprob");
  if (values.empty()) return {};
  if (whole.is_one()) return {values[0], 0};
  if (std::isnan(whole.log_sum.value)) return {kNan, 0};
  std::vector<double> all;
  double magnitude = 0;
  for (size_t k = 0; k < whole.places.size(); ++k) {
    const double log_p = whole.log_probability[k], own = values[whole.places[k]];
    if (std::exp(log_p) == 0) continue;
    all.push_back(own + log_p);
    magnitude = std::max(magnitude, std::fabs(own) + std::fabs(log_p));
  }
  return rounded(highest(all), magnitude);
}

// Columns that the rank may or may not count add an error as large as themselves.
Estimate mass_above(const RowOf& of) {
  const Row& row = of.row;
  if (std::isnan(row.log_sum)) return {kNan, 0};
  Estimate sum;
  for (size_t j = 0; j < row.z.size(); ++j) {
    const Above above = above_target(of, j);
    if (above.is) sum.value += row.probability[j];
    if (!has_bounds(of) || !above.perhaps) continue;
    sum.error += row.probability_error[j] + (above.surely ? 0 : row.probability[j]);
  }
  sum.value = std::min(sum.value, 1.0);
  const double log_v = std::log2(static_cast<double>(row.z.size()));
  if (has_bounds(of)) sum.error += 4 * u32 * (log_v + 3) * sum.value + tiny32;
  return sum;
}

constexpr Statistic kStatistics[] = {
    {"lse", {lse}, {combined_lse}},
    {"target_logit", {target_logit}, {whole_target_logit}},
    {"entropy", {entropy}, {whole_entropy}},
    {"argmax", {nullptr, argmax}, {nullptr, whole_argmax}},
    {"row_reference", {row_reference}, {whole_reference}},
    {"row_log_sum", {row_log_sum}, {whole_log_sum}},
    {"weighted_logit_sum", {weighted_logit_sum}, {whole_weighted_logit_sum}},
    {"logprob", {logprob}, {whole_logprob}},
    {"rank", {nullptr, rank}, {nullptr, nullptr}},
    {"sum_p_squared", {sum_p_squared}, {whole_sum_p_squared}},
    {"mean_logit", {mean_logit}, {whole_mean_logit}},
    {"max_logprob", {max_logprob}, {whole_max_logprob}},
    {"mass_above", {mass_above}, {nullptr, nullptr}}};

}  // namespace

std::span<const Statistic> statistics() { return kStatistics; }

Shards read_shards(const Call& call) {
  Shards shards{call.shards(), call.tokens(), {}};
  for (const Field& field : call.fields()) {
    if (!field.given() || !field.name.starts_with("shard_")) continue;
    if (field.name == "shard_argmax" || field.name == "shard_top_ids") {
      const std::vector<int64_t> indices = read_indices(*field.view);
      shards.given[field.name].assign(indices.begin(), indices.end());
    } else {
      shards.given[field.name] = read(*field.view);
    }
  }
  return shards;
}

WholeRow combine(const Shards& shards, int64_t token) {
  WholeRow whole;
  for (const auto& [name, values] : shards.given) {
    if (name.starts_with("shard_top")) continue;  // a list per token, not a number
    for (int64_t s = 0; s < shards.count; ++s) {
      whole.given[name].push_back(values[s * shards.tokens + token]);
    }
  }
  add_probabilities(&whole);
  whole.target_logit = highest(given(whole, "shard_target_logit"));
  whole.weighted_logit_sum = sum_of(given(whole, "shard_weighted_logit_sum"));
  return whole;
}

Estimate combined_lse(const WholeRow& whole) {
  const double log_sum = whole.log_sum.value, lse = whole.reference + log_sum;
  return {lse, 2 * u32 * (std::fabs(log_sum) + std::fabs(lse)) + kFolded};
}

}  // namespace logitless::reference
