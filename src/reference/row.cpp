// SPDX-License-Identifier: Apache-2.0
// This file makes the logits of one token, their statistics and the bounds of both.
#include "src/reference/row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

// Maps raw to z and makes the slope and the saturation.
void map_logits(const LossOptions& options, const std::vector<double>& raw, Row* row) {
  const double scale = options.logit_scale, softcap = options.softcap;
  const double temperature = row->temperature;
  const size_t columns = raw.size();
  row->z.resize(columns);
  row->slope.assign(columns, scale / temperature);
  if (softcap > 0) row->saturation.resize(columns);
  for (size_t j = 0; j < columns; ++j) {
    double c = scale * raw[j];
    if (softcap > 0) {
      const double t = std::tanh(c / softcap);
      row->saturation[j] = t;
      row->slope[j] = scale * (1 - t * t) / temperature;
      c = softcap * t;
    }
    row->z[j] = c / temperature;
  }
}

// Makes m, log s and lse of z.
void sum_exponentials(Row* row) {
  row->reference = -std::numeric_limits<double>::infinity();
  for (const double z : row->z) {
    if (z > row->reference || std::isnan(z)) row->reference = z;
    if (std::isnan(z)) break;
  }
  double sum = 0;
  for (const double z : row->z) sum += std::exp(z - row->reference);
  row->log_sum = std::log(sum);
}

void form_probabilities(Row* row) {
  const size_t columns = row->z.size();
  row->lse = row->reference + row->log_sum;
  row->log_probability.resize(columns);
  row->probability.resize(columns);
  row->entropy = 0;
  for (size_t j = 0; j < columns; ++j) {
    const double log_p = (row->z[j] - row->reference) - row->log_sum;
    const double p = std::exp(log_p);
    row->log_probability[j] = log_p;
    row->probability[j] = p;
    if (p != 0) row->entropy -= p * log_p;
  }
}

// Makes B, and the errors of p and the entropy, from logit_error.
void bound_statistics(Row* row) {
  const size_t columns = row->z.size();
  double self_information = 0, p_error = 0, p_z = 0, entropy_error = 0;
  for (size_t j = 0; j < columns; ++j) {
    const double p = row->probability[j], log_p = row->log_probability[j];
    if (p == 0) continue;
    self_information += p * std::fabs(log_p);
    p_error += p * row->logit_error[j];
    p_z += p * std::fabs(row->z[j]);
    entropy_error += p * row->logit_error[j] * (1 + std::fabs(log_p + row->entropy));
  }
  const double log_v = std::log2(static_cast<double>(columns));
  row->lse_error = 4 * u32 * (self_information + log_v + 3 + std::fabs(row->log_sum)) +
                   u32 * std::fabs(row->lse) + p_error;
  row->entropy_error = entropy_error + 4 * u32 * (log_v + 3 + std::fabs(row->lse) + p_z);
  row->probability_error.assign(columns, tiny32);
  for (size_t j = 0; j < columns; ++j) {
    if (row->probability[j] == 0) continue;
    const double exponent_error = row->logit_error[j] + row->lse_error +
                                  4 * u32 * (3 + std::fabs(row->z[j] - row->reference));
    row->probability_error[j] += row->probability[j] * exponent_error;
  }
}

