// SPDX-License-Identifier: Apache-2.0
// Targets, weights, the mean's normalizer and the upstream gradients of every token ("Which tokens
// count" and "Reduction" of docs/semantics.md).
#include "src/reference/tokens.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <limits>

#include "src/message.h"
#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

constexpr double u32 = 0x1p-24;

Status read_targets(const Call& call, Tokens* tokens) {
  const LossOptions& options = call.options;
  if (!call.target) {  // optional for LinearDivergence
    tokens->token.assign(call.tokens(), {.counts = true});
    tokens->counted = call.tokens();
    return {};
  }
  const std::vector<int64_t> target = read_indices(call.target);
  tokens->token.assign(target.size(), {});
  for (size_t i = 0; i < target.size(); ++i) {
    Token& token = tokens->token[i];
    token.target = target[i];
    if (target[i] == options.ignore_index) continue;
    if (target[i] < 0 || target[i] >= call.vocab_total()) {
      if (options.out_of_range == OutOfRange::ignore) continue;
      return error(StatusCode::target_out_of_range,
                   "target[%zu] is %lld; allowed: 0 to %lld, or ignore_index %lld", i,
                   static_cast<long long>(target[i]),
                   static_cast<long long>(call.vocab_total() - 1),
                   static_cast<long long>(options.ignore_index));
    }
    token.counts = true;
    ++tokens->counted;
    const int64_t column = target[i] - call.vocab_start();
    if (column >= 0 && column < call.vocab()) token.column = column;
  }
  return {};
}

// Reads where each token's ids start, and the end of the last.
Status read_offsets(const Call& call, std::vector<int64_t>* offsets) {
  const int64_t tokens = call.tokens(), all = call.all_chosen();
  if (!call.lists()) {
    for (int64_t i = 0; i <= tokens; ++i) offsets->push_back(i * call.chosen());
    return {};
  }
  *offsets = read_indices(call.id_offsets);
  for (int64_t i = 0; i <= tokens; ++i) {
    const int64_t least = i == 0 ? 0 : i == tokens ? all : (*offsets)[i - 1];
    const int64_t most = i == 0 ? 0 : all, offset = (*offsets)[i];
    if (offset >= least && offset <= most) continue;
    return error(StatusCode::invalid_argument, "id_offsets[%lld] is %lld; allowed: %lld to %lld",
                 static_cast<long long>(i), static_cast<long long>(offset),
                 static_cast<long long>(least), static_cast<long long>(most));
  }
  return {};
}

// Reads the chosen columns of the tokens that count, and their gradients if the op has any.
Status read_chosen(const Call& call, const std::vector<int64_t>& offsets, Tokens* tokens) {
  const std::vector<int64_t> ids = read_indices(call.ids);  // [N, K] or [M]
  const std::vector<double> gradients =
      call.forward ? std::vector<double>{} : read(call.grad_logits_at);
  for (size_t i = 0; i < tokens->token.size(); ++i) {
    Token& token = tokens->token[i];
    token.first_chosen = offsets[i];
    token.chosen.assign(static_cast<size_t>(offsets[i + 1] - offsets[i]), {});
    if (!token.counts) continue;
    for (size_t k = 0; k < token.chosen.size(); ++k) {
      const size_t place = static_cast<size_t>(offsets[i]) + k;
      const int64_t id = ids[place];
      if (id < 0 || id >= call.vocab_total()) {
        if (id == -1 || call.options.out_of_range == OutOfRange::ignore) continue;
        char where[48];
        std::snprintf(where, sizeof(where), call.lists() ? "%zu" : "%zu, %zu",
                      call.lists() ? place : i, k);
        return error(StatusCode::target_out_of_range,
                     "ids[%s] is %lld; allowed: 0 to %lld, or -1 for none", where,
                     static_cast<long long>(id), static_cast<long long>(call.vocab_total() - 1));
      }
      const int64_t column = id - call.vocab_start();
      if (column >= 0 && column < call.vocab()) token.chosen[k].column = column;
      if (!call.forward) token.chosen[k].gradient = gradients[place];
    }
  }
  return {};
}

void read_class_weights(const Call& call, Tokens* tokens) {
  const int64_t columns = call.vocab();
  tokens->class_weight.assign(columns, 1.0);
  tokens->class_weight_sum = static_cast<double>(call.vocab_total());
  if (!call.vocab_weight) return;
  const std::vector<double> whole = read(call.vocab_weight);  // [V or vocab_total]
  const int64_t start = call.vocab_start();
  std::copy_n(whole.begin() + start, columns, tokens->class_weight.begin());
  tokens->class_weight_sum = 0;
  for (const double c : whole) tokens->class_weight_sum += c;
  for (Token& token : tokens->token) {
    if (token.counts) token.class_weight = whole[token.target];
  }
}

void count_normalizer(const Call& call, Tokens* tokens) {
  const LossOptions& options = call.options;
  if (options.reduction != Reduction::mean) return;
  if (call.normalizer) {
    tokens->normalizer = read(call.normalizer)[0];
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
    if (call.vocab_weight && sum != 0) {
      tokens->normalizer_error =
          u32 * (std::log2(tokens->counted) + 2) * magnitude / std::fabs(sum);
    }
  }
  tokens->empty_mean = tokens->normalizer == 0;
}

