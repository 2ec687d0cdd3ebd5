// SPDX-License-Identifier: Apache-2.0
// The WebGPU backend's plans and dispatches, without a device: they stay within every limit,
// smaller budgets make smaller plans, and GPT-2's head fits in little memory.
#include "src/webgpu/cost.h"

#include <gtest/gtest.h>

#include "paper_calls.h"
#include "src/rules.h"

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

// Shapes like those of WebGpu.LargeTilesAndSlices lead to every tile and to slices.
TEST(WebGpuPlan, TilesFollowTheShape) {
  const auto tile = [](int64_t rows, int64_t columns, int64_t depth, bool logits) {
    const Tile t = tile_of(rows, columns, depth, logits);
    return std::array<int64_t, 3>{t.small ? 1 : 0, t.m, t.n};
  };
  using Three = std::array<int64_t, 3>;
  EXPECT_EQ(tile(131, 16804, 40, true), (Three{0, 128, 128}));
  EXPECT_EQ(tile(61, 4501, 264, true), (Three{0, 64, 64}));
  EXPECT_EQ(tile(64, 70000, 16, true), (Three{0, 64, 64}));
  EXPECT_EQ(tile(61, 264, 4501, false), (Three{0, 64, 64}));
  EXPECT_EQ(tile(4501, 264, 61, false), (Three{0, 128, 64}));
  EXPECT_EQ(tile(4501, 12, 61, false), (Three{1, 32, 32}));
  EXPECT_GT(most_slices(head(61, 4501, 264, true), 61, 4501), 8);
  EXPECT_EQ(most_slices(head(61, 4501, 264, false), 61, 4501), 1);
  EXPECT_EQ(most_slices(head(4096, 50257, 4096, true), 4096, 50257), 1);
}

TEST(WebGpuPlan, AmpleMemoryIsUsedForSlices) {
  for (const Problem& p : {head(61, 4501, 264, true), head(40, 3000, 24, true)}) {
    Plan plan;
    ASSERT_TRUE(make_plan(p, {}, uint64_t{64} << 20, &plan).ok());
    EXPECT_GT(plan.slices, 4);
    EXPECT_EQ(plan.chunks, 1);
  }
}

