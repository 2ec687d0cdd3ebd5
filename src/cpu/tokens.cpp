// SPDX-License-Identifier: Apache-2.0
// Prepares the tokens of a call (compaction, weights, normalizer, gradient scale), and writes the
// reduced loss and the statistics.
#include "src/cpu/tokens.h"

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <limits>

#include "src/cpu/chosen.h"
#include "src/message.h"
#include "src/row/loss.h"
#include "src/row/statistics.h"

namespace logitless::cpu {
namespace {

void place_arrays(void* memory, int64_t tokens, bool with_places, Tokens* t) {
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
  if (with_places) take(t->place);
}

// Sums f(i) over [begin, end) in double, in an order that depends only on the range.
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
  const auto count = [&](int64_t i, int64_t target) {
    const int64_t k = tokens->valid++;
    const bool here = target >= start && target < start + vocab;
    tokens->row[k] = i;
    tokens->target[k] = here ? target - start : -1;
    tokens->target_weight[k] = call.vocab_weight ? f32_at(call.vocab_weight, target) : 1;
    tokens->token_weight[k] = call.token_weight ? f32_at(call.token_weight, i) : 1;
  };
  for (int64_t i = 0; i < tokens->total; ++i) {
    if (!call.target) {
      count(i, -1);
      continue;
    }
    const int64_t target = int_at(call.target, i);
    if (target == o.ignore_index) continue;
    if (target < 0 || target >= whole) {
      if (o.out_of_range == OutOfRange::ignore) continue;
      return error(StatusCode::target_out_of_range,
                   "target[%lld] is %lld; allowed: 0 to %lld, or ignore_index %lld",
                   static_cast<long long>(i), static_cast<long long>(target),
                   static_cast<long long>(whole - 1), static_cast<long long>(o.ignore_index));
    }
    count(i, target);
  }
  return {};
}

// Fails on an id outside the vocabulary, where that is an error.
Status check_ids(const Call& call, const Tokens& tokens) {
  if (!call.ids || call.options.out_of_range == OutOfRange::ignore) return {};
  for (int64_t n = 0; n < tokens.valid; ++n) {
    const int64_t i = tokens.row[n];
    const ChosenPlaces places = places_of(call, i);
    for (int64_t k = 0; k < places.count; ++k) {
      const int64_t id = id_at(call.ids, places, k);
      if (id >= -1 && id < call.vocab_total()) continue;
      char where[48];
      if (call.lists()) {
        std::snprintf(where, sizeof(where), "%lld", static_cast<long long>(places.row + k));
      } else {
        std::snprintf(where, sizeof(where), "%lld, %lld", static_cast<long long>(i),
                      static_cast<long long>(k));
      }
      return error(StatusCode::target_out_of_range,
                   "ids[%s] is %lld; allowed: 0 to %lld, or -1 for none", where,
                   static_cast<long long>(id), static_cast<long long>(call.vocab_total() - 1));
    }
  }
  return {};
}

// A token with an upstream gradient of 0 is inactive, unless the 0 is multiplied by inf or NaN.
bool is_active(const Call& call, float grad_loss, float token_weight, int64_t i) {
  if (call.only_chosen) return has_chosen_gradient(call, i);
  const bool zero = grad_loss == 0 || token_weight == 0;
  if (!zero || grad_loss * token_weight != 0) return true;
  for (const TensorView* view : {&call.grad_lse, &call.grad_target_logit, &call.grad_entropy}) {
    if (*view && f32_at(*view, i) != 0) return true;
  }
  return has_chosen_gradient(call, i);
}

void leave_out_inactive(const Call& call, Tokens* t) {
  const bool per_row = call.options.reduction == Reduction::none;
  int64_t active = 0;
  for (int64_t k = 0; k < t->valid; ++k) {
    const int64_t i = t->row[k];
    const float grad_loss = call.grad_loss ? f32_at(call.grad_loss, per_row ? i : 0) : 1;
    if (!is_active(call, grad_loss, t->token_weight[k], i)) continue;
    t->row[active] = i;
    t->target[active] = t->target[k];
    t->target_weight[active] = t->target_weight[k];
    t->token_weight[active] = t->token_weight[k];
    if (t->place != nullptr) t->place[active] = k;
    ++active;
  }
  t->valid = active;
}

double class_weight_sum(const TensorView& weight, int64_t whole) {
  if (!weight) return static_cast<double>(whole);
  return pairwise_sum(0, whole, [&](int64_t j) { return f32_at(weight, j); });
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

// A NaN or infinite gradient must not affect other rows, so it does not enter the maximum.
void include(double x, double* largest) {
  if (std::isfinite(x) && std::fabs(x) > *largest) *largest = std::fabs(x);
}

GradientSizes gradient_sizes(const Call& call, const Tokens& tokens) {
  GradientSizes sizes{.valid = tokens.valid,
                      .per_row = call.options.reduction == Reduction::none && call.grad_loss};
  const double smoothing =
      static_cast<double>(tokens.constants.smoothing_per_class) * tokens.constants.class_weight_sum;
  for (int64_t k = 0; k < tokens.valid; ++k) {
    const double onehot = (1 - call.options.label_smoothing) * std::fabs(tokens.target_weight[k]);
    include(tokens.token_weight[k] * (onehot + smoothing), &sizes.weight);
    if (sizes.per_row) include(f32_at(call.grad_loss, tokens.row[k]), &sizes.upstream);
  }
  if (call.forward) return sizes;
  for (const TensorView* view : {&call.grad_lse, &call.grad_target_logit, &call.grad_entropy}) {
    if (!*view) continue;
    sizes.of_statistics = true;
    for (int64_t k = 0; k < tokens.valid; ++k) {
      include(f32_at(*view, tokens.row[k]), &sizes.statistic);
    }
  }
  if (!call.ids) return sizes;
  sizes.of_statistics = true;
  for (int64_t k = 0; k < tokens.valid; ++k) {
    include(size_of_chosen_gradients(call, tokens.row[k]), &sizes.statistic);
  }
  return sizes;
}

// `temperature` is the lowest of all tokens, which has the steepest slope.
void scale_gradients(const Call& call, int64_t vocab, float temperature, Tokens* tokens) {
  LossOptions o = call.options;
  o.temperature = temperature;
  const int64_t whole = vocabulary_of(o, vocab);
  const GradientSizes sizes = gradient_sizes(call, *tokens);
  const float grad_loss =
      call.grad_loss && !sizes.per_row ? *call.grad_loss.as<const float>() : 1.0f;
  const GradientScale s = gradient_scale(o, whole, grad_loss, tokens->normalizer, sizes);
  tokens->gradient_scale = s.scale;
  tokens->inv_gradient_scale = s.inverse;
  for (int64_t k = 0; k < tokens->valid; ++k) {
    tokens->upstream[k] =
        sizes.per_row
            ? upstream_of_row(o, whole, f32_at(call.grad_loss, tokens->row[k]) * s.inverse)
            : s.upstream;
  }
}

// The rules of "Arguments" (docs/semantics.md) for a temperature.
bool may_be_number(const LogitMap& map, float temperature) {
  const auto normal = [](double x) { return x >= FLT_MIN && x <= FLT_MAX; };
  const double scale = std::fabs(static_cast<double>(map.scale)), t = temperature;
  if (!normal(t) || (scale != 0 && !normal(scale / t))) return false;
  return !(map.softcap > 0) || (normal(map.softcap / t) && normal(t / map.softcap));
}

// Returns the lowest temperature of all tokens, or that of the options.
float read_temperatures(const TensorView& view, const LossOptions& options, const Tokens& tokens,
                        const TensorView& fault, Temperatures* read) {
  read->view = view;
  if (!view) return options.temperature;
  const LogitMap map = logit_map(options);
  float least = HUGE_VALF;
  for (int64_t k = 0; k < tokens.valid; ++k) {
    const float t = f32_at(view, tokens.row[k]);
    if (may_be_number(map, t)) {
      least = std::min(least, t);
    } else {
      read->is_bad = true;
    }
  }
  if (read->is_bad && fault) *fault.as<int32_t>() |= 4;
  return least == HUGE_VALF ? 1 : least;
}

void write_index(const TensorView& view, int64_t i, int64_t value) {
  if (view.dtype == DType::i64) {
    view.as<int64_t>()[i * view.stride[0]] = value;
  } else {
    view.as<int32_t>()[i * view.stride[0]] = static_cast<int32_t>(value);
  }
}

RowStatistics row_of(const Call& call, const Tokens& tokens, const RowState* states,
                     const RareStatistics* rare, int64_t k) {
  RowStatistics row;
  static_cast<RowState&>(row) = states[k];
  if (rare != nullptr) static_cast<RareStatistics&>(row) = rare[k];
  row.argmax += call.vocab_start();
  row.target_elsewhere = tokens.target[k] < 0;
  if (row.target_elsewhere) row.target_logit = -std::numeric_limits<float>::infinity();
  return row;
}

// loss_of(k) is the loss of compacted token k.
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

uint64_t tokens_bytes(int64_t tokens, bool with_places) {
  const uint64_t indices = padded(tokens * sizeof(int64_t));
  return (with_places ? 3 : 2) * indices + 3 * padded(tokens * sizeof(float));
}

Status prepare_tokens(const Call& call, int64_t vocab, void* memory, Tokens* tokens) {
  *tokens = {};
  tokens->total = call.target ? call.target.shape[0] : call.tokens();
  place_arrays(memory, tokens->total, places(call), tokens);
  Status status = check_id_offsets(call);
  if (status.ok()) status = collect(call, vocab, tokens);
  if (status.ok()) status = check_ids(call, *tokens);
  if (!status.ok()) return status;
  const LossOptions& o = call.options;
  const int64_t whole = vocabulary_of(o, vocab);
  const bool smooths = o.label_smoothing > 0;
  tokens->constants =
      loss_constants(o, whole, smooths ? class_weight_sum(call.vocab_weight, whole) : 0);
  tokens->normalizer = normalizer_of(call, *tokens);
  tokens->empty_mean = tokens->normalizer == 0;
  if (!call.forward) leave_out_inactive(call, tokens);
  const float temperature =
      read_temperatures(call.temperature, o, *tokens, call.fault, &tokens->temperature);
  if (call.teacher_temperature) {
    read_temperatures(call.teacher_temperature, call.teacher_options(), *tokens, call.fault,
                      &tokens->teacher_temperature);
  }
  if (call.gradients) scale_gradients(call, vocab, temperature, tokens);
  return {};
}

LogitMap map_of(const LogitMap& map, const Temperatures& given, int64_t row) {
  if (!given.view) return map;
  float temperature = f32_at(given.view, row);
  if (given.is_bad && !may_be_number(map, temperature)) {
    temperature = std::numeric_limits<float>::quiet_NaN();
  }
  LogitMap own = map;
  own.temperature = temperature;
  return own;
}

void write_losses(const Tokens& tokens, const float* losses, const TensorView& loss,
                  const LossOptions& options) {
  reduce_loss(tokens, [&](int64_t k) { return losses[k]; }, loss, options);
}

void write_tokens(const Call& call, const Tokens& tokens, const RowState* states,
                  const RareStatistics* rare) {
  const auto loss_of = [&](int64_t k) {
    const float target_weight = tokens.target[k] < 0 ? 0 : tokens.target_weight[k];
    return row_loss(tokens.constants, states[k], target_weight, tokens.token_weight[k]);
  };
  reduce_loss(tokens, loss_of, call.loss, call.options);
  for (int64_t i = 0, k = 0; i < tokens.total; ++i) {
    const bool counts = k < tokens.valid && tokens.row[k] == i;
    RowStatistics row;
    if (counts) row = row_of(call, tokens, states, rare, k++);
    with_each_statistic([&](auto place) {
      constexpr const Statistic& statistic = kStatistics[place()];
      const TensorView& view = call.*statistic.tensor;
      if (!view) return;
      if constexpr (statistic.index != nullptr) {
        write_index(view, i, counts ? statistic.index(row) : -1);
      } else {
        write_f32(view, i, counts ? statistic.number(row) : 0);
      }
    });
  }
}

}  // namespace logitless::cpu
