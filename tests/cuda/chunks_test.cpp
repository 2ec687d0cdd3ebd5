// SPDX-License-Identifier: Apache-2.0
// Linear gradients on Hopper of more tokens than the workspace holds E for
// (src/cuda/linear/plan.h): chunks whose two products share a launch, f32 sums of grad_weight
// partly in grad_weight's own memory, and two passes where these sums have no room. Each plan is
// compared with the reference, with several sets of options.
#include "planned.h"
#include "src/cuda/linear/tiled/panels.h"

namespace logitless::conformance {
namespace {

class CudaChunks : public ConformanceTest {};

// Describes how a plan divides the work; "" for a single chunk in one pass.
std::string division(const CudaPlanned& planned) {
  const cuda::LinearPlan& p = planned.plan;
  const bool passes = p.kind == cuda::PlanKind::two_passes;
  if (p.chunks == 1 && !passes) return "";
  std::string text = name_of(p.kind);
  if (p.chunks == 1) text += ", of one chunk";
  if (!passes && cuda::tiled::tiled_part(p).input_teams > 0) text += ", both at once";
  if (p.lent_sum_rows > 0) text += ", sums lent";
  if (p.lent_sum_rows > rows_in_place_of_e(planned.shape, p)) text += " in pieces";
  if (p.first_rows > 0) text += ", some rows first";
  return text;
}

constexpr Case plain{.op = OpKind::linear_forward_backward,
                     .shape = {1300, 320, 8001},
                     .dtype = DType::bf16,
                     .grad_input = DType::bf16,
                     .grad_weight = DType::bf16};

void judge_divisions(const TestDevice& device, const Case& c,
                     const std::vector<std::string>& wanted) {
  auto p = build<ForwardBackward>(c);
  if (!c.wants_grad_bias) p.op.grad_bias = {};  // with grad_bias, first_rows is 0
  judge_plans(device, c, p, {0.0, 0.05, 0.1, 0.12, 0.14, 0.17, 0.2, 0.23, 0.3, 0.4, 0.6, 0.8},
              division, wanted);
}

TEST_P(CudaChunks, OfTokensThatCountSeldom) {
  Case c = plain;
  c.ignored = 0.4;
  c.token_weight = true;
  judge_divisions(device_, c,
                  {"token chunks, both at once, sums lent", "two passes, some rows first"});
}

TEST_P(CudaChunks, UnderOptions) {
  Case c = plain;
  c.options.label_smoothing = 0.1f;
  c.options.z_loss = 0.01f;
  c.vocab_weight = c.bias = c.statistics = true;
  c.data = Data::peaked;
  judge_divisions(device_, c,
                  {"token chunks, both at once, sums lent", "two passes, some rows first"});
}

// With a softcap and smoothing, dz overwrites E.
TEST_P(CudaChunks, OfDzAndItsBias) {
  Case c = plain;
  c.options.softcap = 20;
  c.options.label_smoothing = 0.1f;
  c.bias = c.wants_grad_bias = true;
  judge_divisions(device_, c, {"token chunks, both at once, sums lent", "two passes"});
}

// The first pass is one chunk and does not write grad_weight, whose memory then holds its panels.
TEST_P(CudaChunks, PanelsInTheMemoryOfWhatComesLater) {
  Case c = plain;
  c.shape = {1300, 64, 8001};
  c.bias = c.wants_grad_bias = true;
  judge_divisions(device_, c, {"two passes, of one chunk"});
}

// More f32 sums in grad_weight's memory than the chunk's E has room for, so they are rounded
// piecewise.
TEST_P(CudaChunks, SumsThatLeaveTheirMemoryInPieces) {
  Case c = plain;
  c.shape = {3100, 1024, 300};
  judge_divisions(device_, c, {"token chunks, both at once, sums lent in pieces"});
}

TEST_P(CudaChunks, AddedToSinglePrecision) {
  Case c = plain;
  c.grad_input = c.grad_weight = DType::f32;
  c.accumulate = true;
  judge_divisions(device_, c, {"token chunks, both at once"});
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaChunks);
INSTANTIATE_TEST_SUITE_P(All, CudaChunks,
                         testing::Combine(testing::ValuesIn(hopper_devices()),
                                          testing::Values(OpKind::linear_forward_backward),
                                          testing::Values(DType::bf16, DType::f16)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
