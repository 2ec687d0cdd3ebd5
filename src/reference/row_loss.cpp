// SPDX-License-Identifier: Apache-2.0
// The loss of one token, its gradient with respect to the row of raw logits, and the bounds of
// both.
//   loss = a [ f (lse - z_t) + k sum_j c_j (lse - z_j) + lambda lse^2 ]
//   f = (1-eps) c_t    k = eps/V    w = f + k sum_j c_j
//   dz_j = g a [ (w + 2 lambda lse) p_j - f [j=t] - k c_j ] + grad_lse p_j
//          + grad_target_logit [j=t] - grad_entropy p_j (log p_j + H)
//          + sum_k [ids_k=j] grad_logits_at_k
// A term whose factor f or k c_j is exactly 0 is 0, whatever the logit.
#include <algorithm>
#include <cmath>

#include "src/reference/numbers.h"
#include "src/reference/row.h"
#include "src/reference/statistics.h"

namespace logitless::reference {
namespace {

// The factors of one token's loss.
struct Factors {
  double onehot;     // f
  double smoothing;  // k
  double spread;     // k sum_j c_j
  double whole;      // w
  double z_loss;     // lambda
};

Factors factors_of(const Call& call, const Tokens& tokens, const Token& token) {
  const double epsilon = call.options.label_smoothing;
  Factors factors;
  factors.onehot = (1 - epsilon) * token.class_weight;
  factors.smoothing = epsilon / static_cast<double>(call.vocab_total());
  factors.spread = epsilon > 0 ? factors.smoothing * tokens.class_weight_sum : 0;
  factors.whole = factors.onehot + factors.spread;
  factors.z_loss = call.options.z_loss;
  return factors;
}

// dz of one column, its error and the magnitudes of its summands, those of the loss and those of
// the statistics.
struct Derivative {
  double value = 0, error = 0, loss_magnitude = 0, statistics_magnitude = 0;
};

void add_loss(const Factors& f, double upstream, double c, bool is_target, const Row& row, size_t j,
              Derivative* d) {
  const double p = row.probability[j];
  double sum = f.onehot * (p - (is_target ? 1 : 0));
  double magnitude = std::fabs(f.whole) * p + (is_target ? std::fabs(f.onehot) : 0);
  double slope = f.whole;
  // f and k stay separate, so that with a single class, p = 1, the gradient is exactly 0.
  if (f.smoothing > 0) {
    sum += f.spread * p - f.smoothing * c;
    magnitude += f.smoothing * std::fabs(c);
  }
  if (f.z_loss > 0) {
    sum += 2 * f.z_loss * row.lse * p;
    magnitude += 2 * f.z_loss * std::fabs(row.lse) * p;
    slope += 2 * f.z_loss * row.lse;
  }
  d->value += upstream * sum;
  d->loss_magnitude += std::fabs(upstream) * magnitude;
  if (row.probability_error.empty()) return;
  d->error += std::fabs(upstream) *
              (std::fabs(slope) * row.probability_error[j] + 2 * f.z_loss * p * row.lse_error);
}

// `log_error` is an additional error of log p_j, from a rounded exponential.
void add_statistics(const Token& token, bool is_target, const Row& row, size_t j, double log_error,
                    Derivative* d) {
  const double p = row.probability[j];
  d->value += token.grad_lse * p;
  d->statistics_magnitude += std::fabs(token.grad_lse) * p;
  if (is_target) {
    d->value += token.grad_target_logit;
    d->statistics_magnitude += std::fabs(token.grad_target_logit);
  }
  // 0 log 0 is 0.
  const double information = p == 0 ? 0 : row.log_probability[j] + row.entropy;
  d->value -= token.grad_entropy * p * information;
  d->statistics_magnitude += std::fabs(token.grad_entropy * p * information);
  if (row.probability_error.empty()) return;
  const double p_error = row.probability_error[j];
  d->error += std::fabs(token.grad_lse) * p_error;
  d->error += std::fabs(token.grad_entropy) *
              (p_error * (1 + std::fabs(information)) + p * (row.entropy_error + log_error));
}

// What chosen columns add to dz of each column.
std::vector<Derivative> chosen_gradients(const Token& token, size_t columns) {
  std::vector<Derivative> sums(token.chosen.empty() ? 0 : columns);
  std::vector<int64_t> counts(sums.size());
  for (const Chosen& c : token.chosen) {
    if (c.column < 0) continue;
    sums[c.column].value += c.gradient;
    sums[c.column].statistics_magnitude += std::fabs(c.gradient);
    ++counts[c.column];
  }
  for (size_t j = 0; j < sums.size(); ++j) {
    sums[j].error = static_cast<double>(counts[j]) * u32 * sums[j].statistics_magnitude;
  }
  return sums;
}

}  // namespace

Estimate weighted(const Estimate& loss, const Token& token) {
  const double value = token.token_weight * loss.value;
  return {value, std::fabs(token.token_weight) * loss.error + 2 * u32 * std::fabs(value) +
                     (value != 0 ? tiny32 : 0)};
}

Estimate row_loss(const Call& call, const Tokens& tokens, const Token& token, const Row& row) {
  const Factors f = factors_of(call, tokens, token);
  const bool bounds = !row.logit_error.empty();
  const size_t columns = row.z.size();
  Estimate loss;
  if (f.onehot != 0 && token.column >= 0) {
    const double z = row.z[token.column];
    loss.value += f.onehot * ((row.reference - z) + row.log_sum);
    if (bounds) {
      loss.error += std::fabs(f.onehot) * (row.logit_error[token.column] + 2 * u32 * std::fabs(z));
    }
  }
  if (f.smoothing > 0) {
    const double log_v = std::log2(static_cast<double>(columns));
    for (size_t j = 0; j < columns; ++j) {
      const double c = f.smoothing * tokens.class_weight[j];
      if (c == 0) continue;
      loss.value += c * ((row.reference - row.z[j]) + row.log_sum);
      if (!bounds) continue;
      loss.error += std::fabs(c) * (row.logit_error[j] + u32 * (log_v + 2) * std::fabs(row.z[j]));
    }
    loss.error += 2 * u32 * std::fabs(f.spread * row.lse);
    loss.error += f.smoothing * static_cast<double>(columns) * tiny32;
  }
  loss.error += std::fabs(f.whole) * row.lse_error;
  if (f.z_loss > 0) {
    loss.value += f.z_loss * row.lse * row.lse;
    loss.error += f.z_loss * (2 * std::fabs(row.lse) * row.lse_error + 3 * u32 * row.lse * row.lse);
  }
  // A NaN in the row makes its loss NaN, even if every factor is 0.
  if (std::isnan(row.lse)) loss.value = row.lse;
  return weighted(loss, token);
}

Estimate combined_loss(const Call& call, const Tokens& tokens, const Token& token,
                       const WholeRow& row) {
  const Factors f = factors_of(call, tokens, token);
  const Estimate lse = combined_lse(row);
  Estimate loss;
  if (f.onehot != 0) {
    const double nll = (row.reference - row.target_logit) + row.log_sum.value;
    loss.value += f.onehot * nll;
    loss.error += std::fabs(f.onehot) * (lse.error + 4 * u32 * std::fabs(nll));
  }
  if (f.smoothing > 0) {
    const Estimate& weighted = row.weighted_logit_sum;
    loss.value += f.spread * lse.value - f.smoothing * weighted.value;
    loss.error += std::fabs(f.spread) * (lse.error + 4 * u32 * std::fabs(lse.value)) +
                  f.smoothing * (weighted.error + 2 * u32 * std::fabs(weighted.value));
  }
  if (f.z_loss > 0) {
    loss.value += f.z_loss * lse.value * lse.value;
    loss.error +=
        f.z_loss * (2 * std::fabs(lse.value) * lse.error + 4 * u32 * lse.value * lse.value);
  }
  // A NaN in the row makes its loss NaN, even if every factor is 0.
  if (std::isnan(lse.value)) loss.value = lse.value;
  return weighted(loss, token);
}

void RowGradient::set(const LossOptions& options, const Row& row, size_t j, const Estimate& dz,
                      double dz_magnitude) {
  const double slope = std::fabs(row.slope[j]);
  value[j] = dz.value * row.slope[j];
  magnitude[j] = dz_magnitude * slope;
  if (row.logit_error.empty()) return;
  error[j] = slope * dz.error;
  if (options.softcap > 0) {
    const double steepest = std::fabs(static_cast<double>(options.logit_scale)) / row.temperature;
    const double cap_error = row.temperature * row.logit_error[j] / options.softcap;
    // If terms cancel, dz may be far below its own error.
    error[j] += (dz_magnitude + dz.error) *
                (4 * u32 * steepest + 2 * std::fabs(row.saturation[j]) * slope * cap_error);
  }
}

RowGradient row_gradient(const Call& call, const Tokens& tokens, const Token& token,
                         const Row& row) {
  const Factors f = factors_of(call, tokens, token);
  const double upstream = token.upstream * token.token_weight;
  const size_t columns = row.z.size();
  const bool rounded = call.kept && call.kept.dtype != DType::f32;
  const double log_error = rounded ? unit_roundoff(call.kept.dtype) : 0;
  const std::vector<Derivative> at_chosen = chosen_gradients(token, columns);
  RowGradient gradient(columns);
  for (size_t j = 0; j < columns; ++j) {
    const bool is_target = static_cast<int64_t>(j) == token.column;
    Derivative d;
    if (!at_chosen.empty()) d = at_chosen[j];
    add_loss(f, upstream, tokens.class_weight[j], is_target, row, j, &d);
    add_statistics(token, is_target, row, j, log_error, &d);
    const double magnitude = d.loss_magnitude + d.statistics_magnitude;
    d.error += 4 * u32 * magnitude + tokens.normalizer_error * d.loss_magnitude;
    gradient.set(call.options, row, j, {d.value, d.error}, magnitude);
  }
  for (size_t j = 0; j < at_chosen.size(); ++j) {
    gradient.chosen.push_back(at_chosen[j].statistics_magnitude * std::fabs(row.slope[j]));
  }
  double of_chosen = 0;
  for (const Chosen& c : token.chosen) of_chosen += std::fabs(c.gradient);
  gradient.stored_scale =
      (tokens.upstream_scale + of_chosen +
       std::fabs(upstream) * (std::fabs(f.whole) + 2 * f.z_loss * std::fabs(row.lse)) +
       std::fabs(token.grad_lse) + std::fabs(token.grad_target_logit) +
       std::fabs(token.grad_entropy) * (1 + std::fabs(row.entropy))) *
      std::max(1.0, tokens.steepest);
  return gradient;
}

RowGradient gradient_of_chosen(const Call& call, const Token& token, const Row& row) {
  const size_t columns = row.z.size();
  RowGradient gradient(columns);
  gradient.times.assign(columns, 0);
  std::vector<double> value(columns), magnitude(columns);
  for (const Chosen& c : token.chosen) {
    if (c.column < 0) continue;
    ++gradient.times[c.column];
    value[c.column] += c.gradient;
    magnitude[c.column] += std::fabs(c.gradient);
  }
  for (size_t j = 0; j < columns; ++j) {
    if (gradient.times[j] == 0) continue;
    gradient.set(call.options, row, j, {value[j], 4 * u32 * magnitude[j]}, magnitude[j]);
  }
  gradient.chosen = gradient.magnitude;
  return gradient;
}

Estimate probability_loss(const Call& call, const Tokens& tokens, const Token& token,
                          const std::vector<double>& p) {
  const Factors f = factors_of(call, tokens, token);
  const double log_v = f.smoothing > 0 ? std::log2(static_cast<double>(p.size())) : 0;
  Estimate loss;
  for (size_t j = 0; j < p.size(); ++j) {
    const bool is_target = static_cast<int64_t>(j) == token.column;
    const double q = (is_target ? f.onehot : 0) + f.smoothing * tokens.class_weight[j];
    if (q == 0) continue;
    const double log_p = std::log(p[j] + call.options.probability_floor);
    loss.value -= q * log_p;
    loss.error += std::fabs(q) * u32 * (2 + (log_v + 5) * std::fabs(log_p)) + tiny32;
  }
  return weighted(loss, token);
}

RowGradient probability_gradient(const Call& call, const Tokens& tokens, const Token& token,
                                 const std::vector<double>& p) {
  const Factors f = factors_of(call, tokens, token);
  RowGradient gradient(p.size());
  for (size_t j = 0; j < p.size(); ++j) {
    const bool is_target = static_cast<int64_t>(j) == token.column;
    const double q = (is_target ? f.onehot : 0) + f.smoothing * tokens.class_weight[j];
    if (q == 0) continue;
    const double value =
        -token.upstream * token.token_weight * q / (p[j] + call.options.probability_floor);
    gradient.value[j] = value;
    gradient.magnitude[j] = std::fabs(value);
    gradient.error[j] = (8 * u32 + tokens.normalizer_error) * std::fabs(value) + tiny32;
  }
  return gradient;
}

}  // namespace logitless::reference