TEST(WebGpuPlan, MoreMemoryIsNeverSlower) {
  const Problem p = head(1024, 50257, 768, true);
  double last = 1e300;
  for (uint64_t budget = uint64_t{2} << 20; budget < uint64_t{1} << 30; budget += budget / 4) {
    Plan plan;
    ASSERT_TRUE(make_plan(p, {}, budget, &plan).ok());
    const double time = predicted_microseconds(p, plan);
    EXPECT_LE(time, last) << budget;
    EXPECT_GT(time, 0);
    last = time;
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
  // A quarter of the f32 logits, plus the windows' last rows and small buffers.
  EXPECT_LT(recommended, uint64_t{1024} * 50257 * 4 / 4 + (uint64_t{4} << 20));
}

TEST(WebGpuPlan, TheLogitsOfAChunkAreWholeOnlyWhereTheyFit) {
  Plan plan;
  ASSERT_TRUE(make_plan(head(1024, 50257, 768, true), {}, UINT64_MAX, &plan).ok());
  EXPECT_TRUE(plan.whole);
  EXPECT_EQ(plan.products, 3);
  EXPECT_GT(plan.windows, 1);  // the weight exceeds a binding of 128 MiB
  ASSERT_TRUE(make_plan(head(1024, 50257, 768, true), {}, 0, &plan).ok());
  EXPECT_FALSE(plan.whole);
  EXPECT_EQ(plan.products, 4);
}

// A student with GPT-2's head and a teacher of another width.
Problem two_heads(int64_t tokens) {
  Problem p = head(tokens, 50257, 768, true);
  p.diverges = true;
  p.teacher = {.is_there = true, .is_head = true, .hidden = 1024, .weight_row_bytes = 4096};
  p.teacher.weight_bound = true;
  return p;
}

TEST(WebGpuPlan, BothHeadsLogitsOfAChunkAreWhole) {
  const Problem p = two_heads(4096);
  uint64_t minimum, recommended;
  ASSERT_TRUE(workspace_sizes(p, {}, &minimum, &recommended).ok());
  EXPECT_LT(minimum, recommended);
  // Both heads together take a quarter of one head's f32 logits, plus the rows and grad_input's
  // slices.
  EXPECT_LT(recommended, uint64_t{4096} * 50257 * 4 / 4 + (uint64_t{8} << 20));
  for (const uint64_t budget : {minimum, recommended, UINT64_MAX}) {
    Plan plan;
    ASSERT_TRUE(make_plan(p, {}, budget, &plan).ok());
    expect_within(p, plan, {});
    EXPECT_TRUE(plan.whole);
    EXPECT_EQ(plan.products, 4);
    EXPECT_EQ(plan.bytes[static_cast<size_t>(Role::block)],
              plan.bytes[static_cast<size_t>(Role::teacher_block)]);
    EXPECT_LE(plan.total, budget);
  }
}

// A chunk shrinks with the workspace and with the size of a buffer.
TEST(WebGpuPlan, ChunksOfTwoHeadsFollowTheBytes) {
  Limits small;
  small.buffer_bytes = uint64_t{8} << 20;
  small.storage_binding_bytes = uint64_t{8} << 20;
  Problem p = two_heads(1024);
  p.wants_grad_weight = false;  // its f32 sum alone would exceed this
  Plan plan;
  ASSERT_TRUE(make_plan(p, small, UINT64_MAX, &plan).ok());
  EXPECT_LT(plan.chunk, 64);
  expect_within(p, plan, small);
  ASSERT_TRUE(make_plan(p, {}, uint64_t{64} << 20, &plan).ok());
  EXPECT_GE(plan.chunk, 64);
  EXPECT_LE(plan.total, uint64_t{64} << 20);
}

TEST(WebGpuPlan, ADeviceThatKeepsNothingNeedsTheTeacher) {
  Limits small;
  small.storage_binding_bytes = uint64_t{32} << 20;
  Problem p = two_heads(64);
  p.reads_kept = true;
  p.kept_columns = p.vocab;
  Plan plan;
  ASSERT_TRUE(make_plan(p, {}, UINT64_MAX, &plan).ok());
  EXPECT_EQ(plan.products, 2);
  EXPECT_EQ(plan.kept_columns, p.vocab);
  ASSERT_TRUE(make_plan(p, small, UINT64_MAX, &plan).ok());
  EXPECT_EQ(plan.products, 4);
  EXPECT_EQ(plan.kept_columns, 0);
  p.teacher = {};
  const Status status = make_plan(p, small, UINT64_MAX, &plan);
  EXPECT_EQ(status.code(), StatusCode::not_supported);
  EXPECT_NE(std::string(status.message()).find("33554432 bytes"), std::string::npos)
      << status.message();
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

// Counts buffers at creation, including those of inputs and outputs.
TEST(WebGpuPlan, ThePeakOfGpt2sHeadIsThePredictedOne) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    const PaperCall head{1024, 768, 50257, dtype};
    for (const uint64_t budget : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
      for (const auto& r : {run_on_paper<LinearCrossEntropyForward>(head, {}, budget),
                            run_on_paper<LinearCrossEntropyForwardBackward>(head, {}, budget)}) {
        EXPECT_EQ(r.faults, "");
        EXPECT_EQ(r.most, r.tensors + r.predicted);
        if (budget == 0) {
          EXPECT_EQ(r.predicted, r.minimum);
          EXPECT_LT(r.most, r.tensors + (uint64_t{64} << 20));
        }
      }
    }
  }
}

// Every binding is within its buffer and the limits, and nothing written is bound twice.
TEST(WebGpuPlan, EveryDispatchKeepsToTheRules) {
  Limits small;
  small.storage_binding_bytes = 1 << 17;
  small.buffer_bytes = 1 << 23;
  uint64_t calls = 0;
  for_each_op([&]<class Op>(const Op&, int32_t) {
    for (const PaperCall shape : {PaperCall{3, 8, 40}, PaperCall{130, 13, 5003}}) {
      for_each_paper_call<Op>(shape, [&](const PaperCall& c) {
        for (const Limits& limits : {Limits{}, small}) {
          for (const uint64_t budget : {uint64_t{0}, uint64_t{1}}) {
            const PaperResult r = run_on_paper<Op>(c, limits, budget);
            ASSERT_EQ(r.faults, "") << name_of_op(kind_of<Op>) << " V " << c.vocab << " dtype "
                                    << name_of(c.dtype) << " strided " << c.strided << " optional "
                                    << c.optional << " binding " << limits.storage_binding_bytes;
            ASSERT_EQ(r.most, r.tensors + r.predicted);
            ++calls;
          }
        }
      });
    }
  });
  EXPECT_GT(calls, 5000u);
}

