// SPDX-License-Identifier: Apache-2.0
// Builds the op of a case on guarded host memory.
#pragma once

#include <cmath>
#include <stdexcept>

#include "cases.h"
#include "data.h"
#include "memory.h"
#include "src/reference/reference.h"

namespace logitless::conformance {

// The tensor with one row per token.
template <class Op>
const TensorView& rows_of(const Op& op) {
  if constexpr (LinearOp<Op>) {
    return op.input;
  } else {
    return op.logits;
  }
}

template <class Op>
struct Problem {
  Op op{};
  Pool pool;
  reference::BoundModel model{};
};

enum class Role { input, output };

// The layout of a tensor under a placement. In the role of an output it is never broadcast.
inline Layout layout_of(Placement placement, const std::vector<int64_t>& shape, Role role) {
  const size_t rank = shape.size();
  if (rank == 0) return {.offset = placement == Placement::unaligned ? 1 : 0};
  const int64_t columns = rank == 2 ? shape[1] : 1;
  switch (placement) {
    case Placement::padded:
      return rank == 2 ? Layout{.stride = {columns + 5, 1}} : Layout{};
    case Placement::strided:
      return rank == 2 ? Layout{.stride = {3 * columns + 7, 3}} : Layout{.stride = {2, 0}};
    case Placement::transposed:
      return rank == 2 ? Layout{.stride = {1, shape[0] + 3}} : Layout{};
    case Placement::broadcast:
      if (role == Role::output) return {};
      return rank == 2 ? Layout{.stride = {0, 1}, .broadcast = true} : Layout{.broadcast = true};
    case Placement::unaligned:
      return {.offset = 3};
    case Placement::dense:
      break;
  }
  return {};
}

// Fills the fields of an op from a case.
template <class Op>
class Builder {
 public:
  explicit Builder(const Case& c) : c_(allowed(c)), values_(make_values(c)) {}

  Problem<Op> build() {
    // Where values are constant, or one row or column repeats, rounding errors align.
    p_.model.structured = c_.data == Data::constant || c_.placement == Placement::broadcast;
    if constexpr (LinearOp<Op>) {
      add_linear();
    } else {
      p_.op.logits = matrix(c_.dtype, c_.shape.tokens, c_.shape.vocab, values_.logits);
    }
    if constexpr (std::is_same_v<Op, Softmax>) {
      p_.op.probabilities =
          c_.in_place ? p_.op.logits : output(c_.grad_input, {c_.shape.tokens, c_.shape.vocab});
    } else {
      add_loss();
    }
    return std::move(p_);
  }

