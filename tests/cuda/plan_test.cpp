// SPDX-License-Identifier: Apache-2.0
// How CUDA divides linear ops, and the memory that this takes; needs no GPU.
#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "shapes.h"
#include "src/cuda/linear/portable/engine.h"
#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/tiled/panels.h"

namespace logitless::cuda {
namespace {

// Only a grid's first axis takes more than 65535 blocks, 8.4 million columns at 128 a block.
TEST(CudaPlan, AGridHoldsTheSecondAxisWhateverItsLength) {
  for (const int64_t count : {int64_t{1}, int64_t{32768}, int64_t{32769}, int64_t{65535},
                              int64_t{65536}, int64_t{16777217}, (int64_t{1} << 31) - 1}) {
    const dim3 grid = two_axes(7, count);
    EXPECT_EQ(grid.x, 7u);
    EXPECT_LE(grid.y, 65535u);
    EXPECT_LE(grid.z, 65535u);
    const int64_t blocks = int64_t{grid.y} * grid.z;
    EXPECT_GE(blocks, count);
    EXPECT_LT(blocks - count, grid.z) << "idle blocks";
  }
  EXPECT_EQ(two_axes(7, 0).z, 0u);  // nothing to launch
}

TEST(CudaPlan, FitsItsBudgetToTheByte) {
  for (const Asked& asked : shapes()) {
    for (const uint64_t bytes : budgets(asked)) {
      const LinearPlan p = asked.plan(bytes);
      EXPECT_LE(p.bytes, bytes);
      uint64_t used = 0;
      for (const Planned& each : passes(asked, bytes)) {
        EXPECT_EQ(each.plan.bytes, bytes_of(each.engine, each.shape, each.plan));
        used = std::max(used, each.plan.bytes);
      }
      if (p.kind == PlanKind::two_passes) used += state_bytes(asked.shape);
      EXPECT_EQ(p.bytes, used);
    }
  }
}

TEST(CudaPlan, MoreMemoryNeverTakesLonger) {
  for (const Asked& asked : shapes()) {
    double before = asked.plan(budgets(asked).front()).seconds;
    for (const uint64_t bytes : budgets(asked)) {
      const double now = asked.plan(bytes).seconds;
      // The plan keeps the largest share of E that fits; a smaller share may fill its last wave
      // better.
      EXPECT_LE(now, before * 1.05) << bytes;
      before = std::min(before, now);
    }
  }
}

// With a little less memory than all of E takes, a plan is at most 8 % slower, even with statistics
// whose own memory only the whole plan needs.
TEST(CudaPlan, TheStepToTheWholeIsSmall) {
  LinearShape s{.tokens = 8192, .vocab = 128256, .hidden = 4096};
  s.grad_input = s.grad_weight = s.kernels.direct_grad_weight = true;
  s.kernels.direct_grad_input = s.kernels.lends_grad_input = s.kernels.lends_grad_weight = true;
  for (const bool all : {false, true}) {
    s.grad_bias = s.smoothing = s.bias = all;
    if (all) s.sums = SumKind::maximum | SumKind::shifted | SumKind::weighted | SumKind::argmax;
    const double whole = on(hopper(), s).plan(3000 * MiB).seconds;
    for (uint64_t mib = 1960; mib < 2200; mib += 4) {
      EXPECT_LE(on(hopper(), s).plan(mib * MiB).seconds, 1.08 * whole) << mib << " MiB, " << all;
    }
  }
}

// On Hopper top-k stores blocks of logits, of whole tiles and all tokens of a chunk.
TEST(CudaPlan, TopKFitsItsBlocks) {
  const int64_t columns = sm90::tile.columns;
  for (const int64_t tokens : {0, 1, 8, 300, 2049, 8192, 70000}) {
    for (const int64_t vocab : {1, 1000, 151936}) {
      LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = 2048};
      s.listed = 20;
      s.sums = SumKind::above;
      const Asked asked = on(hopper(), s);
      const uint64_t least = asked.smallest().bytes, most = asked.recommended().bytes;
      EXPECT_LE(most, 160 * MiB);
      for (const uint64_t bytes : {least, (least + most) / 2, most}) {
        const LinearPlan p = asked.plan(bytes);
        EXPECT_LE(p.bytes, bytes);
        EXPECT_EQ(p.block_columns % columns, 0);
        EXPECT_GE(p.block_columns, columns);
        EXPECT_LE(p.block_columns, round_up(vocab, columns));
        EXPECT_EQ(p.block_rows, p.token_chunk);
        EXPECT_LE(p.block_rows, 4 * sm90::tile.rows);
        EXPECT_GT(p.bytes, uint64_t(4 * p.block_rows * p.block_columns));
      }
    }
  }
  LinearShape s{.tokens = 8192, .vocab = 151936, .hidden = 2048};
  s.listed = 20;
  s.sums = SumKind::above;
  EXPECT_LE(on(hopper(), s).plan(94 * MiB).seconds, 1.08 * on(hopper(), s).recommended().seconds);
}

void expect_covered(const Planned& planned) {
  const auto& [engine, s, p] = planned;
  const bool own = is_tiled(engine);
  EXPECT_GE(p.token_chunk * p.chunks, s.tokens);
  EXPECT_LE(p.block_rows, p.token_chunk);
  EXPECT_GE(s.hidden_pitch(), s.hidden);
  EXPECT_EQ(s.hidden_pitch() * size_of(s.dtype) % 16, 0);
  if (!s.gradients()) return;
  EXPECT_TRUE(p.stored_columns == s.vocab || p.remade_columns > 0);
  // A panel starts and ends at a segment of the partial sums, or at the end of the vocabulary.
  const int64_t segment =
      own ? static_cast<const tiled::TiledEngine&>(engine).tile().columns : segment_columns;
  EXPECT_TRUE(p.stored_columns == s.vocab || p.stored_columns % segment == 0);
  EXPECT_TRUE(kept_columns(p) == s.vocab || p.lent_columns % segment == 0);
  if (!own && p.remade_columns < s.vocab) {
    EXPECT_EQ(p.remade_columns % segment_columns, 0);
  }
  EXPECT_EQ(p.remade_columns % 64, 0);
  if (!s.forward) {
    EXPECT_EQ(kept_columns(p), s.kernels.kept == Origin::dz_in_panels ? 0 : s.kept_columns);
  }
}

TEST(CudaPlan, CoversEveryTokenAndColumn) {
  for (const Asked& whole : shapes()) {
    for (const uint64_t bytes : budgets(whole)) {
      for (const Planned& each : passes(whole, bytes)) expect_covered(each);
    }
  }
}

// Few columns and many tokens: two passes serve a small workspace, chunks a larger one.
TEST(CudaPlan, TwoPassesWhereTheSumsHaveNoRoom) {
  LinearShape s{.tokens = 20480, .vocab = 50257, .hidden = 768};
  s.grad_input = s.grad_weight = s.kernels.direct_grad_weight = s.kernels.plain = true;
  s.kernels.direct_grad_input = s.kernels.lends_grad_input = s.kernels.lends_grad_weight = true;
  const auto plan = [&](uint64_t mib) { return on(hopper(), s).plan(mib * MiB); };
  EXPECT_EQ(plan(124).kind, PlanKind::two_passes);
  EXPECT_GT(plan(124).first_rows, 0);
  EXPECT_EQ(plan(188).kind, PlanKind::chunks);
  EXPECT_GT(tiled::tiled_part(plan(188)).input_teams, 0);
  EXPECT_EQ(plan(2400).kind, PlanKind::whole);
  s.grad_bias = true;  // one pass must make all of grad_bias
  EXPECT_EQ(plan(124).first_rows, 0);
  s.kernels.lends_grad_weight = false;
  EXPECT_NE(plan(124).kind, PlanKind::two_passes);
}

// The largest vocabularies have ten million panels (planning visits one of each kind; visiting all
// takes minutes) and more tiles than 32 bits count. No plan is predicted to be faster than its
// three products.
TEST(CudaPlan, PlansAtAnyExtent) {
  for (const int64_t vocab : {int64_t{1} << 28, int64_t{1} << 30, (int64_t{1} << 31) - 65536}) {
    for (const int64_t tokens : {int64_t{1}, int64_t{8192}, int64_t{1} << 20}) {
      for (const int64_t hidden : {int64_t{8}, int64_t{4096}, int64_t{1} << 20}) {
        LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden};
        s.grad_input = s.grad_weight = s.kernels.direct_grad_input = true;
        s.kernels.lends_grad_input = s.kernels.lends_grad_weight = true;
        const LinearPlan least = on(hopper(), s).smallest();
        const double each = 2.0 * static_cast<double>(tokens) * static_cast<double>(vocab) *
                            static_cast<double>(hidden);
        for (const uint64_t bytes : {least.bytes, 2 * least.bytes, 8 * least.bytes}) {
          const LinearPlan p = on(hopper(), s).plan(bytes);
          EXPECT_LE(p.bytes, bytes);
          EXPECT_GT(p.seconds, 0.999 * 3 * each / DeviceSpeed{}.products)
              << tokens << " x " << vocab << " x " << hidden;
        }
      }
    }
  }
}

