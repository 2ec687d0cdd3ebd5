// SPDX-License-Identifier: Apache-2.0
// The plans of the linear ops on CUDA: arithmetic that needs no GPU.
#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "src/cuda/linear.h"
#include "src/cuda/plan.h"
#include "src/cuda/sm90/forward.h"

namespace logitless::cuda {
namespace {

constexpr uint64_t MiB = uint64_t{1} << 20;

std::vector<LinearShape> shapes() {
  std::vector<LinearShape> all;
  for (const bool fused : {false, true}) {
    for (const auto& [tokens, vocab, hidden] : {std::array<int64_t, 3>{8192, 128256, 4096},
                                                {20480, 50257, 768},
                                                {0, 7, 3},
                                                {1, 1, 1},
                                                {1, 128256, 4096},
                                                {513, 1025, 40},
                                                {4096, 129280, 7168}}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden, .dtype = dtype};
        s.fused = fused && dtype != DType::f32;
        s.can_store = dtype != DType::f16;
        all.push_back(s);
        s.plain = s.fused;
        all.push_back(s);
        s.reads_input = s.fused;
        all.push_back(s);
        s.reads_input = false;
        s.grad_input = s.grad_weight = true;
        all.push_back(s);
        s.lends_grad_weight = s.fused;
        all.push_back(s);
        s.grad_weight_f32 = true;
        all.push_back(s);
        s.grad_weight_f32 = s.lends_grad_weight = false;
        s.grad_bias = s.smoothing = s.weighted_sum = s.entropy = s.argmax = true;
        s.direct_grad_weight = s.fused = s.plain = false;
        s.copies_weight = true;
        all.push_back(s);
      }
    }
  }
  return all;
}

uint64_t bytes_of(const LinearShape& s, const LinearPlan& p) {
  Arena arena;
  place_linear(s, p, &arena);
  return arena.used();
}

std::vector<uint64_t> budgets(const LinearShape& s) {
  const uint64_t least = smallest_plan(s, {}).bytes;
  const uint64_t whole = least + uint64_t(s.tokens + 64) * (s.vocab + 64) * 4 + 64 * MiB;
  std::vector<uint64_t> all;
  for (int i = 0; i < 12; ++i) all.push_back(least + (whole - least) * i * i / 121);
  return all;
}

// The call and its plan; those of both of two passes.
struct Planned {
  LinearShape shape;
  LinearPlan plan;
};
std::vector<Planned> passes(const LinearShape& s, uint64_t bytes) {
  const LinearPlan p = plan_linear(s, {}, bytes);
  if (p.kind != PlanKind::two_passes) return {{s, p}};
  std::vector<Planned> both;
  for (const LinearShape& pass : {first_pass(s, p.first_rows), second_pass(s, p.first_rows)}) {
    both.push_back({pass, plan_linear(pass, {}, bytes - state_bytes(s))});
  }
  return both;
}

// No axis of a grid but the first takes more than 65535 blocks: 8.4 million columns of 128 a block.
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
  for (const LinearShape& s : shapes()) {
    for (const uint64_t bytes : budgets(s)) {
      const LinearPlan p = plan_linear(s, {}, bytes);
      EXPECT_LE(p.bytes, bytes);
      uint64_t used = 0;
      for (const Planned& each : passes(s, bytes)) {
        EXPECT_EQ(each.plan.bytes, bytes_of(each.shape, each.plan));
        used = std::max(used, each.plan.bytes);
      }
      if (p.kind == PlanKind::two_passes) used += state_bytes(s);
      EXPECT_EQ(p.bytes, used);
    }
  }
}

TEST(CudaPlan, MoreMemoryNeverTakesLonger) {
  for (const LinearShape& s : shapes()) {
    double before = plan_linear(s, {}, budgets(s).front()).seconds;
    for (const uint64_t bytes : budgets(s)) {
      const double now = plan_linear(s, {}, bytes).seconds;
      // The share of E is the largest that fits: one that fills its waves better may be passed by.
      EXPECT_LE(now, before * 1.05) << bytes;
      before = std::min(before, now);
    }
  }
}

// Just below what the whole of E takes, nearly all of it is kept; also where statistics take memory
// that only the whole needs beside it.
TEST(CudaPlan, TheStepToTheWholeIsSmall) {
  LinearShape s{.tokens = 8192, .vocab = 128256, .hidden = 4096};
  s.grad_input = s.grad_weight = s.direct_grad_weight = s.fused = true;
  s.direct_grad_input = s.lends_grad_input = s.lends_grad_weight = true;
  for (const bool all : {false, true}) {
    s.grad_bias = s.smoothing = s.entropy = s.weighted_sum = s.argmax = s.bias = all;
    const double whole = plan_linear(s, {}, 3000 * MiB).seconds;
    for (uint64_t mib = 1960; mib < 2200; mib += 4) {
      EXPECT_LE(plan_linear(s, {}, mib * MiB).seconds, 1.08 * whole) << mib << " MiB, " << all;
    }
  }
}

