// SPDX-License-Identifier: Apache-2.0
// Where CUDA's linear ops put E, dz and sums in the workspace and in grad_weight's own memory;
// needs no GPU.
#include <algorithm>
#include <vector>

#include "gtest/gtest.h"
#include "shapes.h"
#include "src/cuda/linear/plan_search.h"
#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/tiled/panels.h"

namespace logitless::cuda {
namespace {

// How much was found in grad_weight's memory. Its rows are written in order, so everything else
// there must lie after the rows already written.
struct Lent {
  int64_t panels = 0, in_place = 0, copied = 0, whole = 0, some = 0, sums = 0;
};
int64_t weight_row(const LinearShape& s) { return s.hidden * (s.grad_weight_f32 ? 4 : 2); }
int64_t panel_end(const LinearShape& s, const LinearPlan& p, const PanelPlace& at) {
  return tiled::lent_offset(s, p, at) + p.panel_rows * round_up(at.columns, 64) * 2;
}

// Checks that kept E is read out of grad_weight's memory before rows overwrite it.
void count_kept(const LinearShape& s, const LinearPlan& p, Lent* lent) {
  const int64_t row = weight_row(s), kept = kept_columns(p);
  const int64_t scaled = tiled::tiled_part(p).lent_scaled;
  const PanelPlace all{.first = p.stored_columns, .columns = p.lent_columns, .lent = true};
  if (p.lent_columns > 0) {
    ASSERT_TRUE(s.kernels.lends_grad_weight && p.chunks == 1);
    EXPECT_GE(tiled::lent_offset(s, p, all), p.stored_columns * row);
    EXPECT_EQ(tiled::lent_offset(s, p, all) % 128, 0);
    EXPECT_LE(panel_end(s, p, all), scaled < 0 ? s.vocab * row : scaled);
    EXPECT_TRUE(scaled >= 0 || !scales_apart(s, p));
  }
  if (scaled >= 0) {
    EXPECT_GE(scaled, kept * row);
    EXPECT_LE(scaled + p.panel_rows * s.hidden_pitch() * 2, s.vocab * row);
  }
  for (PanelPlace at; at.end() < kept;) {
    const int64_t done = at.end();
    at = tiled::kept_part_at(s, p, done);
    ASSERT_EQ(at.first, done);
    ASSERT_GT(at.columns, 0);
    ASSERT_LE(at.end(), kept);
    if (at.copied) {
      EXPECT_LE(at.columns, std::max(p.stored_columns, p.remade_columns));
    }
    EXPECT_EQ(at.lent, at.first >= p.stored_columns);
    EXPECT_EQ(at.kept, !at.lent && s.kept_columns > 0);  // then in the caller's memory
    const int64_t asked = at.copied ? at.end() : std::max(at.first, p.stored_columns);
    if (asked < kept) {
      EXPECT_LE(at.end() * row,
                tiled::lent_offset(s, p, {.first = asked, .columns = kept - asked, .lent = true}));
    }
    if (at.lent) (at.copied ? lent->copied : lent->in_place) += at.columns;
  }
  (kept == s.vocab ? lent->whole : lent->some) += p.lent_columns;
}

void count_lent(const LinearShape& s, const LinearPlan& p, Lent* lent) {
  const int64_t row = weight_row(s);
  count_kept(s, p, lent);
  for (PanelPlace at{.columns = kept_columns(p)}; at.end() < s.vocab;) {
    const int64_t done = at.end();
    at = tiled::panel_at(s, p, done);
    ASSERT_EQ(at.first, done);
    ASSERT_GT(at.columns, 0);
    if (!at.lent) {
      EXPECT_LE(at.columns, std::max(p.stored_columns, p.remade_columns));
      continue;
    }
    ASSERT_TRUE(s.kernels.lends_grad_weight && p.chunks == 1);
    EXPECT_GE(tiled::lent_offset(s, p, at), at.end() * row);
    EXPECT_LE(panel_end(s, p, at), s.vocab * row);
    EXPECT_EQ(tiled::lent_offset(s, p, at) % 128, 0);
    lent->panels += at.columns;
  }
  EXPECT_LE(p.lent_sum_rows * s.hidden_pitch() * 4,
            s.kernels.lends_grad_weight ? s.vocab * row : 0);
  lent->sums += p.lent_sum_rows;
}
TEST(CudaPanels, WhatIsLentIsFree) {
  Lent lent;
  for (const Asked& whole : shapes()) {
    if (!is_tiled(whole.engine) || !whole.shape.gradients()) continue;
    for (const uint64_t bytes : budgets(whole)) {
      for (const auto& [engine, s, p] : passes(whole, bytes)) count_lent(s, p, &lent);
    }
  }
  for (const int64_t columns :
       {lent.panels, lent.in_place, lent.copied, lent.whole, lent.some, lent.sums}) {
    EXPECT_GT(columns, 0);
  }
}

// Widths of E against widths of rows: columns that take less memory than a row, as much, or a
// little more, for many sizes.
TEST(CudaPanels, KeptColumnsLeaveGradWeightInTime) {
  Lent lent;
  for (const int64_t vocab : {1, 63, 192, 193, 1000, 12001, 12032, 50257}) {
    for (const int64_t hidden : {8, 64, 72, 120, 128, 136, 264, 512}) {
      for (const int64_t tokens : {1, 60, 64, 120, 128, 200, 500}) {
        LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden};
        s.grad_input = s.grad_weight = true;
        s.kernels.direct_grad_input = s.kernels.lends_grad_input = s.kernels.lends_grad_weight =
            true;
        for (const bool more : {false, true}) {
          s.grad_weight_f32 = more;
          s.kernels.kept = more ? Origin::dz_in_place : Origin::e;
          LinearPlan p{
              .token_chunk = round_up(tokens, 8), .chunks = 1, .panel_rows = round_up(tokens, 64)};
          tiled::TiledPart& own = tiled::tiled_part(p) = {.tile = &sm90::tile};
          for (const int64_t stored : {0, 192, 384, 3840}) {
            if (stored >= vocab) continue;
            p.stored_columns = stored;
            p.remade_columns = std::max<int64_t>(stored, 192);
            for (const bool copies : {false, true}) {
              own.copies_lent = copies;
              p.lent_columns = tiled::most_lent_columns(s, p);
              settle(s, &p);
              own.lent_scaled = tiled::lent_scaled_input(s, p);
              count_kept(s, p, &lent);
            }
          }
        }
      }
    }
  }
  for (const int64_t columns : {lent.in_place, lent.copied, lent.whole, lent.some}) {
    EXPECT_GT(columns, 0);
  }
}

// A memory of 16-bit rows holds the f32 sums of half as many rows. Each is rounded to its 16-bit
// row there, and none is overwritten before it is read.
TEST(CudaPanels, LentSumsLeaveTheirMemoryInPieces) {
  for (const int64_t rows : {1, 2, 3, 7, 64, 1000}) {
    for (const int64_t in_place_of_e : {1, 2, 5, 63, 64, 5000}) {
      const int64_t lent = rows / 2;
      // one row of f32 sums covers two rows of 16 bits
      std::vector<int64_t> halves(static_cast<size_t>(2 * rows), -1);
      for (int64_t i = 0; i < lent; ++i) halves[2 * i] = halves[2 * i + 1] = i;
      int64_t done = 0;
      for_lent_pieces(lent, in_place_of_e, [&](int64_t first, int64_t count) {
        EXPECT_EQ(first, done);
        ASSERT_GT(count, 0);
        EXPECT_LE(count, first == 0 ? in_place_of_e : first);
        for (int64_t i = first; i < first + count; ++i) {  // all rows of the piece are read first
          ASSERT_EQ(halves[2 * i], i);
          ASSERT_EQ(halves[2 * i + 1], i);
        }
        if (first > 0) {  // the first piece is copied out, later ones are not
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

// The cost model prices equal panels together, and must count each of them.
void expect_alike(const LinearShape& s, const LinearPlan& p, int64_t* lent, int64_t* remade) {
  for (int64_t first = kept_columns(p); first < s.vocab;) {
    const PanelPlace at = tiled::panel_at(s, p, first);
    const int64_t count = tiled::panels_like(s, p, at);
    ASSERT_GE(count, 1);
    for (int64_t n = 0; n < count; ++n, first += at.columns) {
      const PanelPlace one = tiled::panel_at(s, p, first);
      ASSERT_EQ(one.columns, at.columns);
      ASSERT_EQ(one.lent, at.lent);
    }
    if (first < s.vocab) {
      const PanelPlace next = tiled::panel_at(s, p, first);
      EXPECT_TRUE(next.columns != at.columns || next.lent != at.lent);
    }
    if (count > 1) *(at.lent ? lent : remade) += count;
  }
}
TEST(CudaPanels, PanelsThatAreAlikeFollowEachOther) {
  int64_t lent = 0, remade = 0;
  for (const Asked& whole : shapes()) {
    if (!is_tiled(whole.engine) || !whole.shape.gradients()) continue;
    for (const uint64_t bytes : budgets(whole)) {
      for (const auto& [engine, s, p] : passes(whole, bytes)) expect_alike(s, p, &lent, &remade);
    }
  }
  EXPECT_GT(lent, 0);
  EXPECT_GT(remade, 0);
}

// The search must not drop a way to keep E because another seems better. Keeping E of all columns
// may fit only with grad_input's sums in the forward's memory; keeping only columns that need no
// copy may be faster; and a slightly slower plan may need much less memory.
TEST(CudaPanels, NoWayToKeepEStandsInAnothers) {
  LinearShape s{.tokens = 1024, .vocab = 129280, .hidden = 768};
  s.grad_input = s.grad_weight = s.kernels.plain = true;
  s.kernels.direct_grad_input = s.kernels.lends_grad_input = s.kernels.lends_grad_weight =
      s.grad_weight_f32 = true;
  const LinearPlan summed = on(hopper(), s).plan(6050000);
  EXPECT_EQ(summed.chunks, 1);
  EXPECT_EQ(kept_columns(summed), s.vocab);
  EXPECT_TRUE(sums_grad_input(s, summed));
  s.vocab = 151936, s.hidden = 1024;
  s.grad_input = s.kernels.direct_grad_input = s.kernels.lends_grad_input = s.grad_weight_f32 =
      false;
  EXPECT_LT(on(hopper(), s).plan(8660000).seconds, 2e-3);
  s.tokens = 8192, s.vocab = 50304, s.hidden = 4096;
  s.grad_input = s.kernels.direct_grad_input = s.kernels.lends_grad_input = true;
  EXPECT_LT(on(hopper(), s).smallest().bytes, 110e6);
}

// Llama-3 with 64 MiB beyond the sum of grad_input: over 30,000 columns of E are kept thanks to
// grad_weight's memory, and few panels are recomputed.
TEST(CudaPanels, GradWeightSparesWork) {
  LinearShape s{.tokens = 8192, .vocab = 128256, .hidden = 4096};
  s.grad_input = s.grad_weight = s.kernels.direct_grad_weight = true;
  s.kernels.direct_grad_input = s.kernels.lends_grad_input = true;
  const LinearPlan alone = on(hopper(), s).plan(192 * MiB);
  s.kernels.lends_grad_weight = true;
  const LinearPlan lent = on(hopper(), s).plan(192 * MiB);
  EXPECT_GT(kept_columns(lent), 30000);
  EXPECT_LT(lent.seconds, 0.93 * alone.seconds);
  int panels = 0;
  for (PanelPlace at{.columns = kept_columns(lent)}; at.end() < s.vocab; ++panels) {
    at = tiled::panel_at(s, lent, at.end());
  }
  EXPECT_LE(panels, 10);
}

}  // namespace
}  // namespace logitless::cuda