 private:
  // With only_chosen, other upstream gradients and what they need may not be given.
  static Case allowed(Case c) {
    if (!c.only_chosen) return c;
    c.options.label_smoothing = c.options.z_loss = 0;
    c.options.normalizer = 0, c.normalizer = NormalizerKind::counted;
    c.token_weight = c.vocab_weight = c.grad_loss = c.saved_state = false;
    c.grad_lse = c.grad_target_logit = c.grad_entropy = false;
    return c;
  }
  TensorView put(DType dtype, std::vector<int64_t> shape, std::vector<double> values) {
    return p_.pool.add(dtype, shape, values, layout_of(c_.placement, shape, Role::input));
  }
  TensorView matrix(DType dtype, int64_t rows, int64_t columns, std::vector<double> values) {
    // With stride 0 all rows are written to the same memory and the last one wins, as in the op.
    return put(dtype, {rows, columns}, std::move(values));
  }
  TensorView vector(int64_t size, double scale, double offset, uint64_t salt) {
    return put(DType::f32, {size}, normals(size, c_.seed * 31 + salt, scale, offset));
  }
  // The same tokens are inactive in all upstream gradients.
  bool is_inactive(int64_t token) const {
    return static_cast<double>((static_cast<uint64_t>(token) * 2654435761u + c_.seed) % 97) <
           97 * c_.inactive;
  }
  TensorView upstream(int64_t size, double scale, double offset, uint64_t salt) {
    std::vector<double> values = normals(size, c_.seed * 31 + salt, scale, offset);
    for (int64_t i = 0; i < size; ++i) {
      if (is_inactive(i)) values[i] = 0;
    }
    return put(DType::f32, {size}, std::move(values));
  }
  // Between 0.4 and 2.2.
  TensorView temperatures(int64_t size, uint64_t salt = 29) {
    std::vector<double> values = normals(size, c_.seed * 31 + salt);
    for (double& x : values) x = 1.3 + 0.9 * std::tanh(x);
    return put(DType::f32, {size}, std::move(values));
  }
  // Where each token's list of chosen columns starts, and the end of the last. Lists have any
  // length, even 0.
  std::vector<double> id_offsets() const {
    std::vector<double> offsets{0};
    for (int64_t i = 0; i < c_.shape.tokens; ++i) {
      const auto draw = static_cast<int64_t>(c_.seed) + i * 7;
      offsets.push_back(offsets.back() +
                        static_cast<double>(c_.lists ? draw % (2 * c_.chosen + 1) : c_.chosen));
    }
    return offsets;
  }
  // Some ids are absent, some occur twice; if targets out of range are ignored, some ids are out of
  // range too. A shard's ids are columns of the whole vocabulary.
  std::vector<double> ids(const std::vector<double>& offsets) const {
    const int64_t vocab = c_.options.vocab_total ? c_.options.vocab_total : c_.shape.vocab;
    std::vector<double> ids;
    for (int64_t i = 0; i < c_.shape.tokens; ++i) {
      const auto count = static_cast<int64_t>(offsets[i + 1] - offsets[i]);
      for (int64_t k = 0; k < count; ++k) {
        const uint64_t draw =
            (static_cast<uint64_t>(i * c_.chosen + k) * 2654435761u + c_.seed * 40503) >> 4;
        double id = static_cast<double>(draw % static_cast<uint64_t>(vocab));
        if (k > 0 && draw % 5 == 0) id = ids.back();
        if (draw % 7 == 3) id = -1;
        if (c_.outside > 0 && draw % 11 == 6) {
          id = draw % 2 == 0 ? -3 : static_cast<double>(vocab + i % 3);
        }
        ids.push_back(id);
      }
    }
    return ids;
  }
  // Gradients that must not be read are NaN; inactive tokens have 0.
  std::vector<double> gradients_at(const std::vector<double>& offsets,
                                   const std::vector<double>& ids) const {
    const int64_t vocab = c_.options.vocab_total ? c_.options.vocab_total : c_.shape.vocab;
    std::vector<double> values = normals(std::ssize(ids), c_.seed * 31 + 47, 0.3, 0.1);
    int64_t token = 0;
    for (size_t k = 0; k < ids.size(); ++k) {
      while (static_cast<double>(k) >= offsets[token + 1]) ++token;
      if (is_inactive(token)) values[k] = 0;
      if (ids[k] < 0 || ids[k] >= static_cast<double>(vocab)) values[k] = NAN;
    }
    return values;
  }
  void add_chosen() {
    const std::vector<double> offsets = id_offsets(), ids = this->ids(offsets);
    const auto shape = c_.lists ? std::vector<int64_t>{std::ssize(ids)}
                                : std::vector<int64_t>{c_.shape.tokens, c_.chosen};
    if (c_.lists) p_.op.id_offsets = of_each(c_.ids, offsets);
    if constexpr (OnlyChoosingOp<Op>) p_.op.only_chosen = c_.only_chosen;
    p_.op.ids = put(c_.ids, shape, ids);
    if constexpr (ForwardOp<Op>) {
      p_.op.logits_at = output(DType::f32, shape);
    } else {
      p_.op.grad_logits_at = put(DType::f32, shape, gradients_at(offsets, ids));
    }
  }
  void add_lists() {
    const int64_t vocab = c_.options.vocab_total ? c_.options.vocab_total : c_.shape.vocab;
    const std::vector<int64_t> shape{c_.shape.tokens, std::min(c_.listed, vocab)};
    p_.op.top_logits = output(DType::f32, shape);
    p_.op.top_ids = output(c_.argmax, shape);
  }
  TensorView output(DType dtype, std::vector<int64_t> shape) {
    return p_.pool.reserve(dtype, shape, layout_of(c_.placement, shape, Role::output));
  }
  TensorView accumulated(DType dtype, std::vector<int64_t> shape) {
    if (!c_.accumulate) return output(dtype, shape);
    int64_t count = 1;
    for (int64_t size : shape) count *= size;
    return p_.pool.add(dtype, shape, normals(count, c_.seed + 5),
                       layout_of(c_.placement, shape, Role::output));
  }
  // [N] if the reduction is none, else [] or [1].
  std::vector<int64_t> reduced() const {
    if (c_.options.reduction == Reduction::none) return {c_.shape.tokens};
    return c_.seed % 2 == 0 ? std::vector<int64_t>{} : std::vector<int64_t>{1};
  }

  void add_linear() {
    const auto [tokens, hidden, vocab] = c_.shape;
    p_.op.input = matrix(c_.dtype, tokens, hidden, values_.input);
    // The weight is not broadcast: all logits of a token would be equal.
    const Placement placement =
        c_.placement == Placement::broadcast ? Placement::dense : c_.placement;
    p_.op.weight = p_.pool.add(c_.dtype, {vocab, hidden}, values_.weight,
                               layout_of(placement, {vocab, hidden}, Role::input));
    if (c_.bias) p_.op.bias = put(c_.bias_dtype, {vocab}, normals(vocab, c_.seed + 3));
    if constexpr (DivergenceOp<Op>) add_teacher(placement);
  }