void expect_covered(const LinearShape& s, const LinearPlan& p) {
  EXPECT_GE(p.token_chunk * p.chunks, s.tokens);
  EXPECT_LE(p.block_rows, p.token_chunk);
  EXPECT_GE(p.hidden_pitch, s.hidden);
  EXPECT_EQ(p.hidden_pitch * size_of(s.dtype) % 16, 0);
  if (!s.gradients()) return;
  EXPECT_TRUE(p.stored_columns == s.vocab || p.remade_columns > 0);
  // A panel starts and ends with a segment of the partial sums, or with the vocabulary.
  const int64_t segment = s.fused ? sm90::sum_columns : segment_columns;
  EXPECT_TRUE(p.stored_columns == s.vocab || p.stored_columns % segment == 0);
  EXPECT_EQ(p.lent_columns % segment, 0);
  if (!s.fused && p.remade_columns < s.vocab) {
    EXPECT_EQ(p.remade_columns % segment_columns, 0);
  }
  EXPECT_EQ(p.remade_columns % 64, 0);
  if (!s.can_store) {
    EXPECT_EQ(kept_columns(p), 0);
  }
}

TEST(CudaPlan, CoversEveryTokenAndColumn) {
  for (const LinearShape& whole : shapes()) {
    for (const uint64_t bytes : budgets(whole)) {
      for (const auto& [s, p] : passes(whole, bytes)) expect_covered(s, p);
    }
  }
}

// Rows of grad_weight are written in order; what lies in its memory must still lie behind them.
struct Lent {
  int64_t panels = 0, kept = 0, sums = 0;
};
void count_lent(const LinearShape& s, const LinearPlan& p, Lent* lent) {
  const int64_t row = s.hidden * (s.grad_weight_f32 ? 4 : 2);
  for (PanelPlace at; at.end() < s.vocab;) {
    const int64_t done = at.end();
    at = panel_at(s, p, done);
    ASSERT_EQ(at.first, done);
    ASSERT_GT(at.columns, 0);
    EXPECT_EQ(at.end() <= kept_columns(p), at.first < kept_columns(p));
    if (!at.lent) {
      EXPECT_LE(at.columns, std::max(p.stored_columns, p.remade_columns));
      continue;
    }
    ASSERT_TRUE(s.lends_grad_weight && p.chunks == 1);
    const int64_t begin = lent_panel(s, p, at.columns);
    EXPECT_GE(begin, at.end() * row);
    EXPECT_LE(begin + panel_rows(s, p) * at.columns * 2, s.vocab * row);
    EXPECT_EQ(begin % 128, 0);
    lent->panels += at.columns;
  }
  EXPECT_LE(p.lent_sum_rows * p.hidden_pitch * 4, s.lends_grad_weight ? s.vocab * row : 0);
  lent->sums += p.lent_sum_rows;
  const int64_t scaled = lent_scaled_input(s, p);
  if (!scales_apart(s, p) || scaled < 0) {
    EXPECT_EQ(p.lent_columns, 0);
    return;
  }
  EXPECT_GE(scaled, kept_columns(p) * row);
  const int64_t end = p.lent_columns > 0 ? lent_panel(s, p, p.lent_columns) : s.vocab * row;
  EXPECT_LE(scaled + panel_rows(s, p) * p.hidden_pitch * 2, end);
  lent->kept += p.lent_columns;
}
TEST(CudaPlan, WhatIsLentIsFree) {
  Lent lent;
  for (const LinearShape& whole : shapes()) {
    if (!whole.fused || !whole.gradients()) continue;
    for (const uint64_t bytes : budgets(whole)) {
      for (const auto& [s, p] : passes(whole, bytes)) count_lent(s, p, &lent);
    }
  }
  EXPECT_GT(lent.panels, lent.kept);
  EXPECT_GT(lent.kept, 0);
  EXPECT_GT(lent.sums, 0);
}

