// SPDX-License-Identifier: Apache-2.0
// The tokens of a call: compaction, weights, normalizer, gradient scale; the reduced loss and the
// statistics.
#include "src/cpu/tokens.h"

#include <cmath>
#include <limits>

#include "src/message.h"

namespace logitless::cpu {
namespace {

void place(void* memory, int64_t tokens, Tokens* t) {
  char* next = static_cast<char*>(memory);
  auto take = [&](auto*& array) {
    using T = std::remove_reference_t<decltype(*array)>;
    array = reinterpret_cast<T*>(next);
    next += padded(tokens * sizeof(T));
  };
  take(t->row);
  take(t->target);
  take(t->target_weight);
  take(t->token_weight);
  take(t->upstream);
}

// Sum of f(i) over [begin, end) in double, in an order that depends on the range alone.
template <class F>
double pairwise_sum(int64_t begin, int64_t end, const F& f) {
  if (end - begin > 64) {
    const int64_t middle = begin + (end - begin) / 2;
    return pairwise_sum(begin, middle, f) + pairwise_sum(middle, end, f);
  }
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += f(i);
  return sum;
}

int64_t vocabulary_of(const LossOptions& options, int64_t vocab) {
  return options.vocab_total > 0 ? options.vocab_total : vocab;
}

Status collect(const Call& call, int64_t vocab, Tokens* tokens) {
  const LossOptions& o = call.options;
  const int64_t whole = vocabulary_of(o, vocab);
  const int64_t start = o.vocab_total > 0 ? o.vocab_start : 0;
  for (int64_t i = 0; i < tokens->total; ++i) {
    const int64_t target = int_at(call.target, i);
    if (target == o.ignore_index) continue;
    if (target < 0 || target >= whole) {
      if (o.out_of_range == OutOfRange::ignore) continue;
      return error(StatusCode::target_out_of_range,
                   "target[%lld] is %lld; allowed: 0 to %lld, or ignore_index %lld",
                   static_cast<long long>(i), static_cast<long long>(target),
                   static_cast<long long>(whole - 1), static_cast<long long>(o.ignore_index));
    }
    const int64_t k = tokens->valid++;
    const bool here = target >= start && target < start + vocab;
    tokens->row[k] = i;
    tokens->target[k] = here ? target - start : -1;
    tokens->target_weight[k] = call.vocab_weight ? f32_at(call.vocab_weight, target) : 1;
    tokens->token_weight[k] = call.token_weight ? f32_at(call.token_weight, i) : 1;
  }
  return {};
}

LossConstants constants_of(const LossOptions& o, const TensorView& weight, int64_t whole) {
  LossConstants k{.smoothing = o.label_smoothing, .z_loss = o.z_loss};
  if (o.label_smoothing == 0) return k;
  k.smoothing_per_class = static_cast<float>(o.label_smoothing / static_cast<double>(whole));
  k.class_weight_sum = static_cast<float>(
      !weight ? static_cast<double>(whole)
              : pairwise_sum(0, whole, [&](int64_t j) { return f32_at(weight, j); }));
  return k;
}

double normalizer_of(const Call& call, const Tokens& tokens) {
  const LossOptions& o = call.options;
  if (o.reduction != Reduction::mean) return 1;
  if (call.normalizer && call.normalizer.dtype == DType::i64) {
    return static_cast<double>(*call.normalizer.as<const int64_t>());
  }
  if (call.normalizer) return *call.normalizer.as<const float>();
  if (o.normalizer != 0) return o.normalizer;
  if (!call.vocab_weight) return static_cast<double>(tokens.valid);
  return pairwise_sum(0, tokens.valid, [&](int64_t k) { return tokens.target_weight[k]; });
}

// The least power of two >= x; 0 for 0. Kept where it and its inverse are normal numbers.
double power_of_two_above(double x) {
  if (!(x > 0)) return 0;
  int exponent;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(1.0, std::clamp(mantissa == 0.5 ? exponent - 1 : exponent, -100, 100));
}

// Returns how far weights and the slope of the logit map take |draw| / |g| beyond what f16 holds,
// or below it; else 1.
double weight_scale(const LossOptions& o, const Tokens& tokens) {
  const double steepest = std::fabs(static_cast<double>(o.logit_scale)) / o.temperature;
  const double smoothing =
      static_cast<double>(tokens.constants.smoothing_per_class) * tokens.constants.class_weight_sum;
  double largest = 0;
  for (int64_t k = 0; k < tokens.valid; ++k) {
    const double w = (1 - o.label_smoothing) * std::fabs(tokens.target_weight[k]) + smoothing;
    const double magnitude = std::fabs(tokens.token_weight[k]) * w * steepest;
    if (std::isfinite(magnitude) && magnitude > largest) largest = magnitude;
  }
  if (largest > 8192) return power_of_two_above(largest / 8192);
  return largest > 0 && largest < 0.125 ? power_of_two_above(largest) : 1;
}

// |g|'s part in the common factor: a NaN or infinite gradient stays in its own row.
void include(double g, double* largest) {
  if (std::isfinite(g) && std::fabs(g) > *largest) *largest = std::fabs(g);
}

double largest_statistics_gradient(const Call& call, const Tokens& tokens) {
  double largest = 0;
  if (!call.forward) {
    for (const TensorView* view : {&call.grad_lse, &call.grad_target_logit, &call.grad_entropy}) {
      if (!*view) continue;
      for (int64_t k = 0; k < tokens.valid; ++k) include(f32_at(*view, tokens.row[k]), &largest);
    }
  }
  return largest;
}

bool has_statistics_gradient(const Call& call) {
  if (!call.forward) return call.grad_lse || call.grad_target_logit || call.grad_entropy;
  return false;
}

// g of sum and mean.
double common_upstream(const TensorView& grad_loss, const LossOptions& o, const Tokens& tokens) {
  double g = grad_loss ? *grad_loss.as<const float>() : 1;
  if (o.reduction == Reduction::mean) g /= tokens.normalizer;
  if (!tokens.empty_mean) return g;
  return o.empty_mean == EmptyMean::zero ? 0 : std::numeric_limits<double>::quiet_NaN();
}

// One class alone has, without z-loss, a loss of 0 whatever its logit, and a gradient of exactly 0.
bool is_flat(const LossOptions& o, int64_t vocab) {
  return o.input_kind == InputKind::logits && vocabulary_of(o, vocab) == 1 && o.z_loss == 0;
}

void scale_gradients(const Call& call, int64_t vocab, Tokens* tokens) {
  const LossOptions& o = call.options;
  const bool each = o.reduction == Reduction::none && call.grad_loss;
  const double common =
      o.reduction == Reduction::none ? 1 : common_upstream(call.grad_loss, o, *tokens);
  const double weights = weight_scale(o, *tokens);
  double scale = static_cast<float>(common) * weights;
  if (each || has_statistics_gradient(call)) {
    double largest = 0;
    for (int64_t k = 0; k < tokens->valid; ++k) {
      include(each ? f32_at(call.grad_loss, tokens->row[k]) : common, &largest);
    }
    largest = std::max(largest * weights, largest_statistics_gradient(call, *tokens));
    scale = power_of_two_above(largest);
  }
  if (tokens->valid == 0) scale = 0;  // NaN of an empty mean must not reach sums over no token
  tokens->gradient_scale = static_cast<float>(scale);
  tokens->inv_gradient_scale = scale == 0 ? 0 : static_cast<float>(1 / scale);
  for (int64_t k = 0; k < tokens->valid; ++k) {
    const float g = each ? f32_at(call.grad_loss, tokens->row[k]) : static_cast<float>(common);
    float relative = g * tokens->inv_gradient_scale;
    if (!each && !has_statistics_gradient(call)) relative = static_cast<float>(1 / weights);
    if (is_flat(o, vocab) && std::isfinite(relative)) relative = 0;
    tokens->upstream[k] = relative;
  }
}

void write_f32(const TensorView& view, int64_t i, float value) {
  if (view) view.as<float>()[i * view.stride[0]] = value;
}

void write_argmax(const TensorView& view, int64_t i, int64_t value) {
  if (!view) return;
  if (view.dtype == DType::i64) {
    view.as<int64_t>()[i * view.stride[0]] = value;
  } else {
    view.as<int32_t>()[i * view.stride[0]] = static_cast<int32_t>(value);
  }
}

void write_statistics(const TokenStatistics& out, int64_t i, const RowState& s, float lse,
                      int64_t argmax) {
  write_f32(out.lse, i, lse);
  write_f32(out.target_logit, i, s.target_logit);
  write_f32(out.entropy, i, s.entropy);
  write_f32(out.row_reference, i, s.reference);
  write_f32(out.row_log_sum, i, s.log_sum);
  write_f32(out.weighted_logit_sum, i, s.weighted_logit_sum);
  write_argmax(out.argmax, i, argmax);
}

// loss_of(k): the loss of compacted token k.
template <class F>
void reduce_loss(const Tokens& tokens, const F& loss_of, const TensorView& loss,
                 const LossOptions& o) {
  if (!loss) return;
  if (o.reduction == Reduction::none) {
    for (int64_t i = 0, k = 0; i < tokens.total; ++i) {
      const bool counts = k < tokens.valid && tokens.row[k] == i;
      write_f32(loss, i, counts ? loss_of(k++) : 0);
    }
    return;
  }
  double sum = pairwise_sum(0, tokens.valid, loss_of);
  if (o.reduction == Reduction::mean) sum /= tokens.normalizer;
  if (tokens.empty_mean) {
    sum = o.empty_mean == EmptyMean::zero ? 0 : std::numeric_limits<double>::quiet_NaN();
  }
  *loss.as<float>() = static_cast<float>(sum);
}

}  // namespace

uint64_t tokens_bytes(int64_t tokens) {
  return 2 * padded(tokens * sizeof(int64_t)) + 3 * padded(tokens * sizeof(float));
}

Status prepare_tokens(const Call& call, int64_t vocab, void* memory, Tokens* tokens) {
  *tokens = {};
  tokens->total = call.target.shape[0];
  place(memory, tokens->total, tokens);
  Status status = collect(call, vocab, tokens);
  if (!status.ok()) return status;
  const LossOptions& o = call.options;
  tokens->constants = constants_of(o, call.vocab_weight, vocabulary_of(o, vocab));
  tokens->normalizer = normalizer_of(call, *tokens);
  tokens->empty_mean = tokens->normalizer == 0;
  tokens->loss_scale = static_cast<float>(1 / tokens->normalizer);
  if (call.gradients) scale_gradients(call, vocab, tokens);
  return {};
}

void write_losses(const Tokens& tokens, const float* losses, const TensorView& loss,
                  const LossOptions& options) {
  reduce_loss(tokens, [&](int64_t k) { return losses[k]; }, loss, options);
}

void write_tokens(const Tokens& tokens, const RowState* states, const TokenOutputs& outputs) {
  const LossOptions& o = outputs.options;
  const auto loss_of = [&](int64_t k) {
    const float target_weight = tokens.target[k] < 0 ? 0 : tokens.target_weight[k];
    return row_loss(tokens.constants, states[k], target_weight, tokens.token_weight[k]);
  };
  reduce_loss(tokens, loss_of, outputs.loss, o);
  const int64_t start = o.vocab_total > 0 ? o.vocab_start : 0;
  for (int64_t i = 0, k = 0; i < tokens.total; ++i) {
    if (k == tokens.valid || tokens.row[k] != i) {
      write_statistics(outputs.statistics, i, {}, 0, -1);
      continue;
    }
    RowState s = states[k];
    if (tokens.target[k] < 0) s.target_logit = -std::numeric_limits<float>::infinity();
    write_statistics(outputs.statistics, i, s, s.lse(), s.argmax + start);
    ++k;
  }
}

}  // namespace logitless::cpu
