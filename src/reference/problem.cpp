// SPDX-License-Identifier: Apache-2.0
// Targets, weights, the mean's normalizer and the upstream gradients of every token ("Which tokens
// count" and "Reduction" of docs/semantics.md).
#include "src/reference/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/message.h"
#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

constexpr double u32 = 0x1p-24;

Status read_targets(const Problem& problem, Tokens* tokens) {
  const LossOptions& options = problem.options;
  const std::vector<int64_t> target = read_indices(problem.target);
  tokens->token.assign(target.size(), {});
  for (size_t i = 0; i < target.size(); ++i) {
    Token& token = tokens->token[i];
    token.target = target[i];
    if (target[i] == options.ignore_index) continue;
    if (target[i] < 0 || target[i] >= problem.vocabulary()) {
      if (options.out_of_range == OutOfRange::ignore) continue;
      return error(StatusCode::target_out_of_range,
                   "target[%zu] is %lld; allowed: 0 to %lld, or ignore_index %lld", i,
                   static_cast<long long>(target[i]),
                   static_cast<long long>(problem.vocabulary() - 1),
                   static_cast<long long>(options.ignore_index));
    }
    token.counts = true;
    ++tokens->counted;
    const int64_t column = target[i] - (options.vocab_total > 0 ? options.vocab_start : 0);
    if (column >= 0 && column < problem.columns()) token.column = column;
  }
  return {};
}

void read_class_weights(const Problem& problem, Tokens* tokens) {
  const int64_t columns = problem.columns();
  tokens->class_weight.assign(columns, 1.0);
  tokens->class_weight_sum = static_cast<double>(problem.vocabulary());
  if (!problem.weights.vocab) return;
  const std::vector<double> whole = read(problem.weights.vocab);  // [V or vocab_total]
  const int64_t start = problem.options.vocab_total > 0 ? problem.options.vocab_start : 0;
  std::copy_n(whole.begin() + start, columns, tokens->class_weight.begin());
  tokens->class_weight_sum = 0;
  for (const double c : whole) tokens->class_weight_sum += c;
  for (Token& token : tokens->token) {
    if (token.counts) token.class_weight = whole[token.target];
  }
}

void count_normalizer(const Problem& problem, Tokens* tokens) {
  const LossOptions& options = problem.options;
  if (options.reduction != Reduction::mean) return;
  if (problem.weights.normalizer) {
    tokens->normalizer = read(problem.weights.normalizer)[0];
  } else if (options.normalizer != 0) {
    tokens->normalizer = options.normalizer;
  } else {
    double sum = 0, magnitude = 0;
    for (const Token& token : tokens->token) {
      if (!token.counts) continue;
      sum += token.class_weight;
      magnitude += std::fabs(token.class_weight);
    }
    tokens->normalizer = sum;
    if (problem.weights.vocab && sum != 0) {
      tokens->normalizer_error =
          u32 * (std::log2(tokens->counted) + 2) * magnitude / std::fabs(sum);
    }
  }
  tokens->empty_mean = tokens->normalizer == 0;
}

// Returns what the upstream gradient of a loss is multiplied with: 1/normalizer for the mean.
double reduction_factor(const Problem& problem, const Tokens& tokens) {
  if (!tokens.empty_mean) return 1 / tokens.normalizer;
  return problem.options.empty_mean == EmptyMean::zero ? 0
                                                       : std::numeric_limits<double>::quiet_NaN();
}

// Element i of an optional [N] view.
std::vector<double> per_token(const TensorView& view, int64_t tokens, double absent) {
  return view ? read(view) : std::vector<double>(tokens, absent);
}

}  // namespace

Status read_tokens(const Problem& problem, Tokens* tokens) {
  Status status = read_targets(problem, tokens);
  if (!status.ok()) return status;
  read_class_weights(problem, tokens);
  count_normalizer(problem, tokens);

  const int64_t n = problem.tokens();
  const double factor = reduction_factor(problem, *tokens);
  std::vector<double> upstream(n, 1.0);
  if (problem.grad_loss) {
    upstream = problem.options.reduction == Reduction::none
                   ? read(problem.grad_loss)
                   : std::vector<double>(n, read(problem.grad_loss)[0]);
  }
  const auto token_weight = per_token(problem.weights.token, n, 1);
  const auto grad_lse = per_token(problem.grad_lse, n, 0);
  const auto grad_target_logit = per_token(problem.grad_target_logit, n, 0);
  const auto grad_entropy = per_token(problem.grad_entropy, n, 0);
  const auto row_reference = per_token(problem.row_reference, n, 0);
  const auto row_log_sum = per_token(problem.row_log_sum, n, 0);
  const auto entropy = per_token(problem.entropy, n, 0);
  for (int64_t i = 0; i < n; ++i) {
    Token& token = tokens->token[i];
    if (!token.counts) continue;
    token.token_weight = token_weight[i];
    token.upstream = upstream[i] * factor;
    token.grad_lse = grad_lse[i];
    token.grad_target_logit = grad_target_logit[i];
    token.grad_entropy = grad_entropy[i];
    token.row_reference = row_reference[i];
    token.row_log_sum = row_log_sum[i];
    token.entropy = entropy[i];
    for (const double g :
         {token.upstream, token.grad_lse, token.grad_target_logit, token.grad_entropy}) {
      tokens->upstream_scale = std::max(tokens->upstream_scale, std::fabs(g));
    }
  }
  return {};
}

}  // namespace logitless::reference
