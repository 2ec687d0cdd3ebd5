// SPDX-License-Identifier: Apache-2.0
// The CPU's plans: they fit their bytes, do not depend on the number of threads, and keep the
// promises about the default workspace.
#include "src/cpu/plan.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace logitless::cpu {
namespace {

constexpr uint64_t MiB = 1 << 20;

LinearShape training(int64_t tokens, int64_t hidden, int64_t vocab, DType dtype = DType::f32) {
  return {.tokens = tokens,
          .vocab = vocab,
          .hidden = hidden,
          .dtype = dtype,
          .grad_input = true,
          .grad_weight = true};
}

// Returns the shape of the Backward after a Forward that kept `kept` columns.
LinearShape later(LinearShape shape, int64_t kept) {
  shape.forward = false;
  shape.kept = kept;
  return shape;
}

const LinearShape heads[] = {
    training(1024, 768, 50257),
    training(2048, 1024, 32000),
    training(256, 4096, 128256),
    training(8, 4096, 128256),
    training(1024, 768, 50257, DType::bf16),
    training(256, 4096, 128256, DType::bf16),
    training(1, 1, 1),
    training(513, 33, 200),
    later(training(1024, 768, 50257), 50257),
    later(training(1024, 768, 50257, DType::bf16), 50257),
    later(training(600, 40, 5000), 192),
};

TEST(Plan, EveryWorkspaceFromTheMinimumUpIsUsedAndNeverExceeded) {
  for (LinearShape shape : heads) {
    for (const bool gradients : {true, false}) {
      shape.grad_input = shape.grad_weight = gradients;
      const uint64_t minimum = plan_linear(shape, 0, 1).bytes;
      const uint64_t most = recommended_plan(shape, 64).bytes;
      for (uint64_t bytes = minimum; bytes <= 2 * most; bytes += (most / 37 + 63) / 64 * 64) {
        for (const int64_t threads : {1, 2, 64}) {
          const LinearPlan plan = plan_linear(shape, bytes, threads);
          ASSERT_LE(plan.bytes, bytes);
          ASSERT_GE(plan.lanes, 1);
          ASSERT_LE(plan.lanes, threads);
        }
      }
    }
  }
}

TEST(Plan, ThreadsDoNotChangeTheDivisionOfWork) {
  for (const LinearShape& shape : heads) {
    const uint64_t bytes = recommended_plan(shape, 2).bytes;
    for (const uint64_t given : {plan_linear(shape, 0, 1).bytes, bytes / 2, bytes, 4 * bytes}) {
      const LinearPlan one = plan_linear(shape, given, 1);
      for (const int64_t threads : {2, 3, 7, 64}) {
        // Each number of threads is tested with one thread's sizes and with its own.
        for (const uint64_t size : {given, recommended_plan(shape, threads).bytes}) {
          const LinearPlan many = plan_linear(shape, size, threads);
          const LinearPlan& want = size == given ? one : plan_linear(shape, bytes, 1);
          EXPECT_EQ(many.token_chunk, want.token_chunk);
          EXPECT_EQ(many.stored, want.stored);
          EXPECT_EQ(many.slots, want.slots);
        }
      }
    }
  }
}

TEST(Plan, TheRecommendedWorkspaceGivesTheRecommendedPlan) {
  for (const LinearShape& shape : heads) {
    for (const int64_t threads : {1, 2, 8, 64}) {
      const LinearPlan want = recommended_plan(shape, threads);
      const LinearPlan got = plan_linear(shape, want.bytes, std::max<int64_t>(threads, 8));
      EXPECT_EQ(got.token_chunk, want.token_chunk);
      EXPECT_EQ(got.stored, want.stored);
      EXPECT_EQ(got.lanes, want.lanes);
      EXPECT_EQ(got.bytes, want.bytes);
      // If fewer threads run, only the number of lanes is smaller.
      const LinearPlan used = plan_linear(shape, want.bytes, threads);
      EXPECT_EQ(used.lanes, std::min(want.lanes, threads));
      EXPECT_EQ(used.bytes + (want.lanes - used.lanes) * want.lane_bytes, want.bytes);
    }
  }
}

TEST(Plan, TheDefaultStaysBelowHalfOfTheLogits) {
  for (const LinearShape& shape : heads) {
    const uint64_t logits = uint64_t(shape.tokens) * shape.vocab * 4;
    for (const int64_t threads : {1, 2, 8}) {
      EXPECT_LE(recommended_plan(shape, threads).bytes, logits / 2 + 16 * MiB);
    }
  }
}

TEST(Plan, LossOnlyIsAtMost16MiB) {
  for (LinearShape shape : heads) {
    shape.grad_input = shape.grad_weight = false;
    for (const int64_t threads : {1, 2, 8}) {
      EXPECT_LE(recommended_plan(shape, threads).bytes, 16 * MiB);
    }
  }
}

// Down to half of the default memory, the chunk gets smaller before any of four threads goes idle.
TEST(Plan, ALittleLessMemoryIdlesNoThread) {
  for (LinearShape shape : {heads[0], heads[1], heads[2], heads[4], heads[5]}) {
    for (const bool gradients : {true, false}) {
      shape.grad_input = shape.grad_weight = gradients;
      const uint64_t most = recommended_plan(shape, 1).bytes;
      for (const uint64_t bytes : {most - 1, most - MiB, most - 2 * MiB, most / 8 * 7, most / 2}) {
        for (const int64_t threads : {2, 4}) {
          EXPECT_EQ(plan_linear(shape, bytes, threads).lanes, threads)
              << bytes << " of " << most << " bytes";
        }
        EXPECT_GE(plan_linear(shape, bytes, 8).lanes, 4) << bytes << " of " << most << " bytes";
      }
    }
  }
}

TEST(Plan, MoreMemoryIsNeverExpectedToBeSlower) {
  for (LinearShape shape : heads) {
    for (const bool state_given : {false, true}) {
      shape.forward = !state_given;
      const uint64_t most = recommended_plan(shape, 1).bytes;
      double cost = plan_linear(shape, 0, 8).cost;
      for (uint64_t bytes = plan_linear(shape, 0, 8).bytes; bytes < 2 * most; bytes += most / 997) {
        const LinearPlan p = plan_linear(shape, bytes, 8);
        EXPECT_LE(p.cost, cost) << bytes;
        cost = p.cost;
      }
    }
  }
}

// From the minimum up to 8 MiB, each doubling of the workspace makes the plan at least 5 % cheaper.
TEST(Plan, SmallWorkspacesHaveStepsBetween) {
  for (const LinearShape& shape : {heads[0], heads[1], heads[2], heads[4], heads[5]}) {
    const LinearPlan least = plan_linear(shape, 0, 8);
    EXPECT_GE(least.token_chunk, 64);
    for (uint64_t bytes = least.bytes; bytes < 8 * MiB; bytes *= 2) {
      EXPECT_LT(plan_linear(shape, 2 * bytes, 8).cost, .95 * plan_linear(shape, bytes, 8).cost);
    }
  }
}

// Every lane that works on a part of a slot recomputes the logits, so lanes beyond a multiple of
// the slots are not used.
TEST(Plan, RecomputingSharesSlotsEvenly) {
  for (LinearShape shape : heads) {
    shape.forward = false;
    if (shape.all_kept()) continue;
    for (const int64_t threads : {3, 9, 13, 40}) {
      const LinearPlan p = plan_linear(shape, uint64_t{1} << 40, threads);
      ASSERT_FALSE(p.stored);
      EXPECT_TRUE(p.lanes <= p.slots || p.lanes % p.slots == 0) << p.lanes << " of " << p.slots;
    }
  }
}

TEST(Plan, KeptStateTakesTheChunksOfAStoredPlanWithoutTheirLogits) {
  for (const LinearShape& shape : {heads[0], heads[4]}) {
    const LinearPlan fused = recommended_plan(shape, 8);
    const LinearPlan plan = recommended_plan(later(shape, shape.vocab), 8);
    ASSERT_TRUE(fused.stored);
    EXPECT_FALSE(plan.stored);
    EXPECT_EQ(plan.token_chunk, fused.token_chunk);
    EXPECT_GE(plan.slots, fused.slots);
    EXPECT_LE(plan.bytes, 32 * MiB);
    // f32 keeps logits; otherwise Backward needs room to recompute rows whose exponentials left the
    // range of 16 bits.
    EXPECT_EQ(plan.tile_at == plan.along_vocab_at, shape.dtype == DType::f32);
    EXPECT_EQ(plan.input_along_at == plan.blocks_at, shape.dtype == DType::f32);
  }
}

// If only some columns are kept, the rest is recomputed, with the memory that this takes.
TEST(Plan, AShareThatIsKeptSavesTimeAndNoMemory) {
  for (const LinearShape& shape : {heads[0], heads[2], heads[4]}) {
    const LinearPlan none = recommended_plan(later(shape, 0), 8);
    const LinearPlan half = recommended_plan(later(shape, shape.vocab / 384 * 192), 8);
    EXPECT_EQ(half.bytes, none.bytes);
    EXPECT_EQ(half.token_chunk, none.token_chunk);
    EXPECT_LT(half.cost, none.cost);
    EXPECT_LT(recommended_plan(later(shape, shape.vocab), 8).cost, half.cost);
  }
}

// Returns the shape of a divergence with a teacher of this width; of a Forward if `shape` has no
// gradients.
LinearShape of_two_heads(LinearShape shape, int64_t teacher_hidden) {
  shape.diverges = true;
  shape.teacher_hidden = teacher_hidden;
  return shape;
}

const LinearShape pairs[] = {
    of_two_heads(training(1024, 768, 50257), 768),
    of_two_heads(training(1024, 768, 50257, DType::bf16), 2048),
    of_two_heads(training(256, 4096, 128256), 0),
    of_two_heads(training(5, 16, 3000), 16),
    of_two_heads(training(513, 33, 200), 64),
};

TEST(Plan, TwoHeadsUseEveryWorkspaceWithTheSameDivisionForAnyThreads) {
  for (LinearShape shape : pairs) {
    for (const bool gradients : {true, false}) {
      shape.grad_input = shape.grad_weight = gradients;
      const uint64_t minimum = plan_linear(shape, 0, 1).bytes;
      const uint64_t most = recommended_plan(shape, 8).bytes;
      for (uint64_t bytes = minimum; bytes <= 2 * most; bytes += (most / 37 + 63) / 64 * 64) {
        const LinearPlan one = plan_linear(shape, bytes, 1);
        for (const int64_t threads : {2, 3, 64}) {
          const LinearPlan plan = plan_linear(shape, bytes, threads);
          ASSERT_LE(plan.bytes, bytes);
          ASSERT_TRUE(plan.stored);
          EXPECT_EQ(plan.token_chunk, one.token_chunk);
          EXPECT_EQ(plan.slots, one.slots);
        }
      }
    }
  }
}

TEST(Plan, TwoHeadsNeedTheLogitsOfAFewTokens) {
  for (const LinearShape& shape : pairs) {
    const LinearPlan least = plan_linear(shape, 0, 1);
    EXPECT_LE(least.token_chunk, std::max<int64_t>(8, least.engine.token_multiple()));
    const uint64_t logits = uint64_t(2 * least.token_chunk * least.vocab_tiles * vocab_tile) * 4;
    EXPECT_LE(least.bytes, logits + logits / 8 + 2 * MiB);
    EXPECT_LE(recommended_plan(shape, 8).bytes,
              uint64_t(shape.tokens) * shape.vocab * 2 + 16 * MiB);
  }
}

TEST(Plan, KeptStateOfTwoHeadsMakesNoLogits) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const LinearShape shape = of_two_heads(later(training(1024, 768, 50257, dtype), 50257), 768);
    const LinearPlan plan = recommended_plan(shape, 8);
    EXPECT_FALSE(plan.stored);
    EXPECT_EQ(plan.tile_at, plan.along_vocab_at);
    EXPECT_EQ(plan.input_along_at, plan.blocks_at);
    EXPECT_LE(plan.bytes, 32 * MiB);
  }
}