// With each of three maps, with and without a bias, and with and without targets.
TEST(WebGpuPlan, ThePipelinesOfChosenColumnsAreAllListed) {
  std::set<std::string> pipelines;
  const auto add = [&](auto typed) {
    for_each_paper_call<decltype(typed)>({3, 8, 40}, [&](const PaperCall& c) {
      (void)run_on_paper<decltype(typed)>(c, {}, 1, &pipelines);
    });
  };
  add(LinearCrossEntropyForward{});
  add(LinearCrossEntropyBackward{});
  const auto of = [&](const std::string& begin) {
    return std::count_if(pipelines.begin(), pipelines.end(),
                         [&](const std::string& name) { return name.starts_with(begin); });
  };
  EXPECT_EQ(of("chosen.wgsl, logits"), 24);
  EXPECT_EQ(of("chosen.wgsl, gradients"), 6);
  EXPECT_EQ(of("chosen.wgsl, put"), 1);
  EXPECT_EQ(of("chosen_ids.wgsl, begin"), 1);
}

// A plan without a product has no memory for one.
TEST(WebGpuPlan, TargetsAloneTakeNoProduct) {
  PaperCall c{.tokens = 1024, .hidden = 768, .vocab = 50257, .targets_only = true};
  RecordedDevice device{Limits{}};
  const auto op = paper_op<LinearCrossEntropyForward>(c, &device);
  const Problem p = problem_of(logitless::Call(op, {.device = {DeviceType::webgpu, 0}}));
  Plan plan;
  ASSERT_TRUE(make_plan(p, {}, UINT64_MAX, &plan).ok());
  EXPECT_EQ(plan.products, 0);
  EXPECT_LT(plan.total, uint64_t{4} << 20);
  c.none = true;
  EXPECT_EQ(run_on_paper<LinearCrossEntropyForward>(c, {}, 1).faults, "");
}

TEST(WebGpuPlan, MoreTokensAndMoreVocabularyThanAGridIsWide) {
  Limits large;
  large.buffer_bytes = uint64_t{1} << 34;
  large.storage_binding_bytes = (uint64_t{1} << 32) - 256;
  for (const PaperCall& c : {PaperCall{70000, 8, 300}, PaperCall{5, 4, 5000000}}) {
    for (const Limits& limits : {Limits{}, large}) {
      for (const uint64_t budget : {uint64_t{0}, uint64_t{1}}) {
        const PaperResult r = run_on_paper<LinearCrossEntropyForwardBackward>(c, limits, budget);
        EXPECT_EQ(r.faults, "") << c.tokens << " " << c.vocab << " " << limits.buffer_bytes;
        EXPECT_EQ(run_on_paper<CrossEntropyForwardBackward>(c, limits, budget).faults, "");
        EXPECT_EQ(run_on_paper<Softmax>(c, limits, budget).faults, "");
        EXPECT_EQ(run_on_paper<LinearDivergenceForwardBackward>(c, limits, budget).faults, "");
      }
    }
  }
}

// grad_bias is a single row of the vocabulary's length, and so are the logits of one token.
TEST(WebGpuPlan, ARowThatIsWiderThanAGridOfCopies) {
  Limits large;
  large.buffer_bytes = uint64_t{1} << 34;
  large.storage_binding_bytes = (uint64_t{1} << 32) - 256;
  for (const bool optional : {false, true}) {
    const PaperCall c{.tokens = 1, .hidden = 4, .vocab = 20000000, .optional = optional};
    for (const Limits& limits : {Limits{}, large}) {
      for (const uint64_t budget : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
        EXPECT_EQ(run_on_paper<CrossEntropyForward>(c, limits, budget).faults, "");
        EXPECT_EQ(run_on_paper<CrossEntropyForwardBackward>(c, limits, budget).faults, "");
        EXPECT_EQ(run_on_paper<Softmax>(c, limits, budget).faults, "");
        // The weight exceeds the smaller limits.
        if (limits.buffer_bytes < large.buffer_bytes) continue;
        EXPECT_EQ(run_on_paper<LinearCrossEntropyForwardBackward>(c, limits, budget).faults, "");
      }
    }
  }
  const PaperCall slots{.tokens = 1, .hidden = 4, .vocab = 100000000};
  EXPECT_EQ(run_on_paper<CrossEntropyForwardBackward>(slots, large, 1).faults, "");
}