// Makes the bounds of logits, e_j = gamma(D) sum |h w| |logit_scale| / temperature + 3 u32 |z_j| +
// (D + 1) 2^-126 max(1, |logit_scale| / temperature, softcap / temperature). `products` is empty
// for given logits, and D is then 0. An infinite logit is exact, and so is an infinite product that
// a softcap makes a finite logit, because no rounding makes or unmakes them.
void bound_logits(const RowSource& source, const std::vector<double>& products, Row* row) {
  const LossOptions& options = source.call.options;
  const double steepest = std::fabs(static_cast<double>(options.logit_scale)) / row->temperature;
  const int64_t hidden = products.empty() ? 0 : source.call.input.shape[1];
  const double cap = static_cast<double>(options.softcap) / row->temperature;
  // Numbers below the least normal may be flushed: every product, the logit itself and the tanh's
  // argument.
  const double flushed = static_cast<double>(hidden + 1) * tiny32 * std::max({1.0, steepest, cap});
  row->logit_error.assign(row->z.size(), 0.0);
  for (size_t j = 0; j < row->z.size(); ++j) {
    if (!std::isfinite(row->z[j])) continue;
    row->logit_error[j] = 3 * u32 * std::fabs(row->z[j]) + flushed;
    if (products.empty() || !std::isfinite(products[j])) continue;
    row->logit_error[j] += gamma(source.model, hidden) * products[j] * steepest;
  }
}

// Makes raw_ij = input_i . weight_j + bias_j, and sum |h w| where bounds are wanted.
std::vector<double> linear_logits(const RowSource& source, int64_t i,
                                  std::vector<double>* products) {
  const std::vector<double> h = read_row(source.call.input, i);  // [D]
  const int64_t columns = source.call.vocab(), hidden = h.size();
  std::vector<double> raw(columns);
  if (source.with_bounds) products->assign(columns, 0.0);
  for (int64_t j = 0; j < columns; ++j) {
    const double* w = source.weight.data() + j * hidden;
    double sum = 0;
    for (int64_t k = 0; k < hidden; ++k) sum += h[k] * w[k];
    raw[j] = source.bias.empty() ? sum : sum + source.bias[j];
    if (!source.with_bounds) continue;
    double magnitude = 0;
    for (int64_t k = 0; k < hidden; ++k) magnitude += std::fabs(h[k] * w[k]);
    (*products)[j] = magnitude;
  }
  return raw;
}

}  // namespace

double gamma(const BoundModel& model, int64_t length) {
  const double k = static_cast<double>(length);
  if (model.tf32) return 0x1p-9 + u32 * (4 + k / 16);
  if (model.tensor_cores) return u32 * (4 + k / 16);
  return u32 * (4 + (model.structured ? std::max(std::sqrt(k), k / 4) : std::sqrt(k)));
}

Row make_row(const RowSource& source, const Token& token, int64_t i) {
  const Call& call = source.call;
  Row row;
  row.temperature = token.temperature;
  std::vector<double> products;
  const std::vector<double> raw =
      call.linear ? linear_logits(source, i, &products) : read_row(call.logits, i);
  map_logits(call.options, raw, &row);
  if (call.state_given()) {
    row.reference = token.row_reference;
    row.log_sum = token.row_log_sum;
  } else {
    sum_exponentials(&row);
  }
  form_probabilities(&row);
  if (!call.forward && call.entropy) row.entropy = token.entropy;
  if (source.with_bounds) {
    bound_logits(source, products, &row);
    bound_statistics(&row);
  }
  return row;
}

Row softmax_row(std::vector<double> logits, bool with_bounds) {
  static const Call defaults;
  static const std::vector<double> none;
  Row row;
  map_logits(defaults.options, logits, &row);
  sum_exponentials(&row);
  form_probabilities(&row);
  if (with_bounds) {
    bound_logits({defaults, none, none, {}, true}, none, &row);
    bound_statistics(&row);
  }
  return row;
}

Estimate row_reference(const Row& row) {
  if (row.logit_error.empty() || !std::isfinite(row.reference)) return {row.reference, 0};
  double highest = row.reference;
  for (size_t j = 0; j < row.z.size(); ++j) {
    highest = std::max(highest, row.z[j] + row.logit_error[j]);
  }
  return {row.reference, highest - row.reference};
}

Estimate row_log_sum(const Row& row) {
  return {row.log_sum, row.lse_error - u32 * std::fabs(row.lse) + row_reference(row).error};
}