TEST(CudaPlan, TheFrontierHasAllItsPlans) {
  LinearShape s{.tokens = 8192, .vocab = 128256, .hidden = 4096};
  EXPECT_EQ(on(portable(), s).recommended().kind, PlanKind::loss_only);
  s.grad_input = s.grad_weight = true;
  std::set<PlanKind> kinds;
  for (const uint64_t mib : {256, 512, 1024, 1536, 2200}) {
    kinds.insert(on(portable(), s).plan(mib * MiB).kind);
  }
  EXPECT_TRUE(kinds.contains(PlanKind::frugal));
  EXPECT_TRUE(kinds.contains(PlanKind::mixed));
  EXPECT_TRUE(kinds.contains(PlanKind::whole));
  s.grad_weight_f32 = true;  // chunks add to the output itself
  EXPECT_EQ(on(portable(), s).plan(1280 * MiB).kind, PlanKind::chunks);
}

// The recommended workspace is a quarter of the f32 logits plus the f32 sums of the gradients, or,
// if that is predicted to be over 3 % faster, what torch.compile takes.
TEST(CudaPlan, TheRecommendedKeepsThePromiseOfTheName) {
  int small = 0, large = 0;
  for (const Asked& asked : shapes()) {
    const LinearShape& s = asked.shape;
    const uint64_t logits = uint64_t(s.tokens) * s.vocab;
    const uint64_t input = s.grad_input ? uint64_t(s.tokens) * s.hidden * 4 : 0;
    const bool sums_weight = s.grad_weight && !(s.kernels.direct_grad_weight && s.grad_weight_f32);
    const uint64_t weight = sums_weight ? uint64_t(s.vocab) * s.hidden * 4 : 0;
    const uint64_t copies = s.copies_weight ? uint64_t(s.vocab) * (s.hidden + 8) * 4 : 0;
    const uint64_t quarter =
        std::max(asked.smallest().bytes, logits + input + weight + copies + 16 * MiB);
    const uint64_t whole = logits * size_of(s.dtype) + input + 64 * MiB;
    const LinearPlan recommended = asked.recommended();
    if (recommended.bytes <= quarter) {
      ++small;
      if (whole <= quarter) continue;
      EXPECT_LE(recommended.seconds, 1.03 * asked.settled(whole).seconds);
    } else {
      ++large;
      EXPECT_LE(recommended.bytes, whole);
      EXPECT_GT(asked.settled(quarter).seconds, 1.03 * recommended.seconds);
    }
  }
  EXPECT_TRUE(small > 20 && large > 5) << small << ", " << large;
}

