// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "judge.h"
#include "suite.h"

namespace logitless::conformance {

inline constexpr DivergenceKind kDivergenceKinds[] = {
    DivergenceKind::forward_kl, DivergenceKind::reverse_kl, DivergenceKind::jsd,
    DivergenceKind::skew_kl, DivergenceKind::tv};

// A Forward that keeps dz, and the Backward after it.
struct KeptDivergence {
  Problem<LinearDivergenceBackward> p;
  LinearDivergenceForward forward;
  Kept kept;

  KeptDivergence(const TestDevice& device, const Case& c) : p(build<LinearDivergenceBackward>(c)) {
    forward = {.input = p.op.input,
               .weight = p.op.weight,
               .bias = p.op.bias,
               .teacher = p.op.teacher,
               .target = p.op.target,
               .options = p.op.options,
               .divergence = p.op.divergence,
               .weights = p.op.weights};
    LinearDivergenceForward asked = forward;
    place(asked, device.tensors());
    const Status status = kept_size(asked, device.execution(), UINT64_MAX, &kept);
    EXPECT_TRUE(status.ok()) << status.message();
    const bool none = c.options.reduction == Reduction::none;
    forward.loss = p.pool.reserve(
        DType::f32, none ? std::vector<int64_t>{c.shape.tokens} : std::vector<int64_t>{});
    forward.kept = p.pool.reserve(c.dtype, {kept.shape[0], kept.shape[1]});
    forward.kept_rows = p.pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
  }
  // Gives Backward the kept state, in place of a teacher.
  void take(const Outcome& outcome) {
    p.op.kept = forward.kept, p.op.kept_rows = forward.kept_rows, p.op.kept_key = kept.key;
    write_bits(p.op.kept, outcome.kept.at("kept"));
    write_bits(p.op.kept_rows, outcome.kept.at("kept_rows"));
  }
  LinearDivergenceBackward without_teacher() const {
    LinearDivergenceBackward op = p.op;
    op.teacher = {};
    return op;
  }
};

// A Backward that runs in parts has the bits of the `whole` one: grad_input after the first part,
// everything after the third.
inline void expect_parts(const TestDevice& device, LinearDivergenceBackward op, const Pool& pool,
                         RunPlan plan, const Fields& whole, const std::string& name) {
  op.grad_input_first = true;
  plan.by = By::parts;
  for (const int parts : {1, 3}) {
    plan.parts = parts;
    const Outcome got = execute(device, op, pool, plan);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    EXPECT_TRUE(got.violations.empty()) << name;
    Fields written = got.fields, wanted = whole;
    if (parts == 1) {
      std::erase_if(written, [](const auto& f) { return f.first != "grad_input"; });
      std::erase_if(wanted, [](const auto& f) { return f.first != "grad_input"; });
    }
    EXPECT_EQ(differing_bits(wanted, written), "") << name << ", " << parts << " parts";
  }
}

}  // namespace logitless::conformance