Estimate target_logit(const Row& row, const Token& token) {
  if (token.column < 0) return {-std::numeric_limits<double>::infinity(), 0};
  const double z = row.z[token.column];
  if (row.logit_error.empty()) return {z, 0};
  return {z, row.logit_error[token.column] + 2 * u32 * std::fabs(z)};
}

Estimate weighted_logit_sum(const Row& row, const std::vector<double>& class_weight) {
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

Estimate logprob(const Row& row, const Token& token) {
  if (token.column < 0) return {-std::numeric_limits<double>::infinity(), 0};
  const double z = row.z[token.column], log_p = (z - row.reference) - row.log_sum;
  const double value = log_p > 0 ? 0 : log_p;
  if (row.logit_error.empty()) return {value, 0};
  return {value, row.lse_error + row.logit_error[token.column] + 2 * u32 * std::fabs(z) +
                     2 * u32 * std::fabs(value)};
}

Estimate sum_p_squared(const Row& row) {
  Estimate sum;
  for (size_t j = 0; j < row.z.size(); ++j) {
    const double p = row.probability[j];
    sum.value += p * p;
    if (!row.logit_error.empty()) sum.error += 2 * p * row.probability_error[j];
  }
  const double log_v = std::log2(static_cast<double>(row.z.size()));
  sum.error += 4 * u32 * (log_v + 3) * sum.value + tiny32;
  return sum;
}

Estimate mean_logit(const Row& row, int64_t vocab_total) {
  Estimate sum = weighted_logit_sum(row, std::vector<double>(row.z.size(), 1.0));
  sum.value /= static_cast<double>(vocab_total);
  sum.error = sum.error / static_cast<double>(vocab_total) + u32 * std::fabs(sum.value) + tiny32;
  return sum;
}

int64_t rank(const Row& row, const Token& token) {
  int64_t above = 0;
  for (const double z : row.z) above += z > row.z[token.column] ? 1 : 0;
  return above;
}

std::vector<int64_t> accepted_rank(const Row& row, const Token& token) {
  const double target = row.z[token.column];
  const auto error = [&](size_t j) { return row.logit_error.empty() ? 0 : row.logit_error[j]; };
  const double rounded = std::isfinite(target) ? 2 * u32 * std::fabs(target) : 0;
  const double own = row.logit_error.empty() ? 0 : error(token.column) + rounded;
  int64_t least = 0, most = 0;
  for (size_t j = 0; j < row.z.size(); ++j) {
    const double z = row.z[j], slack = error(j) + own;
    if (std::isnan(z) || std::isnan(target)) {
      least = 0, most = static_cast<int64_t>(row.z.size()) - 1;
      break;
    }
    if (static_cast<int64_t>(j) == token.column) continue;
    least += z > target && z - target > slack ? 1 : 0;
    // Two infinities are equal whatever their errors.
    most += z > target || (std::isfinite(z) && target - z <= slack) ? 1 : 0;
  }
  std::vector<int64_t> accepted;
  for (int64_t r = least; r <= most; ++r) accepted.push_back(r);
  return accepted;
}

int64_t argmax(const Row& row) {
  size_t best = 0;
  for (size_t j = 0; j < row.z.size() && !std::isnan(row.z[best]); ++j) {
    if (row.z[j] > row.z[best] || std::isnan(row.z[j])) best = j;
  }
  return static_cast<int64_t>(best);
}

std::vector<int64_t> accepted_argmax(const Row& row) {
  const int64_t best = argmax(row);
  const double highest = row.z[best];
  const std::vector<double>& e = row.logit_error;
  std::vector<int64_t> accepted;
  for (size_t j = 0; j < row.z.size(); ++j) {
    const double slack = e.empty() ? 0 : e[j] + e[best];
    // If any logit is NaN there is no maximum to name.
    if (std::isnan(highest) || row.z[j] >= highest - slack) {
      accepted.push_back(static_cast<int64_t>(j));
    }
  }
  return accepted;
}

}  // namespace logitless::reference