// `run` plans again, with the bytes that `workspace` returned.
TEST(CudaPlan, TheRecommendedBytesGiveThatTime) {
  for (const Asked& call : shapes()) {
    const LinearPlan asked = call.recommended(), ran = call.plan(asked.bytes);
    // The plans may differ by a tile of E in exchange for slots of slices.
    EXPECT_LE(ran.seconds, asked.seconds * 1.001);
    EXPECT_LE(ran.bytes, asked.bytes);
  }
}

// Gemma 3 1B's grad_input has 48 tiles for 66 clusters: without slices 18 clusters idle, and two
// slices are no faster. For other heads two slots per cluster are enough.
TEST(CudaPlan, FewTilesHaveSlotsForFourSlices) {
  const auto slots = [](int64_t tokens, int64_t hidden) {
    LinearShape s{.tokens = tokens, .vocab = 262144, .hidden = hidden};
    s.kernels.plain = true;
    s.grad_input = s.grad_weight = s.kernels.direct_grad_input = s.kernels.direct_grad_weight =
        true;
    s.kernels.lends_grad_input = s.kernels.lends_grad_weight = true;
    return tiled::tiled_part(on(hopper(), s).recommended()).slots;
  };
  EXPECT_EQ(slots(4096, 1152), 4 * 48);
  EXPECT_EQ(slots(4096, 768), 2 * 32);
  for (const int64_t hidden : {1152, 1536, 2304, 4096}) {
    EXPECT_LE(slots(8192, hidden), 2 * 66) << hidden;
  }
}

