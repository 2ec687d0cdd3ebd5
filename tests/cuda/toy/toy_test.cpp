// SPDX-License-Identifier: Apache-2.0
// The toy engine (toy.h), listed before the library's engines: each of its plans matches the
// reference, and calls that it does not serve go to the others.
#include "tests/cuda/toy/toy.h"

#include <vector>

#include "src/cuda/linear/tiled/plan.h"
#include "tests/cuda/planned.h"

namespace logitless::conformance {
namespace {

const cuda::toy::ToyEngine toy;

class CudaToy : public ConformanceTest {
 protected:
  CudaToy() {
    for (const cuda::Engine* engine : cuda::engines()) list_.push_back(engine);
    list_.insert(list_.begin(), &toy);
    cuda::replace_engines(list_);
  }
  ~CudaToy() override { cuda::replace_engines({}); }

 private:
  std::vector<const cuda::Engine*> list_;
};

// Describes what distinguishes a plan.
std::string manner(const CudaPlanned& planned) {
  const auto& [s, p] = planned;
  std::string text = name_of(p.kind);
  if (p.kind == cuda::PlanKind::two_passes) return text;
  EXPECT_EQ(&cuda::tiled::tile_of(p), &cuda::toy::tile);
  if (p.chunks > 1) text += ", chunks";
  if (p.lent_columns > 0) text += ", E lent";
  if (p.lent_sum_rows > 0) text += ", sums lent";
  if (s.gradients() && sums_grad_input(s, p)) text += ", input summed";
  return text;
}

std::vector<double> twentieths() {
  std::vector<double> shares;
  for (int i = 0; i <= 20; ++i) shares.push_back(i / 20.0);
  return shares;
}

std::string engine_of(const Case& c) {
  const cuda::DeviceInfo* device = nullptr;
  EXPECT_TRUE(cuda::find_device(0, &device).ok());
  std::string name;
  with_op(c.op, [&](auto op) {
    if constexpr (LinearOp<decltype(op)>) {
      name = cuda::asked_of(build<decltype(op)>(c).op, *device).engine.name();
    }
  });
  return name;
}

constexpr Case plain{.op = OpKind::linear_forward_backward,
                     .shape = {130, 40, 1001},
                     .dtype = DType::bf16,
                     .grad_input = DType::bf16,
                     .grad_weight = DType::bf16,
                     .row_statistics = true};

TEST_P(CudaToy, EveryPlanOfOneCall) {
  Case c = plain;
  c.ignored = 0.3;
  c.token_weight = true;
  judge_plans(device_, c, build<ForwardBackward>(c), twentieths(), manner,
              {"whole", "two passes", "stored and recomputed, E lent, input summed",
               "stored and recomputed, input summed"});
}

// An f32 gradient's memory has more room for panels; one that is accumulated into has none.
TEST_P(CudaToy, EveryPlaceOfAGradient) {
  Case c = plain;
  c.grad_weight = DType::f32;
  judge_plans(device_, c, build<ForwardBackward>(c), twentieths(), manner,
              {"whole", "frugal, chunks, input summed"});
  c.accumulate = true;
  judge_plans(device_, c, build<ForwardBackward>(c), twentieths(), manner,
              {"whole", "frugal, input summed"});
  c.accumulate = false;
  c.shape = {20, 136, 300};
  judge_plans(device_, c, build<ForwardBackward>(c), twentieths(), manner, {"whole, E lent"});
}

TEST_P(CudaToy, TheLossAndItsBackward) {
  for (const OpKind op : {OpKind::linear_forward, OpKind::linear_backward}) {
    for (const Shape& shape : {Shape{1, 8, 1}, Shape{33, 24, 65}, Shape{130, 40, 1001}}) {
      Case c = plain;
      c.op = op;
      c.shape = shape;
      EXPECT_EQ(engine_of(c), "toy");
      const WorkspaceSize size = workspace_of(device_, c);
      const Comparison result = judge_sizes(device_, c, {size.minimum, size.recommended});
      EXPECT_TRUE(result.ok()) << result.report;
    }
  }
}

// Calls that the toy engine does not support go to the next engine in the list.
TEST_P(CudaToy, WhatItDoesNotServeGoesToTheNext) {
  Case c = plain;
  apply_everything(c);
  EXPECT_NE(engine_of(c), "toy");
  const Comparison result = judge(device_, c);
  EXPECT_TRUE(result.ok()) << result.report;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaToy);
INSTANTIATE_TEST_SUITE_P(All, CudaToy,
                         testing::Combine(testing::ValuesIn(cuda_devices()),
                                          testing::Values(OpKind::linear_forward_backward),
                                          testing::Values(DType::bf16)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