// The factor of a loss's upstream gradient, 1/normalizer for the mean.
double reduction_factor(const Call& call, const Tokens& tokens) {
  if (!tokens.empty_mean) return 1 / tokens.normalizer;
  return call.options.empty_mean == EmptyMean::zero ? 0 : std::numeric_limits<double>::quiet_NaN();
}

// Reads an optional [N] view; without it every element is `absent`.
std::vector<double> per_token(const TensorView& view, int64_t tokens, double absent) {
  return view ? read(view) : std::vector<double>(tokens, absent);
}

// The rule of "Arguments" (docs/semantics.md) for a temperature per token: NaN if it is invalid.
double usable_temperature(const LossOptions& o, double temperature) {
  const auto normal = [](double x) { return x >= FLT_MIN && x <= FLT_MAX; };
  const auto usable = [&](double x) { return x == 0 || normal(std::fabs(x)); };
  bool serves = normal(temperature) && usable(o.logit_scale / temperature);
  if (o.softcap > 0) {
    serves = serves && usable(o.softcap / temperature) && usable(temperature / o.softcap);
  }
  return serves ? temperature : std::numeric_limits<double>::quiet_NaN();
}

// False if every upstream gradient is exactly 0, unless the 0 is multiplied by inf or NaN.
bool is_active(const Call& call, double grad_loss, const Token& token) {
  if (call.forward) return true;
  const double product = grad_loss * token.token_weight;
  const bool none =
      call.only_chosen || ((grad_loss == 0 || token.token_weight == 0) && !std::isnan(product));
  return !none || token.grad_lse != 0 || token.grad_target_logit != 0 || token.grad_entropy != 0 ||
         std::any_of(token.chosen.begin(), token.chosen.end(),
                     [](const Chosen& c) { return c.gradient != 0; });
}

// Reads what an earlier Forward has written.
void read_saved(const Call& call, Tokens* tokens) {
  const auto n = static_cast<int64_t>(tokens->token.size());
  const auto set = [&](double Token::* member, const TensorView& view, bool reads) {
    if (!reads || !view) return;
    const std::vector<double> values = per_token(view, n, 0);
    for (int64_t i = 0; i < n; ++i) tokens->token[i].*member = values[i];
  };
  set(&Token::row_reference, call.row_reference, call.state_given());
  set(&Token::row_log_sum, call.row_log_sum, call.state_given());
  set(&Token::teacher_row_reference, call.teacher_row_reference, call.state_given());
  set(&Token::teacher_row_log_sum, call.teacher_row_log_sum, call.state_given());
  set(&Token::entropy, call.entropy, !call.forward);
  set(&Token::slope_mean, call.slope_mean, !call.forward);
}

}  // namespace

Status read_tokens(const Call& call, Tokens* tokens) {
  std::vector<int64_t> offsets;
  Status status = call.ids ? read_offsets(call, &offsets) : Status();
  if (status.ok()) status = read_targets(call, tokens);
  if (status.ok() && call.ids) status = read_chosen(call, offsets, tokens);
  if (!status.ok()) return status;
  read_class_weights(call, tokens);
  count_normalizer(call, tokens);

  const int64_t n = call.tokens();
  const double factor = reduction_factor(call, *tokens);
  std::vector<double> upstream(n, 1.0);
  if (call.grad_loss) {
    upstream = call.options.reduction == Reduction::none
                   ? read(call.grad_loss)
                   : std::vector<double>(n, read(call.grad_loss)[0]);
  }
  const auto token_weight = per_token(call.token_weight, n, 1);
  const auto temperature = per_token(call.temperature, n, call.options.temperature);
  const auto teacher_temperature =
      per_token(call.teacher_temperature, n, call.divergence.teacher_temperature);
  const auto grad_lse = per_token(call.grad_lse, n, 0);
  const auto grad_target_logit = per_token(call.grad_target_logit, n, 0);
  const auto grad_entropy = per_token(call.grad_entropy, n, 0);
  read_saved(call, tokens);
  for (int64_t i = 0; i < n; ++i) {
    Token& token = tokens->token[i];
    if (!token.counts) continue;
    token.token_weight = token_weight[i];
    token.upstream = upstream[i] * factor;
    token.grad_lse = grad_lse[i];
    token.grad_target_logit = grad_target_logit[i];
    token.grad_entropy = grad_entropy[i];
    token.active = is_active(call, upstream[i], token);
    if (token.active) ++tokens->active;
    token.temperature = usable_temperature(call.options, temperature[i]);
    if (call.diverges) {
      token.teacher_temperature =
          usable_temperature(call.teacher_options(), teacher_temperature[i]);
    }
    if (token.active && (std::isnan(token.temperature) || std::isnan(token.teacher_temperature))) {
      tokens->bad_temperature = true;
    }
    const double steep = std::fabs(static_cast<double>(call.options.logit_scale));
    tokens->steepest = std::max(tokens->steepest, steep / token.temperature);
    double at_chosen = 0;
    for (const Chosen& c : token.chosen) at_chosen += std::fabs(c.gradient);
    for (const double g :
         {token.upstream, token.grad_lse, token.grad_target_logit, token.grad_entropy, at_chosen}) {
      tokens->upstream_scale = std::max(tokens->upstream_scale, std::fabs(g));
    }
  }
  return {};
}

}  // namespace logitless::reference
