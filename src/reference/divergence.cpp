// SPDX-License-Identifier: Apache-2.0
// Divergences from their definitions, in double, and bounds of the error of f32 arithmetic. With d
// = log p - log q, `slope` is the derivative of a column's part of D with respect to d, with p or q
// fixed; an error of d that all columns share cancels, because the terms' derivatives sum to 0.
#include "src/reference/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

// One column of both heads.
struct Column {
  double p, q, m;
  bool may_count = false;  // near the least normal f32, and the other logit is -inf
  double d;                // log p - log q
  double log_p_m = 0;      // log(p / m), where p > 0
  double log_q_m = 0;      // log(q / m), where q > 0
  // The error of d, and the relative errors of p and q. An infinite logit is exact.
  double d_error = 0, p_relative = 0, q_relative = 0;
};

double relative_error(const Row& row, size_t j) {
  if (!std::isfinite(row.z[j])) return 0;
  return row.logit_error[j] + row.lse_error + 4 * u32 * (3 + std::fabs(row.z[j] - row.reference));
}

// If the other head's logit is -inf, a probability below the least normal f32 counts as 0.
void leave_out_tiny(double log_of_greater, Column* c) {
  if (!std::isinf(c->d)) return;
  const double own_error = std::max(c->p_relative, c->q_relative);  // an infinite logit has none
  const double least = std::log(tiny32), log_2 = std::log(2.0);
  c->may_count = log_of_greater >= least - log_2 - own_error && log_of_greater <= least + own_error;
  if (log_of_greater < least) c->p = c->q = 0;
}

Column column_of(double beta, const Row& student, const Row& teacher, size_t j) {
  Column c;
  c.p = student.probability[j];
  c.q = teacher.probability[j];
  c.d = student.log_probability[j] - teacher.log_probability[j];
  if (!student.logit_error.empty()) {
    c.p_relative = relative_error(student, j);
    c.q_relative = relative_error(teacher, j);
    c.d_error = c.p_relative + c.q_relative;
  }
  leave_out_tiny(std::max(student.log_probability[j], teacher.log_probability[j]), &c);
  c.m = (1 - beta) * c.p + beta * c.q;
  if (c.p > 0) c.log_p_m = -std::log1p(beta * std::expm1(-c.d));
  // If p is small relative to q, expm1 has rounded away what a small beta adds.
  if (c.q > 0 && beta < 1) {
    c.log_q_m = c.d < -1 ? -std::log(beta + (1 - beta) * std::exp(c.d))
                         : -std::log1p((1 - beta) * std::expm1(c.d));
  }
  // If p or q is negligible relative to the other, e^|d| exceeds a double.
  if (c.p > 0 && !std::isfinite(c.log_p_m)) c.log_p_m = c.d - std::log(beta);
  if (c.q > 0 && !std::isfinite(c.log_q_m)) c.log_q_m = -c.d - std::log(1 - beta);
  return c;
}

// What a column adds to D, the size to which its rounding is relative, and its derivative. No value
// is negative: a KL's includes p - q, which sums to 0 over the whole vocabulary.
struct Part {
  double value, rounded, slope;
};
// The bound of a value computed from e^d, for an error of d. A factor of e^20 allows any value.
double grown(double error) { return error * std::exp(std::min(2 * error, 20.0)); }
// With a subnormal p or q, m may be 0.
double share(double p, double m) { return m == 0 ? 0 : p / m; }
// p log(p/q), where 0 log 0 is 0.
double information(double p, double log_ratio) { return p == 0 ? 0 : p * log_ratio; }

Part part_of(DivergenceKind kind, double beta, const Column& c) {
  const double apart = std::fabs(c.p - c.q);
  const double of_p = information((1 - beta) * c.p, c.log_p_m);
  const double of_q = information(c.q, c.log_q_m);
  switch (kind) {
    case DivergenceKind::forward_kl:
      return {information(c.q, -c.d) + (c.p - c.q), information(c.q, std::fabs(c.d)), apart};
    case DivergenceKind::reverse_kl:
      return {information(c.p, c.d) + (c.q - c.p), information(c.p, std::fabs(c.d)), apart};
    case DivergenceKind::jsd: {
      const double sizes = std::fabs(of_p) + beta * std::fabs(of_q);
      return {of_p + beta * of_q, sizes, sizes};
    }
    case DivergenceKind::skew_kl:
      return {of_q + (1 - beta) * (c.p - c.q), std::fabs(of_q),
              (1 - beta) * c.p * std::fabs(share((1 - beta) * (c.p - c.q), c.m))};
    case DivergenceKind::tv:
      break;
  }
  return {0.5 * apart, 0.5 * apart, 0.5 * std::max(c.p, c.q)};
}