  void add_teacher(Placement placement) {
    const auto [tokens, hidden, vocab] = c_.shape;
    Teacher& teacher = p_.op.teacher;
    p_.op.divergence = c_.divergence;
    if (c_.teacher_temperatures) {
      p_.op.divergence.teacher_temperature = 1;
      teacher.temperature = temperatures(tokens, 37);
    }
    if (c_.teacher_logits) {
      teacher.logits = matrix(c_.dtype, tokens, vocab, normals(tokens * vocab, c_.seed + 43, 2));
      return;
    }
    const bool same = c_.near || c_.equal;
    const int64_t width = c_.teacher_hidden == 0 || same ? hidden : c_.teacher_hidden;
    std::vector<double> input = values_.input, weight = values_.weight;
    if (!same && c_.data != Data::constant) {
      const double scale = c_.data == Data::large ? 1000 : 1;
      input = normals(tokens * width, c_.seed + 41, scale);
      weight = normals(vocab * width, c_.seed + 42, 2 / std::sqrt(static_cast<double>(width)));
    } else if (!same) {
      input.assign(tokens * width, 0.4);
      weight.resize(vocab * width);
      for (int64_t j = 0; j < vocab * width; ++j) {
        weight[j] = 0.2 + 0.002 * static_cast<double>(j / width % 5);
      }
    } else if (c_.near) {
      const std::vector<double> noise = normals(vocab * hidden, c_.seed + 42, 1e-2);
      for (size_t j = 0; j < weight.size(); ++j) weight[j] *= 1 + noise[j];
    }
    teacher.input = matrix(c_.dtype, tokens, width, input);
    teacher.weight = p_.pool.add(c_.dtype, {vocab, width}, weight,
                                 layout_of(placement, {vocab, width}, Role::input));
    if (c_.teacher_bias) teacher.bias = put(c_.bias_dtype, {vocab}, normals(vocab, c_.seed + 44));
  }

  void add_loss() {
    p_.op.options = c_.options;
    const int64_t tokens = c_.shape.tokens;
    const int64_t vocab = c_.options.vocab_total ? c_.options.vocab_total : c_.shape.vocab;
    if (!DivergenceOp<Op> || !c_.no_target) {
      p_.op.target = put(c_.target, {tokens}, values_.target);
    }
    if (c_.token_weight || (c_.inactive > 0 && !c_.only_chosen))
      p_.op.weights.token = upstream(tokens, 0.5, 1, 11);
    if (c_.temperatures) p_.op.weights.temperature = temperatures(tokens);
    if (c_.vocab_weight) p_.op.weights.vocab = put(DType::f32, {vocab}, class_weights(vocab));
    if (c_.normalizer == NormalizerKind::f32) p_.op.weights.normalizer = put(DType::f32, {}, {6.4});
    if (c_.normalizer == NormalizerKind::i64) p_.op.weights.normalizer = put(DType::i64, {1}, {7});
    if (c_.fault) p_.op.fault = p_.pool.add(DType::i32, {1}, {0});
    if constexpr (DivergenceOp<Op> && ForwardOp<Op>) {
      add_divergence_outputs();
    } else if constexpr (ForwardOp<Op>) {
      add_forward_outputs();
    }
    if constexpr (GradientOp<Op>) {
      if (c_.grad_loss)
        p_.op.grad_loss =
            put(DType::f32, reduced(), normals(size_of_reduced(), c_.seed + 7, 0.6, 0.2));
      add_gradients();
    }
    if constexpr (BackwardOnlyOp<Op>) add_saved();
    if constexpr (ChoosingOp<Op>) {
      if (c_.chosen > 0) add_chosen();
    }
    if constexpr (ListingOp<Op>) {
      if (c_.listed > 0) add_lists();
    }
  }

  int64_t size_of_reduced() const {
    return c_.options.reduction == Reduction::none ? c_.shape.tokens : 1;
  }

  // Not negative; every sixth is exactly 0.
  std::vector<double> class_weights(int64_t vocab) const {
    std::vector<double> weights = normals(vocab, c_.seed + 13, 0.4, 1);
    for (int64_t j = 0; j < vocab; ++j) weights[j] = j % 6 == 5 ? 0 : std::fabs(weights[j]);
    return weights;
  }

  void add_divergence_outputs() {
    const std::vector<int64_t> shape{c_.shape.tokens};
    DivergenceStatistics& s = p_.op.statistics;
    p_.op.loss = output(DType::f32, reduced());
    if (c_.logprob && !c_.no_target) s.logprob = output(DType::f32, shape);
    if (!c_.statistics) return;
    s.entropy = output(DType::f32, shape);
    s.teacher_entropy = output(DType::f32, shape);
    s.acceptance = output(DType::f32, shape);
  }