// A Backward from kept state computes no logits, but lends their block to cuBLASLt for the parts of
// grad_input's split depth: at GPT-2's sizes, not at a hidden size of 4096.
TEST(CudaPlan, BackwardOfKeptStateHasRoomForPartsInF32) {
  const auto lends = [](int64_t tokens, int64_t hidden) {
    LinearShape s{.tokens = tokens, .vocab = 50257, .hidden = hidden, .dtype = DType::f32};
    s.forward = false;
    s.grad_input = s.grad_weight = s.kernels.direct_grad_weight = s.on_cuda_cores = true;
    s.kept_columns = s.vocab;
    const LinearPlan p = on(portable(), s).recommended();
    return lends_block(s, p) && p.block_rows * p.block_columns >= tokens * hidden;
  };
  for (const int64_t tokens : {64, 512, 1024, 4096}) EXPECT_TRUE(lends(tokens, 768)) << tokens;
  EXPECT_TRUE(lends(2048, 1600));
  EXPECT_FALSE(lends(2048, 4096));
}

// The heads of docs/results.md take one chunk, so that a single launch reads the weight.
TEST(CudaPlan, TheLossAloneTakesAllTokensAtOnceInSixteenMebibytes) {
  for (const auto& [tokens, vocab, hidden] : {std::array<int64_t, 3>{8192, 128256, 4096},
                                              {8192, 151936, 2048},
                                              {8192, 256000, 2304},
                                              {4096, 129280, 7168},
                                              {20480, 50257, 768}}) {
    LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden};
    s.kernels.plain = s.kernels.reads_input = true;
    const LinearPlan p = on(hopper(), s).plan(16 * MiB);
    EXPECT_LE(p.bytes, 16 * MiB);
    EXPECT_EQ(p.chunks, 1);
    EXPECT_FALSE(p.copies_input);
    // The recommended plan has room for a compacted input, which the tensor memory accelerator
    // loads faster.
    const LinearPlan recommended = on(hopper(), s).recommended();
    EXPECT_EQ(recommended.chunks, 1);
    EXPECT_TRUE(recommended.copies_input);
  }
}

}  // namespace
}  // namespace logitless::cuda