TEST(Plan, NothingToDoHasAPlan) {
  for (LinearShape shape : {training(0, 64, 0), training(0, 64, 3000)}) {
    for (const bool grad_input : {false, true}) {
      shape.grad_input = grad_input;
      for (const bool forward : {false, true}) {
        shape.forward = forward;
        EXPECT_GE(plan_linear(shape, 0, 3).lanes, 1);
        EXPECT_EQ(plan_linear(shape, recommended_plan(shape, 3).bytes, 8).chunks, 1);
      }
    }
  }
}

// The largest allowed shapes, on every kind of engine. Sizes that no machine has are returned in
// full; an overflow of 64 bits would make them small.
TEST(Plan, TheLargestShapesAskForWhatTheyTake) {
  constexpr int64_t most = int64_t{1} << 56, root = int64_t{1} << 28;
  constexpr Engine engines[] = {{Arithmetic::f32, 8, 32, 1, 4},
                                {Arithmetic::bf16_dot, 8, 32, 2, 2},
                                {Arithmetic::amx, 32, 32, 32, 2}};
  for (LinearShape shape : {training(1, most, 1), training(1, 1, most), training(most, 1, 1),
                            training(root, root, root), training(33, most / 33, 1),
                            training(1, root, root), training(33, 1, most / 33)}) {
    shape.grad_bias = shape.bias = shape.class_weight = true;
    for (const Engine& engine : engines) {
      shape.engine = engine;
      for (const bool forward : {true, false}) {
        shape.forward = forward;
        for (const bool direct : {true, false}) {
          shape.direct_grad_weight = direct;
          const LinearPlan least = plan_linear(shape, 0, 1);
          const LinearPlan default_plan = recommended_plan(shape, 64);
          EXPECT_LE(least.bytes, default_plan.bytes);
          // Every plan holds arrays over the tokens, sums of grad_bias and, padded to a panel, the
          // f32 sums of a few rows of grad_input.
          const auto tokens = static_cast<double>(shape.tokens);
          const double rows = static_cast<double>(least.token_chunk);
          EXPECT_GE(static_cast<double>(least.bytes),
                    std::min(0x1p62, 8 * tokens + 4.0 * static_cast<double>(shape.vocab) +
                                         4 * rows * static_cast<double>(shape.hidden)));
        }
      }
    }
  }
}

TEST(Plan, A16BitGradWeightAddsItsSumOnlyOverSeveralChunks) {
  LinearShape shape = training(1024, 768, 50257);
  const uint64_t direct = recommended_plan(shape, 1).bytes;
  shape.direct_grad_weight = false;
  EXPECT_EQ(recommended_plan(shape, 1).bytes, direct + uint64_t(50257) * 768 * 4);
  shape.tokens = 64;
  EXPECT_FALSE(recommended_plan(shape, 1).weight_sum);
}

TEST(Plan, ManyThreadsFindWork) {
  for (const LinearShape& shape : {heads[0], heads[1], heads[2]}) {
    const LinearPlan plan = recommended_plan(shape, 64);
    const int64_t panels = plan.engine.b_panels(shape.hidden);
    EXPECT_GE(plan.slots * std::max<int64_t>(panels / 4, 1), 16);
    EXPECT_GE(plan.vocab_tiles, 64);
  }
}

}  // namespace
}  // namespace logitless::cpu
