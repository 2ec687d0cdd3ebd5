// SPDX-License-Identifier: Apache-2.0
// Divergences on the device, in every way that a plan has (src/cuda/divergence/divergence.h), each
// judged against the reference; and a Backward of dz that Forward has kept.
#include <limits>
#include <map>

#include "planned.h"
#include "src/cuda/divergence/plan.h"

namespace logitless::conformance {
namespace {

using Both = LinearDivergenceForwardBackward;
using Forward = LinearDivergenceForward;
using Back = LinearDivergenceBackward;

constexpr DivergenceKind kKinds[] = {DivergenceKind::forward_kl, DivergenceKind::reverse_kl,
                                     DivergenceKind::jsd, DivergenceKind::skew_kl,
                                     DivergenceKind::tv};
constexpr Case kPlain{.op = OpKind::divergence_forward_backward, .shape = {515, 72, 3001}};

class CudaDivergence : public ConformanceTest {
 protected:
  Case plain() const {
    Case c = kPlain;
    c.dtype = c.grad_input = c.grad_weight = dtype_;
    c.grad_loss = true;
    return c;
  }
  static void add_options(Case* c) {
    c->bias = c->teacher_bias = c->token_weight = c->statistics = c->logprob = true;
    c->temperatures = c->teacher_temperatures = true;
    c->options.softcap = 20;
    c->divergence.teacher_softcap = 15;
    c->divergence.label_weight = 0.4f;
    c->options.reduction = Reduction::none;
    c->ignored = 0.2;
    c->teacher_hidden = 40;
  }
  // Judges the case once in each way, among workspaces of these shares of the recommended one.
  void judge_ways(const Case& c) const {
    const Problem<Both> p = build<Both>(c);
    const cuda::DeviceInfo* info = nullptr;
    ASSERT_TRUE(cuda::find_device(0, &info).ok());
    const WorkspaceSize size = workspace_of(device_, c);
    std::map<cuda::DivergenceWay, std::vector<uint64_t>> bytes;
    for (const double share : {0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 4.0}) {
      const uint64_t some = bytes_of(size, share);
      auto& of_way = bytes[cuda::divergence_plan(Call(p.op), some, *info).way];
      if (of_way.size() < 2) of_way.push_back(some);
    }
    EXPECT_GE(bytes.size(), 2u);
    const reference::Result want = expected(device_, p.op, p.model);
    for (const auto& [way, sizes] : bytes) {
      for (const uint64_t some : sizes) {
        const Comparison result =
            compare(want, execute(device_, p.op, p.pool, {.memory = Memory::exact, .bytes = some}));
        EXPECT_TRUE(result.ok()) << result.report << ", " << cuda::name_of(way) << ": "
                                 << describe(c);
      }
    }
  }
};

TEST_P(CudaDivergence, EveryWayIsWithinTheBound) {
  for (const DivergenceKind kind : kKinds) {
    for (const bool options : {false, true}) {
      Case c = plain();
      c.divergence.kind = kind;
      if (options) add_options(&c);
      judge_ways(c);
    }
  }
}

TEST_P(CudaDivergence, InGradientsOfF32ThatAccumulate) {
  Case c = plain();
  c.grad_weight = DType::f32;
  c.accumulate = c.wants_grad_bias = c.no_target = true;
  c.shape.vocab = 3000;
  judge_ways(c);
}

TEST_P(CudaDivergence, OfATeacherNearBy) {
  for (const DivergenceKind kind : kKinds) {
    Case c = plain();
    c.divergence.kind = kind;
    c.near = true;
    judge_ways(c);
  }
}

// What Forward keeps serves a Backward with other upstream gradients, without a teacher and twice.
TEST_P(CudaDivergence, KeptDzIsWithinTheBound) {
  for (const DivergenceKind kind : kKinds) {
    for (const bool options : {false, true}) {
      Case c = plain();
      c.op = OpKind::divergence_backward;
      c.divergence.kind = kind;
      if (options) {
        add_options(&c);
        c.inactive = 0.3;
      }
      Problem<Back> p = build<Back>(c);
      Back& op = p.op;
      Forward forward{.input = op.input,
                      .weight = op.weight,
                      .bias = op.bias,
                      .teacher = op.teacher,
                      .target = op.target,
                      .options = op.options,
                      .divergence = op.divergence,
                      .weights = op.weights};
      const std::vector<int64_t> of_loss = c.options.reduction == Reduction::none
                                               ? std::vector<int64_t>{c.shape.tokens}
                                               : std::vector<int64_t>{};
      forward.loss = p.pool.reserve(DType::f32, of_loss);
      Forward placed = forward;
      place(placed, device_.tensors());
      Kept kept;
      const Status status =
          kept_size(placed, device_.execution(), std::numeric_limits<uint64_t>::max(), &kept);
      ASSERT_TRUE(status.ok()) << status.message();
      forward.kept = p.pool.reserve(op.input.dtype, {kept.shape[0], kept.shape[1]});
      forward.kept_rows = p.pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
      const Outcome made = execute(device_, forward, p.pool,
                                   {.memory = Memory::recommended, .fill = std::byte{0xFF}});
      ASSERT_TRUE(made.status.ok()) << made.status.message();
      const reference::Result want = expected(device_, op, p.model);
      op.kept = forward.kept;
      op.kept_rows = forward.kept_rows;
      op.kept_key = kept.key;
      write_bits(op.kept, made.kept.at("kept"));
      write_bits(op.kept_rows, made.kept.at("kept_rows"));
      op.teacher = {};
      for (const Memory memory : {Memory::recommended, Memory::minimum}) {
        const Comparison result = compare(want, execute(device_, op, p.pool, {.memory = memory}));
        EXPECT_TRUE(result.ok()) << result.report << ": " << describe(c);
      }
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaDivergence);
INSTANTIATE_TEST_SUITE_P(All, CudaDivergence,
                         testing::Combine(testing::ValuesIn(cuda_devices()),
                                          testing::Values(kPlain.op),
                                          testing::Values(DType::f32, DType::f16, DType::bf16)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
