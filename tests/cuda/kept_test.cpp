// SPDX-License-Identifier: Apache-2.0
// E kept in grad_weight's own memory on Hopper (src/cuda/linear/tiled/panels.h): of all columns or
// of some, read in place, or copied before grad_weight's rows overwrite it. Each plan is compared
// with the reference, with several sets of options.
#include "planned.h"
#include "src/cuda/linear/tiled/panels.h"

namespace logitless::conformance {
namespace {

class CudaKept : public ConformanceTest {};

// Describes how E is kept in grad_weight's memory; "" if it is not.
std::string manner(const CudaPlanned& planned) {
  const auto& [s, p] = planned;
  if (p.lent_columns == 0) return "";
  const int64_t kept = kept_columns(p);
  bool in_place = false, copied = false;
  for (cuda::PanelPlace at; at.end() < kept;) {
    at = cuda::tiled::kept_part_at(s, p, at.end());
    in_place |= at.lent && !at.copied;
    copied |= at.copied;
  }
  std::string text = kept == s.vocab ? "all" : "some";
  if (p.stored_columns > 0) text += ", some in the workspace";
  if (in_place) text += ", in place";
  if (copied) text += ", copied";
  if (sums_grad_input(s, p)) text += ", grad_input summed";
  return text;
}

constexpr Case plain{.op = OpKind::linear_forward_backward,
                     .shape = {300, 104, 12001},
                     .dtype = DType::bf16,
                     .grad_input = DType::bf16,
                     .grad_weight = DType::bf16};

void judge_manners(const TestDevice& device, const Case& c,
                   const std::vector<std::string>& wanted) {
  std::vector<double> shares;
  for (int i = 0; i <= 40; ++i) shares.push_back(i / 40.0);
  judge_plans(device, c, build<ForwardBackward>(c), shares, manner, wanted);
}

// If there are more tokens than 2 D, grad_weight's memory holds E of some columns only.
TEST_P(CudaKept, ColumnsThatTakeMoreThanTheirRows) {
  Case c = plain;
  c.ignored = 0.4;
  c.token_weight = true;
  judge_manners(device_, c,
                {"some, in place, copied, grad_input summed",
                 "some, some in the workspace, in place, grad_input summed"});
  c.options.label_smoothing = 0.1f;
  c.vocab_weight = c.bias = c.wants_grad_bias = true;
  c.data = Data::peaked;
  judge_manners(device_, c,
                {"some, in place, copied, grad_input summed",
                 "some, some in the workspace, in place, grad_input summed"});
}

TEST_P(CudaKept, ColumnsThatTakeAsMuchAsTheirRows) {
  Case c = plain;
  c.shape = {128, 128, 12032};
  c.statistics = true;
  judge_manners(device_, c, {"all, copied"});
  c.options.label_smoothing = 0.1f;
  c.vocab_weight = c.bias = c.wants_grad_bias = true;
  judge_manners(device_, c, {"all, copied"});
  c.options.softcap = 20;  // dz overwrites E
  judge_manners(device_, c, {"all, copied"});
}

TEST_P(CudaKept, ColumnsThatTakeLessThanTheirRows) {
  Case c = plain;
  c.shape = {66, 256, 12001};
  c.ignored = 0.3;
  judge_manners(device_, c, {"all, in place, copied"});
  c.grad_input = DType::f16;  // a product cannot write it in another dtype
  judge_manners(device_, c, {"all, in place, copied, grad_input summed"});
}

// No token that counts, one token, or no grad_input.
TEST_P(CudaKept, OfHardlyAnything) {
  Case none = plain, one = plain, weight_alone = plain;
  none.shape = weight_alone.shape = {128, 128, 12032};
  none.ignored = 1;
  one.shape = {1, 64, 12032};
  weight_alone.wants_grad_input = false;
  for (const Case& c : {none, one, weight_alone}) judge_manners(device_, c, {"all, copied"});
}

TEST_P(CudaKept, InSinglePrecision) {
  Case c = plain;
  c.shape = {128, 64, 12032};
  c.grad_input = c.grad_weight = DType::f32;
  c.data = Data::large;  // rows beyond the range of E
  judge_manners(device_, c, {"all, copied"});
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaKept);
INSTANTIATE_TEST_SUITE_P(All, CudaKept,
                         testing::Combine(testing::ValuesIn(hopper_devices()),
                                          testing::Values(OpKind::linear_forward_backward),
                                          testing::Values(DType::bf16, DType::f16)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