// Returns the planner's problem for a Forward or Backward with room for `blocks` blocks of kept
// columns.
template <class Op>
Problem keeping(const PaperCall& c, int64_t blocks) {
  RecordedDevice device{Limits{}};
  Op op = paper_op<Op>(c, &device);
  op.kept = matrix_view(nullptr, c.dtype, blocks * round_up(c.tokens, 64), 64);
  return problem_of(logitless::Call(op, {.device = {DeviceType::webgpu, 0}}));
}

TEST(WebGpuPlan, KeepsTheColumnsThatThereIsRoomFor) {
  const struct {
    DType dtype;
    int64_t vocab, blocks, columns;
  } cases[] = {{DType::f32, 50257, 786, 50257},  {DType::f32, 50257, 783, 50112},
               {DType::f32, 50257, 3, 192},      {DType::f32, 37, 1, 37},
               {DType::bf16, 50257, 786, 25152}, {DType::bf16, 50257, 3, 64},
               {DType::bf16, 33, 1, 0},          {DType::bf16, 32, 1, 32}};
  for (const auto& [dtype, vocab, blocks, columns] : cases) {
    const PaperCall c{.tokens = 100, .hidden = 8, .vocab = vocab, .dtype = dtype, .optional = true};
    Limits below;
    below.storage_binding_bytes /= 4;
    for (const Problem& p : {keeping<LinearCrossEntropyForward>(c, blocks),
                             keeping<LinearCrossEntropyBackward>(c, blocks)}) {
      Plan plan;
      ASSERT_TRUE(make_plan(p, {}, UINT64_MAX, &plan).ok());
      EXPECT_EQ(plan.kept_columns, columns) << vocab << " " << blocks;
      ASSERT_TRUE(make_plan(p, below, UINT64_MAX, &plan).ok());
      EXPECT_EQ(plan.kept_columns, 0);
    }
  }
}

// If all columns are kept, two products remain; the rest of the plan is the same.
TEST(WebGpuPlan, KeptColumnsTakeNoProduct) {
  const PaperCall c{.tokens = 1024, .hidden = 768, .vocab = 50257, .optional = true};
  for (const auto& [blocks, products] : {std::pair<int64_t, int>{786, 2}, {393, 3}, {0, 3}}) {
    const Problem p = keeping<LinearCrossEntropyBackward>(c, blocks);
    Problem without = p;
    without.kept_columns = 0;
    for (const uint64_t budget : {uint64_t{0}, uint64_t{50} << 20, UINT64_MAX}) {
      Plan plan, plain;
      ASSERT_TRUE(make_plan(p, {}, budget, &plan).ok());
      ASSERT_TRUE(make_plan(without, {}, budget, &plain).ok());
      EXPECT_EQ(plan.products, products);
      EXPECT_EQ(plan.chunk, plain.chunk);
      EXPECT_EQ(plan.window, plain.window);
      EXPECT_EQ(plan.slices, plain.slices);
      EXPECT_EQ(plan.bytes, plain.bytes);
    }
  }
}

// One buffer holds all of GPT-2's kept logits, within the limits that every device has.
TEST(WebGpuPlan, KeepsGpt2sHeadByTheRules) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const PaperCall head{1024, 768, 50257, dtype, DType::f32, false, true};
    for (const uint64_t budget : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
      std::set<std::string> pipelines;
      for (const auto& r :
           {run_on_paper<LinearCrossEntropyForward>(head, {}, budget, &pipelines),
            run_on_paper<LinearCrossEntropyBackward>(head, {}, budget, &pipelines)}) {
        EXPECT_EQ(r.faults, "");
        EXPECT_EQ(r.most, r.tensors + r.predicted);
      }
      for (const char* entry : {"keep", "check", "report"}) {
        EXPECT_TRUE(pipelines.contains("keep.wgsl, " + std::string(entry) + ", {}")) << entry;
      }
    }
  }
}

// Larger limits lead to fewer windows, and so to fewer and larger dispatches.
TEST(WebGpuPlan, LargerLimitsAreFewerWindows) {
  Limits large;
  large.buffer_bytes = uint64_t{1} << 32;
  large.storage_binding_bytes = uint64_t{1} << 31;
  Plan by_default, by_large;
  const Problem p = head(4096, 128256, 2048, true);
  ASSERT_TRUE(make_plan(p, large, UINT64_MAX, &by_large).ok());
  Limits few = large;
  few.storage_binding_bytes = Limits{}.storage_binding_bytes;
  ASSERT_TRUE(make_plan(p, few, UINT64_MAX, &by_default).ok());
  EXPECT_LT(by_large.windows, by_default.windows);
}

}  // namespace
}  // namespace logitless::webgpu
