// SPDX-License-Identifier: Apache-2.0
// Ops of divergences of any size, whose tensors have addresses but no memory.
#pragma once

#include "logitless/logitless.h"
#include "src/call.h"
#include "src/kept.h"

namespace logitless::cuda {

struct HeadSizes {
  int64_t tokens = 33, hidden = 64, vocab = 300, teacher_hidden = 64;
  DType dtype = DType::bf16;
};
struct AskedOf {
  bool target = false, biases = false, temperatures = false, weights = false, given_logits = false;
  bool statistics = false, transposed = false, f32_gradients = false, grad_weight = true;
  Reduction reduction = Reduction::mean;
  DivergenceKind kind = DivergenceKind::forward_kl;
};

// Makes views without memory, each at an address of its own.
class NowhereViews {
 public:
  explicit NowhereViews(Device device = {DeviceType::cuda, 0}) : device_(device) {}
  TensorView matrix(DType dtype, int64_t rows, int64_t columns) {
    return on_device(matrix_view(next(), dtype, rows, columns));
  }
  TensorView vector(DType dtype, int64_t size) {
    return on_device(vector_view(next(), dtype, size));
  }
  TensorView scalar(DType dtype) { return on_device(scalar_view(next(), dtype)); }

 private:
  void* next() { return reinterpret_cast<void*>(next_++ << 40); }
  TensorView on_device(TensorView v) const {
    v.device = device_;
    return v;
  }
  Device device_;
  int64_t next_ = 1;
};

inline void transpose(TensorView* v) { v->stride = {1, v->shape[0]}; }

template <class Op>
Op divergence_op(const HeadSizes& s, const AskedOf& asked = {}) {
  NowhereViews views;
  Op op;
  op.input = views.matrix(s.dtype, s.tokens, s.hidden);
  op.weight = views.matrix(s.dtype, s.vocab, s.hidden);
  if (asked.given_logits) {
    op.teacher.logits = views.matrix(s.dtype, s.tokens, s.vocab);
  } else {
    op.teacher.input = views.matrix(s.dtype, s.tokens, s.teacher_hidden);
    op.teacher.weight = views.matrix(s.dtype, s.vocab, s.teacher_hidden);
    if (asked.biases) op.teacher.bias = views.vector(DType::f32, s.vocab);
  }
  if (asked.biases) op.bias = views.vector(DType::f32, s.vocab);
  if (asked.transposed) transpose(&op.weight);
  if (asked.target) op.target = views.vector(DType::i64, s.tokens);
  if (asked.temperatures) {
    op.weights.temperature = views.vector(DType::f32, s.tokens);
    op.teacher.temperature = views.vector(DType::f32, s.tokens);
  }
  if (asked.weights) op.weights.token = views.vector(DType::f32, s.tokens);
  op.options.reduction = asked.reduction;
  op.divergence.kind = asked.kind;
  const auto of_loss = [&] {
    return asked.reduction == Reduction::none ? views.vector(DType::f32, s.tokens)
                                              : views.scalar(DType::f32);
  };
  if constexpr (ForwardOp<Op>) {
    op.loss = of_loss();
    if (asked.statistics) {
      op.statistics = {views.vector(DType::f32, s.tokens),
                       views.vector(DType::f32, s.tokens),
                       views.vector(DType::f32, s.tokens),
                       {}};
      if (asked.target) op.statistics.logprob = views.vector(DType::f32, s.tokens);
    }
  }
  if constexpr (GradientOp<Op>) {
    const DType dtype = asked.f32_gradients ? DType::f32 : s.dtype;
    op.grad_loss = of_loss();
    op.grad_input = views.matrix(s.dtype, s.tokens, s.hidden);
    if (asked.grad_weight) op.grad_weight = views.matrix(dtype, s.vocab, s.hidden);
    if (asked.biases) op.grad_bias = views.vector(DType::f32, s.vocab);
  }
  op.fault = views.vector(DType::i32, 1);
  return op;
}

// Gives an op kept state of the shape that it asks for.
template <class Op>
void add_kept(Op* op) {
  const auto at = [](int64_t n) { return reinterpret_cast<void*>(n << 40); };
  const Kept kept = kept_in(Call(*op, {.device = op->input.device}), ~uint64_t{0} >> 1);
  op->kept = matrix_view(at(40), op->input.dtype, kept.shape[0], kept.shape[1]);
  op->kept_rows = matrix_view(at(41), DType::f32, kept.rows_shape[0], kept.rows_shape[1]);
  op->kept.device = op->kept_rows.device = op->input.device;
  if constexpr (GradientOp<Op>) op->kept_key = kept.key;
}

// Turns an op into that of a shard: a Forward that writes states, or, if `sums`, one that writes
// sums; a Backward that is given states.
template <class Op>
void make_shard(Op* op, bool sums = false) {
  const auto row = [&](int64_t n) {
    TensorView v = vector_view(reinterpret_cast<void*>(n << 40), DType::f32, op->input.shape[0]);
    v.device = op->input.device;
    return v;
  };
  op->options.vocab_total = 2 * op->weight.shape[0];
  op->options.vocab_start = 3;
  op->states = {row(42), row(43), row(44), row(45)};
  if constexpr (ForwardOp<Op>) {
    const DivergenceStatistics asked = op->statistics;
    op->loss = {};
    op->statistics = {};
    if (sums) {
      op->divergence_sum = row(46), op->slope_sum = row(47);
      op->statistics.acceptance = asked.acceptance;
    } else {
      op->statistics = {.entropy = asked.entropy, .teacher_entropy = asked.teacher_entropy};
      if (op->target) op->target_logit = row(48);
    }
  } else {
    op->slope_mean = row(47);
  }
}

}  // namespace logitless::cuda
