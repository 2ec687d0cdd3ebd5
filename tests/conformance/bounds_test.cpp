// SPDX-License-Identifier: Apache-2.0
// Checks that the bounds are wide enough for correct f32 arithmetic and narrow enough to detect
// shortcuts, with simulated implementations checked like a backend, at hidden sizes of at least
// 1024.
#include <tuple>

#include "gtest/gtest.h"
#include "tests/support/problem.h"
#include "tests/support/simulated.h"

namespace logitless::conformance {
namespace {

using Op = LinearCrossEntropyForwardBackward;

constexpr Mutation kMutations[] = {
    Mutation::logits_to_bf16,      Mutation::lse_from_bf16,         Mutation::last_column_dropped,
    Mutation::last_hidden_dropped, Mutation::probabilities_to_bf16, Mutation::gradient_sum_in_bf16,
    Mutation::last_token_dropped,  Mutation::target_not_subtracted};

// With constant data the logits differ by less than their rounding errors, so that problem has few
// columns.
Problem<Op> problem_of(DType dtype, Data data) {
  const int64_t vocab = data == Data::constant ? 40 : 300;
  Case c{.op = OpKind::linear_forward_backward,
         .shape = {4, 1031, vocab},
         .dtype = dtype,
         .data = data};
  c.options.reduction = Reduction::none;
  Problem<Op> problem = build<Op>(c);
  problem.op.statistics.lse = problem.pool.reserve(DType::f32, {c.shape.tokens});
  return problem;
}

class Bounds : public testing::TestWithParam<std::tuple<DType, Data>> {
 protected:
  Problem<Op> problem_ = problem_of(std::get<0>(GetParam()), std::get<1>(GetParam()));
  reference::Result want_ = reference::evaluate(problem_.op, problem_.model);
};

TEST_P(Bounds, HonestArithmeticPasses) {
  const Comparison c = compare(want_, simulate(problem_.op, Mutation::none));
  EXPECT_TRUE(c.ok()) << c.report;
}

TEST_P(Bounds, EveryShortcutFails) {
  for (const Mutation mutation : kMutations) {
    // For 16-bit inputs the contract allows two roundings of dz to that dtype.
    const bool rounds_dz =
        mutation == Mutation::probabilities_to_bf16 || mutation == Mutation::gradient_sum_in_bf16;
    if (rounds_dz && std::get<0>(GetParam()) != DType::f32) continue;
    const Comparison c = compare(want_, simulate(problem_.op, mutation));
    EXPECT_FALSE(c.ok()) << name_of(mutation) << ": " << c.worst_ratio << " of the bound at worst";
  }
}

// Sums in one lane, term after term, as a matrix library may add f32. If terms repeat, rounding
// errors align: K terms lose up to K/4 of f32's unit roundoff.
TEST(SequentialSums, OfRepeatedTermsPassAsStructuredOnesAlone) {
  bool unstructured_pass = true;
  for (const Shape& shape :
       {Shape{17, 5, 9}, Shape{70, 5, 60}, Shape{2500, 8, 9}, Shape{4, 6, 700}, Shape{9, 257, 7}}) {
    for (uint64_t seed = 1; seed <= 12; ++seed) {
      for (const Placement placement : {Placement::broadcast, Placement::dense}) {
        Case c{.op = OpKind::linear_forward_backward, .shape = shape, .placement = placement};
        c.seed = seed;
        c.data = placement == Placement::dense ? Data::constant : Data::normal;
        c.options.reduction = Reduction::none;
        c.row_statistics = true;
        Problem<Op> p = build<Op>(c);
        p.op.statistics = {.lse = p.op.statistics.lse};
        const Fields fields = simulate(p.op, Mutation::none, 1);
        const Comparison result = compare(reference::evaluate(p.op, p.model), fields);
        EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
        p.model.structured = false;
        unstructured_pass =
            unstructured_pass && compare(reference::evaluate(p.op, p.model), fields).ok();
      }
    }
  }
  EXPECT_FALSE(unstructured_pass) << "the bound of structured data is not needed";
}

std::string name_of_parameter(const testing::TestParamInfo<std::tuple<DType, Data>>& info) {
  static constexpr const char* kData[] = {"normal", "peaked", "constant"};
  return std::string(name_of(std::get<0>(info.param))) + "_" +
         kData[static_cast<int>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(All, Bounds,
                         testing::Combine(testing::Values(DType::f32, DType::f16, DType::bf16),
                                          testing::Values(Data::normal, Data::peaked,
                                                          Data::constant)),
                         name_of_parameter);

}  // namespace
}  // namespace logitless::conformance