// Rows of sums in f32 in memory that holds half as many: each becomes its row of 16 bits there, and
// none is written over before it was read.
TEST(CudaPlan, LentSumsLeaveTheirMemoryInPieces) {
  for (const int64_t rows : {1, 2, 3, 7, 64, 1000}) {
    for (const int64_t in_place_of_e : {1, 2, 5, 63, 64, 5000}) {
      const int64_t lent = rows / 2;
      std::vector<int64_t> halves(static_cast<size_t>(2 * rows), -1);  // two a row of sums
      for (int64_t i = 0; i < lent; ++i) halves[2 * i] = halves[2 * i + 1] = i;
      int64_t done = 0;
      for_lent_pieces(lent, in_place_of_e, [&](int64_t first, int64_t count) {
        EXPECT_EQ(first, done);
        ASSERT_GT(count, 0);
        EXPECT_LE(count, first == 0 ? in_place_of_e : first);
        for (int64_t i = first; i < first + count; ++i) {  // all are read ...
          ASSERT_EQ(halves[2 * i], i);
          ASSERT_EQ(halves[2 * i + 1], i);
        }
        if (first > 0) {  // ... while some are written, unless they lie elsewhere
          EXPECT_LE(first + count, 2 * first);
        }
        for (int64_t i = first; i < first + count; ++i) halves[i] = 1000000 + i;
        done += count;
      });
      EXPECT_EQ(done, lent);
      for (int64_t i = 0; i < lent; ++i) EXPECT_EQ(halves[i], 1000000 + i);
    }
  }
}

// Heads of few columns and many tokens: whatever lies between the least and the whole is filled.
TEST(CudaPlan, TwoPassesWhereTheSumsHaveNoRoom) {
  LinearShape s{.tokens = 20480, .vocab = 50257, .hidden = 768};
  s.grad_input = s.grad_weight = s.direct_grad_weight = s.fused = s.plain = true;
  s.direct_grad_input = s.lends_grad_input = s.lends_grad_weight = true;
  const auto plan = [&](uint64_t mib) { return plan_linear(s, {}, mib * MiB); };
  EXPECT_EQ(plan(124).kind, PlanKind::two_passes);
  EXPECT_GT(plan(124).first_rows, 0);
  EXPECT_EQ(plan(188).kind, PlanKind::chunks);
  EXPECT_GT(plan(188).input_clusters, 0);
  EXPECT_EQ(plan(2400).kind, PlanKind::whole);
  s.grad_bias = true;  // which one pass makes
  EXPECT_EQ(plan(124).first_rows, 0);
  s.lends_grad_weight = false;
  EXPECT_NE(plan(124).kind, PlanKind::two_passes);
}

// The cost model takes panels that are alike at once: it must see each of them.
void expect_alike(const LinearShape& s, const LinearPlan& p, int64_t* lent, int64_t* remade) {
  for (int64_t first = 0; first < s.vocab;) {
    const PanelPlace at = panel_at(s, p, first);
    const int64_t count = panels_like(s, p, at);
    ASSERT_GE(count, 1);
    for (int64_t n = 0; n < count; ++n, first += at.columns) {
      const PanelPlace one = panel_at(s, p, first);
      ASSERT_EQ(one.columns, at.columns);
      ASSERT_EQ(one.lent, at.lent);
    }
    if (first < s.vocab) {
      const PanelPlace next = panel_at(s, p, first);
      EXPECT_TRUE(next.columns != at.columns || next.lent != at.lent || at.first < kept_columns(p));
    }
    if (count > 1) *(at.lent ? lent : remade) += count;
  }
}
TEST(CudaPlan, PanelsThatAreAlikeFollowEachOther) {
  int64_t lent = 0, remade = 0;
  for (const LinearShape& whole : shapes()) {
    if (!whole.fused || !whole.gradients()) continue;
    for (const uint64_t bytes : budgets(whole)) {
      for (const auto& [s, p] : passes(whole, bytes)) expect_alike(s, p, &lent, &remade);
    }
  }
  EXPECT_GT(lent, 0);
  EXPECT_GT(remade, 0);
}

// The largest vocabularies: ten million panels, of which planning walks only the kinds (walked one
// by one this test alone takes minutes), and more tiles than 32 bits count. No plan is predicted
// to be quicker than its three products.
TEST(CudaPlan, PlansAtAnyExtent) {
  for (const int64_t vocab : {int64_t{1} << 28, int64_t{1} << 30, (int64_t{1} << 31) - 65536}) {
    for (const int64_t tokens : {int64_t{1}, int64_t{8192}, int64_t{1} << 20}) {
      for (const int64_t hidden : {int64_t{8}, int64_t{4096}, int64_t{1} << 20}) {
        LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden};
        s.grad_input = s.grad_weight = s.direct_grad_input = s.fused = true;
        s.lends_grad_input = s.lends_grad_weight = true;
        const LinearPlan least = smallest_plan(s, {});
        const double each = 2.0 * static_cast<double>(tokens) * static_cast<double>(vocab) *
                            static_cast<double>(hidden);
        for (const uint64_t bytes : {least.bytes, 2 * least.bytes, 8 * least.bytes}) {
          const LinearPlan p = plan_linear(s, {}, bytes);
          EXPECT_LE(p.bytes, bytes);
          EXPECT_GT(p.seconds, 0.999 * 3 * each / DeviceSpeed{}.products)
              << tokens << " x " << vocab << " x " << hidden;
        }
      }
    }
  }
}

