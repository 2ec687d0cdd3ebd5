// SPDX-License-Identifier: Apache-2.0
// State kept for more tokens than one launch compacts (src/cuda/tokens/tokens.h), most of which
// have no gradient.
#include "src/cuda/tokens/tokens.h"
#include "tests/support/kept.h"

namespace logitless::conformance {
namespace {

class KeptTokens : public KeptState {};

TEST_P(KeptTokens, WithoutAGradientAmongMany) {
  for (const bool consumes : {false, true}) {
    Case c{.op = OpKind::linear_backward,
           .shape = {cuda::one_launch_tokens + 300, 8, 70},
           .dtype = dtype_,
           .ignored = 0.2,
           .inactive = 0.7,
           .grad_loss = true,
           .saved_state = true};
    c.options.reduction = Reduction::none;
    Steps steps(device_, c, 0);
    ASSERT_TRUE(keep(&steps));
    steps.problem.op.consume_kept = consumes;
    expect_judged(steps, backward(steps), consumes ? "consumed" : "left");
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(KeptTokens);
INSTANTIATE_TEST_SUITE_P(All, KeptTokens,
                         testing::Combine(testing::ValuesIn(device_names()),
                                          testing::Values(OpKind::linear_backward),
                                          testing::Values(DType::f32, DType::bf16)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
