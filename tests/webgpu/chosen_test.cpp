// SPDX-License-Identifier: Apache-2.0
// Chosen columns on WebGPU, beyond the contract's common part: their dot products have the bits of
// every tile of a product, each column is in exactly one window for every size of windows and
// chunks, and large gradients are added before they overflow.
#include <cstring>

#include "src/webgpu/native.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Forward = LinearCrossEntropyForward;
using Backward = LinearCrossEntropyBackward;

class WebGpuChosen : public testing::Test {
 protected:
  WebGpuChosen() {
    Status status;
    native_ = webgpu::find_device(0, &status);
    limits_ = native_->limits();
  }
  ~WebGpuChosen() override { native_->set_limits(limits_); }
  // Sets limits that lead to chunks of few tokens and windows of few columns.
  void set_small_limits() const {
    webgpu::Limits small = limits_;
    small.storage_binding_bytes = 40 << 10;
    small.buffer_bytes = 1 << 22;
    native_->set_limits(small);
  }
  static Case plain(OpKind op, Shape shape, int64_t chosen) {
    Case c{.op = op, .shape = shape, .bias = true, .chosen = chosen};
    c.options.reduction = Reduction::none;
    return c;
  }
  template <class Op>
  Fields run(const Problem<Op>& p, const RunPlan& plan = {}) const {
    const Outcome outcome = execute(device_, p.op, p.pool, plan);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    for (const std::string& violation : outcome.violations) ADD_FAILURE() << violation;
    return outcome.fields;
  }
  void expect_judged(const Case& c, const RunPlan& plan = {}) const {
    const Comparison judged = judge(device_, c, plan);
    EXPECT_TRUE(judged.ok()) << describe(c) << "\n" << judged.report;
  }

  const TestDevice& device_ = device("webgpu");
  webgpu::NativeDevice* native_ = nullptr;
  webgpu::Limits limits_;
};

constexpr RunPlan kAmple{.memory = Memory::exact, .bytes = uint64_t{64} << 20};

// If a row's target is among its chosen columns, both logits have the same bits.
TEST_F(WebGpuChosen, TheBitsOfATargetInEveryTile) {
  for (const Shape shape :
       {Shape{131, 40, 16801}, {61, 263, 4501}, {133, 131, 4098}, {40, 24, 3000}}) {
    for (const bool capped : {false, true}) {
      Case c = plain(OpKind::linear_forward, shape, 3);
      c.statistics = true;
      c.options.softcap = capped ? 3 : 0;
      Problem<Forward> p = build<Forward>(c), alone = build<Forward>(c);
      std::vector<double> ids = read(p.op.ids), target = read(p.op.target);
      for (size_t i = 0; i < target.size(); ++i) ids[3 * i + 1] = target[i];
      write(p.op.ids, ids);
      write(alone.op.ids, ids);
      alone.op.loss = {};
      alone.op.statistics = {};
      alone.op.statistics.target_logit = alone.pool.reserve(DType::f32, {shape.tokens});
      const Fields beside = run(p, kAmple);
      for (const Fields& made : {beside, run(p, {.memory = Memory::minimum}), run(alone)}) {
        EXPECT_EQ(made.at("logits_at").bits, beside.at("logits_at").bits);
        EXPECT_EQ(made.at("target_logit").bits, beside.at("target_logit").bits);
        for (size_t i = 0; i < target.size(); ++i) {
          EXPECT_EQ(std::memcmp(&made.at("logits_at").bits[4 * (3 * i + 1)],
                                &made.at("target_logit").bits[4 * i], 4),
                    0)
              << describe(c) << ", token " << i;
        }
      }
      alone.op.ids = alone.op.logits_at = {};
      EXPECT_EQ(run(alone).at("target_logit").bits, beside.at("target_logit").bits);
    }
  }
}

TEST_F(WebGpuChosen, EachInItsWindowAndChunk) {
  for (const bool small : {false, true}) {
    if (small) set_small_limits();
    for (const OpKind op : {OpKind::linear_forward, OpKind::linear_backward}) {
      for (const Placement placement : {Placement::dense, Placement::transposed}) {
        for (const bool capped : {false, true}) {
          Case c = plain(op, {70, 5, 3100}, 64);
          c.placement = placement;
          c.statistics = op == OpKind::linear_forward;
          c.options.softcap = capped ? 2 : 0;
          c.temperatures = c.grad_lse = capped;
          c.ids = capped ? DType::i32 : DType::i64;
          expect_judged(c, {.memory = Memory::minimum});
        }
      }
    }
  }
}

TEST_F(WebGpuChosen, WindowsAndChunksChangeNoLogit) {
  Case c = plain(OpKind::linear_forward, {150, 8, 3100}, 64);
  for (const bool alone : {false, true}) {
    Problem<Forward> p = build<Forward>(c);
    if (alone) p.op.loss = {};
    const Fields whole = run(p);
    set_small_limits();
    EXPECT_EQ(run(p).at("logits_at").bits, whole.at("logits_at").bits);
    native_->set_limits(limits_);
  }
}

// If only target logits are requested, there is neither a block nor a slot.
TEST_F(WebGpuChosen, NoProductNeedsNoMemoryForOne) {
  Case c = plain(OpKind::linear_forward, {200, 12, 50000}, 4);
  Problem<Forward> p = build<Forward>(c);
  p.op.loss = {};
  place(p.op, device_.tensors());
  WorkspaceSize size;
  ASSERT_TRUE(workspace(p.op, device_.execution(), &size).ok());
  EXPECT_LT(size.recommended, uint64_t{1} << 20);
}

// A gradient exceeds f32 until the softcap's slope makes it finite again: with an equally large
// target gradient, without another one, and with a target gradient just below the limit.
TEST_F(WebGpuChosen, LargeGradientsMeetBeforeTheyOverflow) {
  Case c = plain(OpKind::linear_backward, {3, 4, 5}, 2);
  c.options.logit_scale = 8;
  c.options.softcap = 1;
  c.wants_grad_input = c.wants_grad_weight = false;
  c.wants_grad_bias = c.grad_target_logit = true;
  Problem<Backward> p = build<Backward>(c);
  write(p.op.target, {3, 0, 2});
  write(p.op.input, std::vector<double>(12, 0));
  write(p.op.bias, {0.5, 0.5, 0.5, 0.5, 0.5});
  write(p.op.ids, {3, 1, 4, -1, 2, -1});
  write(p.op.grad_logits_at, {-2e38, 2e38, 2e38, 0, 0x1p58, 0});
  write(p.op.grad_target_logit, {3e38, 0, 0x1p57});
  const Comparison judged =
      compare(expected(device_, p.op, p.model), execute(device_, p.op, p.pool));
  EXPECT_TRUE(judged.ok()) << judged.report;
  const Fields made = run(p);
  for (const size_t j : {1, 3, 4}) {
    EXPECT_GT(made.at("grad_bias").value[j], 1e35) << j;
    EXPECT_LT(made.at("grad_bias").value[j], 3e38) << j;
  }
}

}  // namespace
}  // namespace logitless::conformance