// Llama-3 in 64 MiB beyond the sum of grad_input: a third of E lies in grad_weight, and the panels
// that are made again are few.
TEST(CudaPlan, GradWeightSparesWork) {
  LinearShape s{.tokens = 8192, .vocab = 128256, .hidden = 4096};
  s.grad_input = s.grad_weight = s.direct_grad_weight = s.fused = true;
  s.direct_grad_input = s.lends_grad_input = true;
  const LinearPlan alone = plan_linear(s, {}, 192 * MiB);
  s.lends_grad_weight = true;
  const LinearPlan lent = plan_linear(s, {}, 192 * MiB);
  EXPECT_GT(kept_columns(lent), 30000);
  EXPECT_LT(lent.seconds, 0.93 * alone.seconds);
  int panels = 0;
  for (PanelPlace at; at.end() < s.vocab; ++panels) at = panel_at(s, lent, at.end());
  EXPECT_LE(panels, 12);
}

TEST(CudaPlan, TheFrontierHasAllItsPlans) {
  LinearShape s{.tokens = 8192, .vocab = 128256, .hidden = 4096};
  EXPECT_EQ(recommended_plan(s, {}).kind, PlanKind::loss_only);
  s.grad_input = s.grad_weight = true;
  std::set<PlanKind> kinds;
  for (const uint64_t mib : {256, 512, 1024, 1536, 2200}) {
    kinds.insert(plan_linear(s, {}, mib * MiB).kind);
  }
  EXPECT_TRUE(kinds.contains(PlanKind::frugal));
  EXPECT_TRUE(kinds.contains(PlanKind::mixed));
  EXPECT_TRUE(kinds.contains(PlanKind::whole));
  s.grad_weight_f32 = true;  // chunks add to the output itself
  EXPECT_EQ(plan_linear(s, {}, 1280 * MiB).kind, PlanKind::chunks);
}

TEST(CudaPlan, TheRecommendedKeepsThePromiseOfTheName) {
  for (const LinearShape& s : shapes()) {
    const uint64_t logits = uint64_t(s.tokens) * s.vocab * 4;
    const uint64_t sums = uint64_t(s.tokens) * s.hidden * 4 + uint64_t(s.vocab) * s.hidden * 4;
    const uint64_t copies = s.copies_weight ? uint64_t(s.vocab) * (s.hidden + 8) * 4 : 0;
    const uint64_t limit =
        std::max(smallest_plan(s, {}).bytes, logits / 4 + sums + copies + 16 * MiB);
    EXPECT_LE(recommended_plan(s, {}).bytes, limit);
  }
}

// `run` plans anew, with the bytes that `workspace` named.
TEST(CudaPlan, TheRecommendedBytesGiveThatTime) {
  for (const LinearShape& s : shapes()) {
    const LinearPlan asked = recommended_plan(s, {}), ran = plan_linear(s, {}, asked.bytes);
    // A tile of E more or less, where slots of slices took its place.
    EXPECT_LE(ran.seconds, asked.seconds * 1.001);
    EXPECT_LE(ran.bytes, asked.bytes);
  }
}

// The heads that are measured (docs/results.md): one chunk, so that the weight is read by one
// launch.
TEST(CudaPlan, TheLossAloneTakesAllTokensAtOnceInSixteenMebibytes) {
  for (const auto& [tokens, vocab, hidden] : {std::array<int64_t, 3>{8192, 128256, 4096},
                                              {8192, 151936, 2048},
                                              {8192, 256000, 2304},
                                              {4096, 129280, 7168},
                                              {20480, 50257, 768}}) {
    LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden};
    s.fused = s.plain = s.reads_input = true;
    const LinearPlan p = plan_linear(s, {}, 16 * MiB);
    EXPECT_LE(p.bytes, 16 * MiB);
    EXPECT_EQ(p.chunks, 1);
    EXPECT_FALSE(p.copies_input);
    // With room for the rows that count, which the copy engine brings faster.
    const LinearPlan recommended = recommended_plan(s, {});
    EXPECT_EQ(recommended.chunks, 1);
    EXPECT_TRUE(recommended.copies_input);
  }
}

}  // namespace
}  // namespace logitless::cuda
