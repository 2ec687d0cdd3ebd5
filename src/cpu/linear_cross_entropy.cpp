// SPDX-License-Identifier: Apache-2.0
// The linear ops on the CPU: tokens prepared once, then chunk by chunk forward pass, coefficients,
// gradient pass.
#include <algorithm>

#include "src/cpu/linear_run.h"
#include "src/cpu/ops.h"

namespace logitless::cpu {
namespace {

LinearCall make_call(const Call& call) {
  LinearCall made{call.input, call.weight, call.bias, call.options, call.vocab_weight};
  LinearShape& shape = made.shape;
  shape = {.tokens = call.input.shape[0],
           .vocab = call.weight.shape[0],
           .hidden = call.weight.shape[1],
           .dtype = call.input.dtype,
           .forward = !call.state_given(),
           .bias = static_cast<bool>(call.bias),
           .class_weight = static_cast<bool>(call.vocab_weight)};
  made.wants.weighted_sum = call.wants_weighted_sum();
  made.wants.entropy = call.forward && call.entropy;
  made.wants.argmax = call.forward && call.argmax;
  if (call.gradients) {
    made.grad_input = call.grad_input;
    made.grad_weight = call.grad_weight;
    made.grad_bias = call.grad_bias;
    made.accumulate = call.accumulate;
    shape.grad_input = static_cast<bool>(call.grad_input);
    shape.grad_weight = static_cast<bool>(call.grad_weight);
    shape.grad_bias = static_cast<bool>(call.grad_bias);
    shape.direct_grad_weight = !call.grad_weight || (call.grad_weight.dtype == DType::f32 &&
                                                     call.grad_weight.stride[1] == 1);
  }
  return made;
}

// Coefficients of dz for the chunk's rows, relative to the call's common factor.
void make_gradients(const Call& call, const Tokens& tokens, const RowState* states, int64_t first,
                    int64_t count, RowGradient* gradients) {
  for (int64_t n = 0; n < count; ++n) {
    gradients[n] = token_gradient(call, tokens, first + n, states[first + n]);
  }
}

// Row states as Forward wrote them.
void load_states(const Call& call, const Tokens& tokens, RowState* states) {
  for (int64_t i = 0; i < tokens.valid; ++i) {
    const int64_t row = tokens.row[i];
    states[i] = {.reference = f32_at(call.row_reference, row),
                 .log_sum = f32_at(call.row_log_sum, row)};
  }
}

}  // namespace

Status linear_workspace(const Call& call, WorkspaceSize* size) {
  const LinearShape shape = make_call(call).shape;
  const int64_t threads = executor_of(call.execution).num_threads;
  size->minimum = plan_linear(shape, 0, 1).bytes;
  size->recommended = std::max(size->minimum, recommended_plan(shape, threads).bytes);
  size->alignment = 64;
  return {};
}

Status run_linear(const Call& call, const Workspace& workspace) {
  const LinearCall made = make_call(call);
  const Executor& executor = executor_of(call.execution);
  const LinearPlan plan = plan_linear(made.shape, workspace.bytes, executor.num_threads);
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(call, made.shape.vocab, memory + plan.tokens_at, &tokens);
  if (!status.ok()) return status;

  LinearRun linear(made, plan, memory, executor);
  if (!call.forward) {
    if (!made.shape.forward) load_states(call, tokens, linear.states());
  }
  for (int64_t first = 0; first < tokens.valid; first += plan.token_chunk) {
    const int64_t count = std::min(plan.token_chunk, tokens.valid - first);
    linear.begin_chunk(tokens, first, count);
    linear.pack_input();
    if (made.shape.forward) linear.forward_pass();
    if (call.gradients) {
      if (!call.forward) {
        for (int64_t i = first; call.entropy && i < first + count; ++i) {
          linear.states()[i].entropy = f32_at(call.entropy, tokens.row[i]);
        }
      }
      make_gradients(call, tokens, linear.states(), first, count, linear.gradients());
      linear.gradient_pass(first == 0);
    }
  }
  if (call.gradients) linear.finish(tokens, tokens.valid > 0);
  if (call.forward)
    write_tokens(tokens, linear.states(), {call.loss, call.statistics(), call.options});
  return {};
}

LinearShape shape_of(const Call& call) { return make_call(call).shape; }

}  // namespace logitless::cpu
