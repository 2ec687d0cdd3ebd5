// SPDX-License-Identifier: Apache-2.0
// The linear ops on the CPU: tokens prepared once, then chunk by chunk forward pass, coefficients,
// gradient pass.
#include <algorithm>

#include "src/cpu/linear_run.h"
#include "src/cpu/ops.h"

namespace logitless::cpu {
namespace {

template <class Op>
constexpr bool has_gradients = GradientOp<Op>;

template <class Op>
bool state_given(const Op& op) {
  if constexpr (BackwardOnlyOp<Op>) return static_cast<bool>(op.row_reference);
  return false;
}

template <class Op>
LinearCall make_call(const Op& op) {
  LinearCall call{op.input, op.weight, op.bias, op.options, op.weights.vocab};
  LinearShape& shape = call.shape;
  shape = {.tokens = op.input.shape[0],
           .vocab = op.weight.shape[0],
           .hidden = op.weight.shape[1],
           .dtype = op.input.dtype,
           .forward = !state_given(op),
           .bias = static_cast<bool>(op.bias),
           .class_weight = static_cast<bool>(op.weights.vocab)};
  call.wants.weighted_sum = op.options.label_smoothing > 0;
  if constexpr (ForwardOp<Op>) {
    call.wants.weighted_sum |= static_cast<bool>(op.statistics.weighted_logit_sum);
    call.wants.entropy = static_cast<bool>(op.statistics.entropy);
    call.wants.argmax = static_cast<bool>(op.statistics.argmax);
  } else {
    call.wants.weighted_sum = false;
  }
  if constexpr (has_gradients<Op>) {
    call.grad_input = op.grad_input;
    call.grad_weight = op.grad_weight;
    call.grad_bias = op.grad_bias;
    call.accumulate = op.accumulate_grad_weight;
    shape.grad_input = static_cast<bool>(op.grad_input);
    shape.grad_weight = static_cast<bool>(op.grad_weight);
    shape.grad_bias = static_cast<bool>(op.grad_bias);
    shape.direct_grad_weight =
        !op.grad_weight || (op.grad_weight.dtype == DType::f32 && op.grad_weight.stride[1] == 1);
  }
  return call;
}

template <class Op>
Status linear_workspace(const Op& op, const Execution& execution, WorkspaceSize* size) {
  const LinearShape shape = make_call(op).shape;
  const int64_t threads = executor_of(execution).num_threads;
  size->minimum = plan_linear(shape, 0, 1).bytes;
  size->recommended = std::max(size->minimum, recommended_plan(shape, threads).bytes);
  size->alignment = 64;
  return {};
}

// Coefficients of dz for the chunk's rows, relative to the call's common factor.
template <class Op>
void make_gradients(const Op& op, const Tokens& tokens, const RowState* states, int64_t first,
                    int64_t count, RowGradient* gradients) {
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = first + n;
    float grad_lse = 0, grad_target_logit = 0, grad_entropy = 0;
    if constexpr (BackwardOnlyOp<Op>) {
      const int64_t row = tokens.row[i];
      const float inv = tokens.inv_gradient_scale;
      if (op.grad_lse) grad_lse = f32_at(op.grad_lse, row) * inv;
      if (op.grad_target_logit) grad_target_logit = f32_at(op.grad_target_logit, row) * inv;
      if (op.grad_entropy) grad_entropy = f32_at(op.grad_entropy, row) * inv;
    }
    gradients[n] =
        row_gradient(tokens.constants, states[i], tokens.target_weight[i], tokens.token_weight[i],
                     tokens.upstream[i], grad_lse, grad_target_logit, grad_entropy);
  }
}

// Row states as Forward wrote them.
template <class Op>
void load_states(const Op& op, const Tokens& tokens, RowState* states) {
  for (int64_t i = 0; i < tokens.valid; ++i) {
    const int64_t row = tokens.row[i];
    states[i] = {.reference = f32_at(op.row_reference, row),
                 .log_sum = f32_at(op.row_log_sum, row)};
  }
}

template <class Op>
Status linear_run(const Op& op, const Workspace& workspace, const Execution& execution) {
  const LinearCall call = make_call(op);
  const Executor& executor = executor_of(execution);
  const LinearPlan plan = plan_linear(call.shape, workspace.bytes, executor.num_threads);
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(op, call.shape.vocab, memory + plan.tokens_at, &tokens);
  if (!status.ok()) return status;

  LinearRun linear(call, plan, memory, executor);
  if constexpr (BackwardOnlyOp<Op>) {
    if (!call.shape.forward) load_states(op, tokens, linear.states());
  }
  for (int64_t first = 0; first < tokens.valid; first += plan.token_chunk) {
    const int64_t count = std::min(plan.token_chunk, tokens.valid - first);
    linear.begin_chunk(tokens, first, count);
    linear.pack_input();
    if (call.shape.forward) linear.forward_pass();
    if constexpr (has_gradients<Op>) {
      if constexpr (BackwardOnlyOp<Op>) {
        for (int64_t i = first; op.entropy && i < first + count; ++i) {
          linear.states()[i].entropy = f32_at(op.entropy, tokens.row[i]);
        }
      }
      make_gradients(op, tokens, linear.states(), first, count, linear.gradients());
      linear.gradient_pass(first == 0);
    }
  }
  if constexpr (has_gradients<Op>) linear.finish(tokens, tokens.valid > 0);
  if constexpr (ForwardOp<Op>)
    write_tokens(tokens, linear.states(), {op.loss, op.statistics, op.options});
  return {};
}

}  // namespace

#define LOGITLESS_LINEAR_OP(Op)                                                      \
  Status workspace(const Op& op, const Execution& execution, WorkspaceSize* size) {  \
    return linear_workspace(op, execution, size);                                    \
  }                                                                                  \
  Status run(const Op& op, const Workspace& workspace, const Execution& execution) { \
    return linear_run(op, workspace, execution);                                     \
  }
LOGITLESS_LINEAR_OP(LinearCrossEntropyForward)
LOGITLESS_LINEAR_OP(LinearCrossEntropyBackward)
LOGITLESS_LINEAR_OP(LinearCrossEntropyForwardBackward)
#undef LOGITLESS_LINEAR_OP

template <class Op>
LinearShape shape_of(const Op& op) {
  return make_call(op).shape;
}
template LinearShape shape_of(const LinearCrossEntropyForward&);
template LinearShape shape_of(const LinearCrossEntropyBackward&);
template LinearShape shape_of(const LinearCrossEntropyForwardBackward&);

}  // namespace logitless::cpu
