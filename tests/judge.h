// SPDX-License-Identifier: Apache-2.0
// One case on one backend against the reference.
#pragma once

#include "cases.h"
#include "fixture.h"
#include "problem.h"

namespace logitless::conformance {

// Whether no option changes the logits, and nothing is asked of them that needs their maximum.
template <class Op>
bool is_plain(const Op& op) {
  const LossOptions& o = op.options;
  const TokenStatistics& s = op.statistics;
  return !op.bias && o.logit_scale == 1 && o.softcap == 0 && o.temperature == 1 &&
         o.label_smoothing == 0 && !s.entropy && !s.argmax && !s.weighted_logit_sum;
}

// What the contract wants of this backend, of an op on host memory.
template <class Op>
reference::Result expected(const TestDevice& device, const Op& op, reference::BoundModel model) {
  if constexpr (LinearOp<Op>) {
    model.tensor_cores = device.tensor_cores(op.input.dtype);
    model.tf32 = op.options.allow_tf32 && op.input.dtype == DType::f32 && device.has_tf32();
  }
  reference::Result want = reference::evaluate(op, model);
  if constexpr (LinearOp<Op> && ForwardOp<Op>) {
    if (is_plain(op) && device.has_anchors(op.input.dtype)) want.anchored = true;
  }
  if constexpr (LossOp<Op>) {
    if (!device.synchronous() && want.status.code() == StatusCode::target_out_of_range) {
      want = evaluate_outside(op, model);
    }
  }
  return want;
}

Outcome run_case(const TestDevice& device, const Case& c, const RunPlan& plan = {});
WorkspaceSize workspace_of(const TestDevice& device, const Case& c,
                           const Executor* executor = nullptr);
// In workspaces of each of these sizes.
Comparison judge_sizes(const TestDevice& device, const Case& c, const std::vector<uint64_t>& sizes);
Comparison judge(const TestDevice& device, const Case& c, const RunPlan& plan = {});

// Which cases of a list: those whose index is `offset` modulo `step`.
struct Part {
  size_t offset = 0, step = 1;
};
// Every feature pair of the op and dtype, in workspaces of several sizes.
Comparison judge_pairs(const TestDevice& device, OpKind op, DType dtype, Part part = {});
// Every shape, plain and with all options together, with data and placement in rotation.
Comparison judge_shapes(const TestDevice& device, OpKind op, DType dtype, Part part = {});

// Turns on every option that the op can have at once.
void apply_everything(Case& c);

}  // namespace logitless::conformance