  void add_forward_outputs() {
    const int64_t tokens = c_.shape.tokens;
    const bool shard = c_.options.vocab_total > c_.shape.vocab;
    if (!shard) p_.op.loss = output(DType::f32, reduced());
    TokenStatistics& s = p_.op.statistics;
    const auto add = [&](std::initializer_list<TensorView*> views) {
      for (TensorView* view : views) *view = output(DType::f32, {tokens});
    };
    if (c_.logprob) add({&s.logprob});
    if (c_.sum_p_squared) add({&s.sum_p_squared});
    if (c_.mean_logit) add({&s.mean_logit});
    if (c_.max_logprob) add({&s.max_logprob});
    if (c_.entropy && !c_.statistics) add({&s.entropy});
    if (c_.rank && !shard) s.rank = output(c_.argmax, {tokens});
    if (c_.mass_above && !shard) add({&s.mass_above});
    if (c_.statistics || c_.row_statistics) {
      add({&s.lse, &s.target_logit, &s.row_reference, &s.row_log_sum});
    }
    if (!c_.statistics) return;
    add({&s.entropy, &s.weighted_logit_sum});
    s.argmax = output(c_.argmax, {tokens});
  }

  void add_gradients() {
    if constexpr (LinearOp<Op>) {
      const auto [tokens, hidden, vocab] = c_.shape;
      if (c_.wants_grad_input) p_.op.grad_input = output(c_.grad_input, {tokens, hidden});
      if (c_.wants_grad_weight) p_.op.grad_weight = accumulated(c_.grad_weight, {vocab, hidden});
      if (c_.bias || c_.wants_grad_bias) p_.op.grad_bias = accumulated(c_.grad_weight, {vocab});
      p_.op.accumulate_grad_weight = c_.accumulate;
    } else {
      p_.op.grad_logits =
          c_.in_place ? p_.op.logits : output(c_.grad_input, {c_.shape.tokens, c_.shape.vocab});
    }
  }

  // Adds the upstream gradients of statistics and, from the reference, what Forward of this op
  // writes for Backward.
  void add_saved() {
    const int64_t tokens = c_.shape.tokens;
    if (c_.grad_lse) p_.op.grad_lse = upstream(tokens, 0.3, 0.1, 17);
    if (c_.grad_target_logit) p_.op.grad_target_logit = upstream(tokens, 0.3, -0.1, 19);
    if (c_.grad_entropy) p_.op.grad_entropy = upstream(tokens, 0.3, 0, 23);
    if (!c_.saved_state && !c_.grad_entropy) return;
    using Forward =
        std::conditional_t<LinearOp<Op>, LinearCrossEntropyForward, CrossEntropyForward>;
    Forward forward{.target = p_.op.target, .options = p_.op.options, .weights = p_.op.weights};
    if constexpr (LinearOp<Op>) {
      forward.input = p_.op.input, forward.weight = p_.op.weight, forward.bias = p_.op.bias;
    } else {
      forward.logits = p_.op.logits;
    }
    // Only the shape of these outputs is used, because evaluate writes nothing.
    const TensorView row = vector_view(&c_, DType::f32, tokens);
    forward.statistics = {.entropy = row, .row_reference = row, .row_log_sum = row};
    const reference::Result result = reference::evaluate(forward, p_.model, false);
    if (!result.status.ok()) throw std::logic_error(result.status.message());
    // A shard's states are computed as if the other shards had half of each row's probability.
    const bool shard = c_.options.vocab_total > c_.shape.vocab;
    std::vector<double> log_sum = result.outputs.at("row_log_sum").value;
    for (double& x : log_sum) x += shard ? std::log(2) : 0;
    if (c_.grad_entropy) p_.op.entropy = saved(result.outputs.at("entropy").value);
    if (!c_.saved_state) return;
    p_.op.row_reference = saved(result.outputs.at("row_reference").value);
    p_.op.row_log_sum = saved(log_sum);
  }
  TensorView saved(const std::vector<double>& values) { return of_each(DType::f32, values); }
  // Never broadcast, even if other inputs are.
  TensorView of_each(DType dtype, const std::vector<double>& values) {
    const std::vector<int64_t> shape{std::ssize(values)};
    return p_.pool.add(dtype, shape, values, layout_of(c_.placement, shape, Role::output));
  }

  const Case c_;
  Values values_;
  Problem<Op> p_;
};

template <class Op>
Problem<Op> build(const Case& c) {
  return Builder<Op>(c).build();
}

}  // namespace logitless::conformance
