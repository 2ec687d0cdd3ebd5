// SPDX-License-Identifier: Apache-2.0
// The listings of the ops and of every tensor of an op: for_each_tensor(op, c, f) calls f(name,
// access, op.field, c.field) for each. The C++ layer, the C entry points, the validation and the
// tests all walk them.
#pragma once

#include <type_traits>

#include "logitless/ops.h"

namespace logitless {

enum class Access { read, write, read_write };

// The one listing of the ops: calls f(op, kind) for each.
template <class F>
constexpr void for_each_op(F&& f) {
  f(Softmax{}, LOGITLESS_SOFTMAX);
  f(CrossEntropyForward{}, LOGITLESS_CROSS_ENTROPY_FORWARD);
  f(CrossEntropyBackward{}, LOGITLESS_CROSS_ENTROPY_BACKWARD);
  f(CrossEntropyForwardBackward{}, LOGITLESS_CROSS_ENTROPY_FORWARD_BACKWARD);
  f(LinearCrossEntropyForward{}, LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD);
  f(LinearCrossEntropyBackward{}, LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD);
  f(LinearCrossEntropyForwardBackward{}, LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD);
  f(Combine{}, LOGITLESS_COMBINE);
  f(LinearDivergenceForward{}, LOGITLESS_LINEAR_DIVERGENCE_FORWARD);
  f(LinearDivergenceBackward{}, LOGITLESS_LINEAR_DIVERGENCE_BACKWARD);
  f(LinearDivergenceForwardBackward{}, LOGITLESS_LINEAR_DIVERGENCE_FORWARD_BACKWARD);
}

template <class Op>
inline constexpr int32_t kind_of = [] {
  int32_t found = -1;
  for_each_op([&]<class T>(const T&, int32_t kind) {
    if (std::is_same_v<T, Op>) found = kind;
  });
  return found;
}();

// What an op has, detected from its members.
template <class Op>
concept LinearOp = requires(Op op) { op.input; };
template <class Op>
concept LossOp = requires(Op op) { op.options; };
template <class Op>
concept ForwardOp = requires(Op op) { op.statistics; };
template <class Op>
concept BackwardOnlyOp = requires(Op op) { op.grad_lse; };
template <class Op>
concept GradientOp = requires(Op op) { op.grad_loss; };
template <class Op>
concept KeepingOp = requires(Op op) { op.kept; };
template <class Op>
concept AnchoredOp = requires(Op op) { op.anchor; };
template <class Op>
concept ChoosingOp = requires(Op op) { op.ids; };
template <class Op>
concept ListingOp = requires(Op op) { op.top_ids; };
template <class Op>
concept ConsumingOp = requires(Op op) { op.consume_kept; };
template <class Op>
concept OnlyChoosingOp = requires(Op op) { op.only_chosen; };
template <class Op>
concept OrderedOp = requires(Op op) { op.grad_input_first; };
template <class Op>
concept DivergenceOp = requires(Op op) { op.teacher; };
template <class Op>
concept SummingOp = requires(Op op) { op.divergence_sum; };
template <class Op>
concept ShardDivergenceOp = requires(Op op) { op.states; };
template <class Op>
concept CombiningOp = requires(Op op) { op.shard_row_reference; };

// Parts of the listing below.
template <class Op, class C, class F>
constexpr void for_each_shard_tensor(Op& op, C& c, F& f) {
  constexpr Access read = Access::read;
  f("shard_row_reference", read, op.shard_row_reference, c.shard_row_reference);
  f("shard_row_log_sum", read, op.shard_row_log_sum, c.shard_row_log_sum);
  f("shard_target_logit", read, op.shard_target_logit, c.shard_target_logit);
  f("shard_entropy", read, op.shard_entropy, c.shard_entropy);
  f("shard_argmax", read, op.shard_argmax, c.shard_argmax);
  f("shard_weighted_logit_sum", read, op.shard_weighted_logit_sum, c.shard_weighted_logit_sum);
  f("shard_sum_p_squared", read, op.shard_sum_p_squared, c.shard_sum_p_squared);
  f("shard_mean_logit", read, op.shard_mean_logit, c.shard_mean_logit);
  f("shard_max_logprob", read, op.shard_max_logprob, c.shard_max_logprob);
}
template <class Teacher, class C, class F>
constexpr void for_each_teacher_tensor(Teacher& teacher, C& c, F& f) {
  constexpr Access read = Access::read;
  f("teacher_input", read, teacher.input, c.teacher_input);
  f("teacher_weight", read, teacher.weight, c.teacher_weight);
  f("teacher_bias", read, teacher.bias, c.teacher_bias);
  f("teacher_logits", read, teacher.logits, c.teacher_logits);
  f("teacher_temperature", read, teacher.temperature, c.teacher_temperature);
}
template <class Op, class C, class F>
constexpr void for_each_tensor_of_shard(Op& op, C& c, F& f) {
  constexpr Access read = Access::read, write = Access::write;
  Access access = read;
  if constexpr (SummingOp<Op>) access = op.sums() ? read : write;
  f("row_reference", access, op.states.row_reference, c.row_reference);
  f("row_log_sum", access, op.states.row_log_sum, c.row_log_sum);
  f("teacher_row_reference", access, op.states.teacher_row_reference, c.teacher_row_reference);
  f("teacher_row_log_sum", access, op.states.teacher_row_log_sum, c.teacher_row_log_sum);
  if constexpr (SummingOp<Op>) {
    f("target_logit", write, op.target_logit, c.target_logit);
    f("divergence_sum", write, op.divergence_sum, c.divergence_sum);
    f("slope_sum", write, op.slope_sum, c.slope_sum);
  } else {
    f("slope_mean", read, op.slope_mean, c.slope_mean);
  }
}
template <class Op, class C, class F>
constexpr void for_each_chosen_tensor(Op& op, C& c, F& f) {
  f("ids", Access::read, op.ids, c.ids);
  if constexpr (ForwardOp<Op>) {
    f("logits_at", Access::write, op.logits_at, c.logits_at);
  } else {
    f("grad_logits_at", Access::read, op.grad_logits_at, c.grad_logits_at);
  }
  f("id_offsets", Access::read, op.id_offsets, c.id_offsets);
}
template <class Op, class C, class F>
constexpr void for_each_top_tensor(Op& op, C& c, F& f) {
  if constexpr (CombiningOp<Op>) {
    f("shard_top_logits", Access::read, op.shard_top_logits, c.shard_top_logits);
    f("shard_top_ids", Access::read, op.shard_top_ids, c.shard_top_ids);
  }
  f("top_logits", Access::write, op.top_logits, c.top_logits);
  f("top_ids", Access::write, op.top_ids, c.top_ids);
}
template <class Statistics, class C, class F>
  requires std::is_same_v<std::remove_const_t<Statistics>, DivergenceStatistics>
constexpr void for_each_statistic(Statistics& statistics, C& c, F& f) {
  constexpr Access write = Access::write;
  f("entropy", write, statistics.entropy, c.entropy);
  f("teacher_entropy", write, statistics.teacher_entropy, c.teacher_entropy);
  f("acceptance", write, statistics.acceptance, c.acceptance);
  f("logprob", write, statistics.logprob, c.logprob);
}
template <class Statistics, class C, class F>
constexpr void for_each_statistic(Statistics& statistics, C& c, F& f) {
  constexpr Access write = Access::write;
  f("lse", write, statistics.lse, c.lse);
  f("target_logit", write, statistics.target_logit, c.target_logit);
  f("entropy", write, statistics.entropy, c.entropy);
  f("argmax", write, statistics.argmax, c.argmax);
  f("row_reference", write, statistics.row_reference, c.row_reference);
  f("row_log_sum", write, statistics.row_log_sum, c.row_log_sum);
  f("weighted_logit_sum", write, statistics.weighted_logit_sum, c.weighted_logit_sum);
  f("logprob", write, statistics.logprob, c.logprob);
  f("rank", write, statistics.rank, c.rank);
  f("sum_p_squared", write, statistics.sum_p_squared, c.sum_p_squared);
  f("mean_logit", write, statistics.mean_logit, c.mean_logit);
  f("max_logprob", write, statistics.max_logprob, c.max_logprob);
  f("mass_above", write, statistics.mass_above, c.mass_above);
}

template <class Op, class C, class F>
constexpr void for_each_tensor(Op& op, C& c, F&& f) {
  using T = std::remove_const_t<Op>;
  constexpr Access read = Access::read, write = Access::write;
  if constexpr (LinearOp<T>) {
    f("input", read, op.input, c.input);
    f("weight", read, op.weight, c.weight);
    f("bias", read, op.bias, c.bias);
  } else if constexpr (CombiningOp<T>) {
    for_each_shard_tensor(op, c, f);
  } else {
    f("logits", read, op.logits, c.logits);
  }
  if constexpr (std::is_same_v<T, Softmax>)
    f("probabilities", write, op.probabilities, c.probabilities);
  if constexpr (DivergenceOp<T>) for_each_teacher_tensor(op.teacher, c, f);
  if constexpr (LossOp<T>) {
    f("target", read, op.target, c.target);
    f("token_weight", read, op.weights.token, c.token_weight);
    f("vocab_weight", read, op.weights.vocab, c.vocab_weight);
    f("normalizer", read, op.weights.normalizer, c.normalizer);
    f("temperature", read, op.weights.temperature, c.temperature);
  }
  if constexpr (ForwardOp<T>) {
    f("loss", write, op.loss, c.loss);
    for_each_statistic(op.statistics, c, f);
  }
  if constexpr (ShardDivergenceOp<T>) for_each_tensor_of_shard(op, c, f);
  if constexpr (AnchoredOp<T>) f("anchor", read, op.anchor, c.anchor);
  if constexpr (KeepingOp<T>) {
    Access kept = ForwardOp<T> ? write : Access::read_write;  // Backward may overwrite
    if constexpr (SummingOp<T>) kept = op.sums() ? Access::read : write;
    f("kept", kept, op.kept, c.kept);
    f("kept_rows", kept, op.kept_rows, c.kept_rows);
  }
  if constexpr (BackwardOnlyOp<T>) {
    f("row_reference", read, op.row_reference, c.row_reference);
    f("row_log_sum", read, op.row_log_sum, c.row_log_sum);
    f("entropy", read, op.entropy, c.entropy);
    f("grad_lse", read, op.grad_lse, c.grad_lse);
    f("grad_target_logit", read, op.grad_target_logit, c.grad_target_logit);
    f("grad_entropy", read, op.grad_entropy, c.grad_entropy);
  }
  if constexpr (ChoosingOp<T>) for_each_chosen_tensor(op, c, f);
  if constexpr (GradientOp<T>) {
    f("grad_loss", read, op.grad_loss, c.grad_loss);
    if constexpr (LinearOp<T>) {
      const Access sum = op.accumulate_grad_weight ? Access::read_write : write;
      f("grad_input", write, op.grad_input, c.grad_input);
      f("grad_weight", sum, op.grad_weight, c.grad_weight);
      f("grad_bias", sum, op.grad_bias, c.grad_bias);
    } else {
      f("grad_logits", write, op.grad_logits, c.grad_logits);
    }
  }
  if constexpr (LossOp<T>) f("fault", Access::read_write, op.fault, c.fault);
  if constexpr (ListingOp<T>) for_each_top_tensor(op, c, f);
}

template <class Op>
inline constexpr size_t tensor_count = [] {
  Op op{};
  logitless_op c{};
  size_t count = 0;
  for_each_tensor(op, c, [&](const char*, Access, auto&, auto&) { ++count; });
  return count;
}();

}  // namespace logitless