// Whether a column with this infinite d makes D infinite.
bool is_infinite_beside(DivergenceKind kind, double d) {
  return kind == (d < 0 ? DivergenceKind::forward_kl : DivergenceKind::reverse_kl);
}

// f_j and its error; dz_j = scale p_j (f_j - sum_k p_k f_k).
Estimate slope_of(DivergenceKind kind, double beta, const Column& c) {
  if (c.p == 0) return {};
  const double error = grown(c.d_error);
  switch (kind) {
    case DivergenceKind::reverse_kl:
      return {c.d, error + 4 * u32 * std::fabs(c.d)};
    case DivergenceKind::jsd:
      return {c.log_p_m, error * beta * share(c.q, c.m) + 4 * u32 * std::fabs(c.log_p_m)};
    case DivergenceKind::skew_kl: {
      if (beta == 1) return {};
      const double f = share((1 - beta) * (c.p - c.q), c.m);
      return {f, error * (1 - beta) * share(c.p, c.m) * share(c.q, c.m) + 4 * u32 * std::fabs(f)};
    }
    case DivergenceKind::tv:
      return {c.d > 0 ? 0.5 : c.d < 0 ? -0.5 : 0.0, std::fabs(c.d) <= c.d_error ? 1.0 : 0.0};
    case DivergenceKind::forward_kl:
      break;
  }
  return {};
}

// At these ends of beta the mixture is one of the two heads, so the kind is another one.
DivergenceKind kind_of(const DivergenceOptions& o) {
  const bool mixes = o.kind == DivergenceKind::jsd || o.kind == DivergenceKind::skew_kl;
  if (mixes && o.beta == 0) return DivergenceKind::forward_kl;
  if (o.kind == DivergenceKind::jsd && o.beta == 1) return DivergenceKind::reverse_kl;
  return o.kind;
}

double mixture_of(const DivergenceOptions& o) {
  return std::isfinite(o.beta) ? std::clamp(static_cast<double>(o.beta), 0.0, 1.0) : 0;
}

std::vector<Estimate> forward_dz(const std::vector<Column>& columns) {
  std::vector<Estimate> dz;
  for (const Column& c : columns) {
    dz.push_back({c.p - c.q, (c.p + c.q) * grown(c.d_error) + 2 * tiny32});
  }
  return dz;
}

// dz of the kinds other than forward_kl, and sum_k p_k f_k over these columns, which is subtracted
// if slope_mean is null.
std::vector<Estimate> centered_dz(DivergenceKind kind, double beta, const Row& student,
                                  const std::vector<Column>& columns, const double* slope_mean,
                                  Estimate* slope_sum) {
  const bool mixes = kind == DivergenceKind::jsd || kind == DivergenceKind::skew_kl;
  const bool bounds = !student.probability_error.empty();
  const double scale = mixes ? 1 - beta : 1;
  const double log_v = std::log2(static_cast<double>(columns.size()));
  std::vector<Estimate> f;
  double mean = 0, size = 0;
  for (const Column& c : columns) {
    f.push_back(slope_of(kind, beta, c));
    mean += c.p == 0 ? 0 : c.p * f.back().value;
    size += c.p == 0 ? 0 : c.p * std::fabs(f.back().value);
  }
  *slope_sum = {std::isfinite(mean) ? mean : nan_value, 4 * u32 * (log_v + 3) * size + tiny32};
  if (slope_mean != nullptr) mean = *slope_mean;
  if (!std::isfinite(mean)) mean = nan_value;
  double mean_error = 4 * u32 * (log_v + 3) * size;
  for (size_t j = 0; bounds && j < columns.size(); ++j) {
    const double of_f = columns[j].p * f[j].error, of_p = student.probability_error[j];
    slope_sum->error += of_f + (columns[j].p == 0 ? 0 : of_p * std::fabs(f[j].value));
    mean_error += of_f + of_p * std::fabs(f[j].value - mean);
  }
  if (slope_mean != nullptr) mean_error = 0;
  std::vector<Estimate> dz;
  for (size_t j = 0; j < columns.size(); ++j) {
    const double p = columns[j].p, centered = f[j].value - mean;
    dz.push_back({scale * p * centered, 0});
    if (!bounds) continue;
    dz.back().error = scale * (student.probability_error[j] * std::fabs(centered) +
                               p * (f[j].error + mean_error)) +
                      tiny32;
  }
  return dz;
}

}  // namespace

TeacherHead::TeacherHead(const Call& call)
    : call_(static_cast<int32_t>(call.teacher_logits ? LOGITLESS_CROSS_ENTROPY_FORWARD
                                                     : LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD),
            call.execution),
      state_given_(call.state_given()) {
  call_.options = call.teacher_options();
  call_.logits = call.teacher_logits;
  call_.input = call.teacher_input;
  call_.weight = call.teacher_weight;
  if (call.teacher_weight) weight_ = read(call.teacher_weight);
  if (call.teacher_bias) bias_ = read(call.teacher_bias);
}

