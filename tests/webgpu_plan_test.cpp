// SPDX-License-Identifier: Apache-2.0
// The plans of the WebGPU backend, without a device: within every limit, smaller budgets smaller
// plans, and GPT-2's head in little memory.
#include "src/webgpu/plan.h"

#include <gtest/gtest.h>

namespace logitless::webgpu {
namespace {

Problem head(int64_t tokens, int64_t vocab, int64_t hidden, bool gradients) {
  Problem p;
  p.tokens = tokens;
  p.vocab = p.vocab_total = vocab;
  p.hidden = hidden;
  p.linear = p.reduces = true;
  p.gradients = p.wants_grad_input = p.wants_grad_weight = gradients;
  p.weight_bound = p.grad_weight_bound = hidden % 4 == 0;
  p.weight_row_bytes = p.grad_weight_row_bytes = 4 * hidden;
  p.token_stride_bytes = 4 * hidden;
  return p;
}

void expect_within(const Problem& p, const Plan& plan, const Limits& limits) {
  EXPECT_LE(plan.window_bytes, limits.storage_binding_bytes);
  EXPECT_LE(static_cast<uint64_t>(plan.window * p.hidden * 4), limits.storage_binding_bytes);
  uint64_t total = 0;
  for (const uint64_t bytes : plan.bytes) {
    EXPECT_LE(bytes, limits.buffer_bytes);
    EXPECT_EQ(bytes % 256, 0u);
    total += bytes;
  }
  EXPECT_EQ(plan.total, total);
  EXPECT_GE(plan.chunk * plan.chunks, p.tokens);
  EXPECT_LT(plan.chunk * (plan.chunks - 1), std::max<int64_t>(p.tokens, 1));
  EXPECT_GE(plan.window * plan.windows, p.vocab);
  if (plan.windows > 1) {
    EXPECT_EQ(plan.window % kSlotColumns, 0);
  }
}

TEST(WebGpuPlan, KeepsToTheLimitsAndTheBudget) {
  Limits small;
  small.storage_binding_bytes = 1 << 16;
  small.buffer_bytes = 1 << 22;
  for (const Limits& limits : {Limits{}, small}) {
    for (const int64_t tokens : {0, 1, 63, 1024, 70000}) {
      for (const int64_t vocab : {1, 1023, 1025, 50257}) {
        for (const bool gradients : {false, true}) {
          Problem p = head(tokens, vocab, 12, gradients);
          p.grad_weight_bound = true;
          uint64_t minimum, recommended;
          ASSERT_TRUE(workspace_sizes(p, limits, &minimum, &recommended).ok());
          EXPECT_LE(minimum, recommended);
          for (const uint64_t budget : {minimum, recommended, 2 * recommended, UINT64_MAX}) {
            Plan plan;
            ASSERT_TRUE(make_plan(p, limits, budget, &plan).ok());
            expect_within(p, plan, limits);
            EXPECT_LE(plan.total, budget);
          }
        }
      }
    }
  }
}

TEST(WebGpuPlan, MoreMemoryIsNeverMoreProducts) {
  const Problem p = head(1024, 50257, 768, true);
  int least = 4;
  for (uint64_t budget = 1 << 20; budget < uint64_t{1} << 30; budget *= 2) {
    Plan plan;
    ASSERT_TRUE(make_plan(p, {}, budget, &plan).ok());
    EXPECT_LE(plan.products, least);
    least = plan.products;
  }
  EXPECT_EQ(least, 3);
}

TEST(WebGpuPlan, TheSmallestWorkspaceOfGpt2sHeadIsBelow64MiB) {
  uint64_t minimum, recommended;
  ASSERT_TRUE(workspace_sizes(head(1024, 50257, 768, true), {}, &minimum, &recommended).ok());
  EXPECT_LT(minimum, uint64_t{64} << 20);
  // A quarter of the f32 logits, the windows' last rows and what is small.
  EXPECT_LT(recommended, uint64_t{1024} * 50257 * 4 / 4 + (uint64_t{4} << 20));
}

TEST(WebGpuPlan, TheLogitsOfAChunkAreWholeOnlyWhereTheyFit) {
  Plan plan;
  ASSERT_TRUE(make_plan(head(1024, 50257, 768, true), {}, UINT64_MAX, &plan).ok());
  EXPECT_TRUE(plan.whole);
  EXPECT_EQ(plan.products, 3);
  EXPECT_GT(plan.windows, 1);  // its weight passes a binding of 128 MiB
  ASSERT_TRUE(make_plan(head(1024, 50257, 768, true), {}, 0, &plan).ok());
  EXPECT_FALSE(plan.whole);
  EXPECT_EQ(plan.products, 4);
}

TEST(WebGpuPlan, ARowOfTheWeightBeyondABindingIsRefusedWithTheSizes) {
  Limits small;
  small.storage_binding_bytes = 1 << 16;
  Plan plan;
  const Status status = make_plan(head(8, 5000, 64, true), small, UINT64_MAX, &plan);
  EXPECT_EQ(status.code(), StatusCode::not_supported);
  EXPECT_NE(std::string(status.message()).find("65536 bytes a binding"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace logitless::webgpu
