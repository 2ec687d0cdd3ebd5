// SPDX-License-Identifier: Apache-2.0
// The logits of one token, their statistics, and the bounds of both.
#include "src/reference/row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

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

// B, and the errors of p and of the entropy, computed from logit_error.
void bound_statistics(bool state_is_given, Row* row) {
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
  row->lse_error = 4 * u32 * (3 + std::fabs(row->log_sum)) + u32 * std::fabs(row->lse);
  if (!state_is_given) row->lse_error += 4 * u32 * (self_information + log_v) + p_error;
  row->entropy_error = entropy_error + 4 * u32 * (log_v + 3 + std::fabs(row->lse) + p_z);
  row->probability_error.assign(columns, tiny32);
  for (size_t j = 0; j < columns; ++j) {
    if (row->probability[j] == 0) continue;
    const double exponent_error = row->logit_error[j] + row->lse_error +
                                  4 * u32 * (3 + std::fabs(row->z[j] - row->reference));
    row->probability_error[j] += row->probability[j] * exponent_error;
  }
}

// The bounds of logits: e_j = gamma(D) sum |h w| |logit_scale| / temperature + 3 u32 |z_j| + (D +
// 1) 2^-126 max(1, |logit_scale| / temperature, softcap / temperature). For given logits `products`
// is empty and D is 0. An infinite logit is exact, and so is an infinite product that a softcap
// makes finite.
void bound_logits(const RowSource& source, const std::vector<double>& products, Row* row) {
  const LossOptions& options = source.call.options;
  const double steepest = std::fabs(static_cast<double>(options.logit_scale)) / row->temperature;
  const int64_t hidden = products.empty() ? 0 : source.call.input.shape[1];
  const double cap = static_cast<double>(options.softcap) / row->temperature;
  // Values that may be flushed below the least normal number: every product, the logit itself and
  // tanh's argument.
  const double flushed = static_cast<double>(hidden + 1) * tiny32 * std::max({1.0, steepest, cap});
  row->logit_error.assign(row->z.size(), 0.0);
  for (size_t j = 0; j < row->z.size(); ++j) {
    if (!std::isfinite(row->z[j])) continue;
    row->logit_error[j] = 3 * u32 * std::fabs(row->z[j]) + flushed;
    if (products.empty() || !std::isfinite(products[j])) continue;
    row->logit_error[j] += gamma(source.model, hidden) * products[j] * steepest;
  }
}

// raw_ij = input_i . weight_j + bias_j, and sum |h w| where bounds are wanted.
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
  const double alike = model.structured ? k / 4 : 0;
  if (model.tf32) return 0x1p-9 + u32 * (4 + std::max(k / 16, alike));
  if (model.tensor_cores) return u32 * (4 + std::max(k / 16, alike));
  return u32 * (4 + std::max(std::sqrt(k), alike));
}

Row make_row(const RowSource& source, const Token& token, int64_t i) {
  const GivenState given{token.row_reference, token.row_log_sum, source.call.diverges};
  return make_row(source, token, i, source.call.state_given() ? &given : nullptr);
}

Row make_row(const RowSource& source, const Token& token, int64_t i, const GivenState* state) {
  const Call& call = source.call;
  Row row;
  row.temperature = token.temperature;
  std::vector<double> products;
  const std::vector<double> raw =
      call.linear ? linear_logits(source, i, &products) : read_row(call.logits, i);
  map_logits(call.options, raw, &row);
  if (state != nullptr) {
    row.reference = state->reference;
    row.log_sum = state->log_sum;
  } else {
    sum_exponentials(&row);
  }
  form_probabilities(&row);
  if (!call.forward && call.entropy) row.entropy = token.entropy;
  if (source.with_bounds) {
    bound_logits(source, products, &row);
    bound_statistics(state != nullptr && state->without_error, &row);
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
    bound_statistics(false, &row);
  }
  return row;
}

}  // namespace logitless::reference
