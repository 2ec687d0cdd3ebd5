// SPDX-License-Identifier: Apache-2.0
// Compares cases on one backend with the reference.
#pragma once

#include "cases.h"
#include "fixture.h"
#include "problem.h"

namespace logitless::conformance {

// The results that the contract requires of this backend, for an op on host memory.
template <class Op>
reference::Result expected(const TestDevice& device, const Op& op, reference::BoundModel model) {
  if constexpr (LinearOp<Op>) {
    bool products = true;  // with only_chosen there are f32 sums alone
    if constexpr (OnlyChoosingOp<Op>) products = !op.only_chosen;
    model.tensor_cores = products && device.tensor_cores(op.input.dtype);
    model.tf32 =
        products && op.options.allow_tf32 && op.input.dtype == DType::f32 && device.has_tf32();
  }
  reference::Result want = reference::evaluate(op, model);
  if constexpr (LossOp<Op>) {
    if (!device.synchronous() && want.status.code() == StatusCode::target_out_of_range) {
      want = evaluate_outside(op, model);
    }
  }
  if constexpr (DivergenceOp<Op>) {
    want.anchored = !device.reference_is_maximum(op.input.dtype);
  } else if constexpr (LinearOp<Op> && ForwardOp<Op>) {
    const bool needs_maximum =
        op.statistics.entropy || op.statistics.argmax || op.statistics.max_logprob;
    want.anchored = !needs_maximum && !device.reference_is_maximum(op.input.dtype);
  }
  return want;
}

// Whether the case has a field that the device does not serve.
bool is_refused(const TestDevice& device, const Case& c);
Outcome run_case(const TestDevice& device, const Case& c, const RunPlan& plan = {});
WorkspaceSize workspace_of(const TestDevice& device, const Case& c,
                           const Executor* executor = nullptr);
// Compares the case in a workspace of each of these sizes.
Comparison judge_sizes(const TestDevice& device, const Case& c, const std::vector<uint64_t>& sizes);
Comparison judge(const TestDevice& device, const Case& c, const RunPlan& plan = {});

// Selects the cases of a list with index % step == offset.
struct Part {
  size_t offset = 0, step = 1;
};
// A case of the table, its workspace, and its name.
struct Row {
  std::string name;
  Case c;
  Memory memory;
};
// Every pair of features of the op and dtype, each in the minimum or the recommended workspace.
std::vector<Row> pair_rows(OpKind op, DType dtype, Part part = {});
// Every shape, with few options and with many; the kind of data and the placement rotate.
std::vector<Row> shape_rows(OpKind op, DType dtype, Part part = {});
Comparison judge_pairs(const TestDevice& device, OpKind op, DType dtype, Part part = {});
Comparison judge_shapes(const TestDevice& device, OpKind op, DType dtype, Part part = {});

// Turns on many options that the op can have together.
void apply_everything(Case& c);

struct Setting {
  const char* name;
  void (*apply)(Case& c);
};
inline void only(Case& c) { c.statistics = c.bias = false, c.row_statistics = true; }
// No option or a single one, with only the row's statistics; kernels may be specialized for these.
inline constexpr Setting kAlone[] = {
    {"nothing", only},
    {"a bias alone", [](Case& c) { only(c), c.bias = true; }},
    {"a softcap alone", [](Case& c) { only(c), c.options.softcap = 200; }},
    {"a smoothing alone", [](Case& c) { only(c), c.options.label_smoothing = 0.1f; }},
};

}  // namespace logitless::conformance