Row TeacherHead::row(const Token& token, int64_t i, const BoundModel& model,
                     bool with_bounds) const {
  Token own = token;
  own.temperature = token.teacher_temperature;
  const GivenState given{token.teacher_row_reference, token.teacher_row_log_sum, true};
  return make_row({call_, weight_, bias_, model, with_bounds}, own, i,
                  state_given_ ? &given : nullptr);
}

DivergenceRow divergence_row(const DivergenceOptions& options, const Row& student,
                             const Row& teacher, const double* slope_mean) {
  const DivergenceKind kind = kind_of(options);
  const double beta = mixture_of(options);
  const size_t count = student.z.size();
  const double log_v = std::log2(static_cast<double>(count));
  DivergenceRow row;
  if (std::isnan(student.lse) || std::isnan(teacher.lse) || std::isnan(student.log_sum) ||
      std::isnan(teacher.log_sum)) {
    row.divergence.value = row.acceptance.value = row.slope_sum.value = nan_value;
    row.dz.assign(count, {nan_value, 0});
    return row;
  }
  std::vector<Column> columns;
  for (size_t j = 0; j < count; ++j) {
    const Column& c = columns.emplace_back(column_of(beta, student, teacher, j));
    row.undecided |= c.may_count && is_infinite_beside(kind, c.d);
    if (c.p == 0 && c.q == 0) continue;
    const Part part = part_of(kind, beta, c);
    row.divergence.value += part.value;
    row.acceptance.value += std::min(c.p, c.q);
    if (student.logit_error.empty()) continue;
    // The summands are not negative; this is their largest magnitude.
    const double term = part.slope * std::min(1.0, std::fabs(c.d)) + part.rounded;
    const double relative = c.p_relative + c.q_relative;
    const double far = std::isfinite(c.d) ? std::fabs(c.d) : 0;
    row.divergence.error += part.slope * c.d_error + (c.p + c.q) * c.d_error * c.d_error +
                            8 * u32 * (std::fabs(c.p - c.q) + part.rounded) + tiny32 * (4 + far);
    if (kind == DivergenceKind::tv || std::fabs(c.d) > 1) row.divergence.error += term * relative;
    row.acceptance.error += std::min(c.p, c.q) * (relative + 4 * u32) + tiny32;
  }
  row.divergence.value = row.divergence.value < 0 ? 0 : row.divergence.value;
  row.divergence.error += 4 * u32 * (log_v + 3) * row.divergence.value;
  row.acceptance.error += 4 * u32 * (log_v + 3) * row.acceptance.value;
  row.dz = kind == DivergenceKind::forward_kl
               ? forward_dz(columns)
               : centered_dz(kind, beta, student, columns, slope_mean, &row.slope_sum);
  return row;
}

Estimate divergence_loss(const RowOf& student, const DivergenceRow& row) {
  const double label_weight = student.call.divergence.label_weight;
  Estimate loss = row.divergence;
  if (label_weight != 0) {
    const Estimate label = logprob(student);
    loss.value -= label_weight * label.value;
    loss.error += label_weight * (label.error + 2 * u32 * std::fabs(label.value));
  }
  return weighted(loss, student.token);
}

RowGradient divergence_gradient(const Call& call, const Tokens& tokens, const Token& token,
                                const Row& student, const DivergenceRow& row) {
  const double label_weight = call.divergence.label_weight;
  const double upstream = token.upstream * token.token_weight;
  RowGradient gradient(row.dz.size());
  for (size_t j = 0; j < row.dz.size(); ++j) {
    const bool is_target = static_cast<int64_t>(j) == token.column;
    Estimate dz = row.dz[j];
    double magnitude = std::fabs(dz.value);
    if (label_weight != 0) {
      const double p = student.probability[j];
      dz.value += label_weight * (p - (is_target ? 1 : 0));
      magnitude += label_weight * (p + (is_target ? 1 : 0));
      if (!student.probability_error.empty())
        dz.error += label_weight * student.probability_error[j];
    }
    magnitude *= std::fabs(upstream);
    dz.value *= upstream;
    dz.error = std::fabs(upstream) * dz.error + 8 * u32 * magnitude;
    gradient.set(call.options, student, j, dz, magnitude);
  }
  gradient.stored_scale = (tokens.upstream_scale + std::fabs(upstream) * (1 + label_weight)) *
                          std::max(1.0, tokens.steepest);
  return gradient;
}

}  // namespace logitless::reference
