// SPDX-License-Identifier: Apache-2.0
// An op's name on the command line and its sizes, for `plan` and `bench`.
#pragma once

#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "src/kept.h"

namespace logitless::cli {

inline const std::vector<std::string> kOpNames{
    "linear-forward",   "linear-backward", "linear-forward-backward", "forward", "backward",
    "forward-backward", "softmax"};
// Ops that only `plan` accepts.
inline const std::vector<std::string> kDivergenceNames{"divergence-forward", "divergence-backward",
                                                       "divergence-forward-backward"};

struct OpShape {
  std::string op = "linear-forward-backward";
  int64_t tokens = 0, hidden = 0, vocab = 0;
  DType dtype = DType::f32;                    // of input and weight, or of logits
  DType grad_dtype = DType::f32;               // of all gradients, and of softmax's probabilities
  bool grad_input = true, grad_weight = true;  // for linear ops with gradients
  bool in_place = false;                       // gradients of the logits overwrite the logits
  uint64_t kept = 0;                           // the limit for kept state, in bytes
  int64_t vocab_total = 0;      // not 0: `vocab` columns are the first shard of this vocabulary
  int64_t teacher_hidden = 0;   // for divergences; 0: the student's
  bool teacher_logits = false;  // given in place of the teacher's head
  bool linear() const { return op.starts_with("linear"); }
  bool diverges() const { return op.starts_with("divergence"); }
};

// Calls f with an empty op of the type that `name` names.
template <class F>
decltype(auto) with_op(const std::string& name, F&& f) {
  if (name == "linear-forward") return f(LinearCrossEntropyForward{});
  if (name == "linear-backward") return f(LinearCrossEntropyBackward{});
  if (name == "forward") return f(CrossEntropyForward{});
  if (name == "backward") return f(CrossEntropyBackward{});
  if (name == "forward-backward") return f(CrossEntropyForwardBackward{});
  if (name == "softmax") return f(Softmax{});
  return f(LinearCrossEntropyForwardBackward{});
}

// As with_op, but also accepts the divergence ops.
template <class F>
decltype(auto) with_planned_op(const std::string& name, F&& f) {
  if (name == "divergence-forward") return f(LinearDivergenceForward{});
  if (name == "divergence-backward") return f(LinearDivergenceBackward{});
  if (name == "divergence-forward-backward") return f(LinearDivergenceForwardBackward{});
  return with_op(name, f);
}

template <class Matrix>
Teacher teacher_of(const OpShape& s, Matrix&& matrix) {
  if (s.teacher_logits) return {.logits = matrix("teacher_logits", s.dtype, s.tokens, s.vocab)};
  const int64_t width = s.teacher_hidden > 0 ? s.teacher_hidden : s.hidden;
  return {.input = matrix("teacher_input", s.dtype, s.tokens, width),
          .weight = matrix("teacher_weight", s.dtype, s.vocab, width)};
}

// Fills the op's views by memory("input", view without data), which adds the data, or returns the
// view as it is if only sizes matter. Backward reads the row state, Forward writes it.
template <class Op, class Memory>
void set_views(Op& op, const OpShape& s, Memory&& memory) {
  const auto vector = [&](const char* name, DType dtype) {
    return memory(name, vector_view(nullptr, dtype, s.tokens));
  };
  const auto matrix = [&](const char* name, DType dtype, int64_t rows, int64_t columns) {
    return memory(name, matrix_view(nullptr, dtype, rows, columns));
  };
  if constexpr (LinearOp<Op>) {
    op.input = matrix("input", s.dtype, s.tokens, s.hidden);
    op.weight = matrix("weight", s.dtype, s.vocab, s.hidden);
    if constexpr (DivergenceOp<Op>) op.teacher = teacher_of(s, matrix);
  } else {
    op.logits = matrix("logits", s.dtype, s.tokens, s.vocab);
  }
  if constexpr (LossOp<Op>) {
    op.target = vector("target", DType::i64);
    op.options.vocab_total = s.vocab_total;
  }
  if constexpr (ForwardOp<Op>) {
    if (s.vocab_total == 0) op.loss = memory("loss", scalar_view(nullptr, DType::f32));
  }
  if constexpr (ForwardOp<Op> && !DivergenceOp<Op>) {
    op.statistics.lse = vector("lse", DType::f32);
    op.statistics.target_logit = vector("target_logit", DType::f32);
    op.statistics.row_reference = vector("row_reference", DType::f32);
    op.statistics.row_log_sum = vector("row_log_sum", DType::f32);
  }
  if constexpr (BackwardOnlyOp<Op> && !DivergenceOp<Op>) {
    op.row_reference = vector("row_reference", DType::f32);
    op.row_log_sum = vector("row_log_sum", DType::f32);
  }
  if constexpr (KeepingOp<Op>) {
    const Kept kept = kept_in(Call(op, {.device = op.input.device}), s.kept);
    if (kept.columns > 0) {
      op.kept = matrix("kept", s.dtype, kept.shape[0], kept.shape[1]);
      op.kept_rows = matrix("kept_rows", DType::f32, kept.rows_shape[0], kept.rows_shape[1]);
      if constexpr (GradientOp<Op>) op.kept_key = kept.key;
      if constexpr (DivergenceOp<Op> && GradientOp<Op>) op.teacher = {};  // the kept state suffices
      if constexpr (AnchoredOp<Op>) {
        if (s.vocab_total > 0) op.anchor = vector("anchor", DType::f32);
      }
    }
  }
  if constexpr (LinearOp<Op> && GradientOp<Op>) {
    if (s.grad_input) op.grad_input = matrix("grad_input", s.grad_dtype, s.tokens, s.hidden);
    if (s.grad_weight) op.grad_weight = matrix("grad_weight", s.grad_dtype, s.vocab, s.hidden);
  } else if constexpr (GradientOp<Op>) {
    op.grad_logits =
        s.in_place ? op.logits : matrix("grad_logits", s.grad_dtype, s.tokens, s.vocab);
  } else if constexpr (!LossOp<Op>) {
    op.probabilities =
        s.in_place ? op.logits : matrix("probabilities", s.grad_dtype, s.tokens, s.vocab);
  }
}

}  // namespace logitless::cli
