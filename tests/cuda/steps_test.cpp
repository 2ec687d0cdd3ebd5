// SPDX-License-Identifier: Apache-2.0
// The steps of plans on CUDA: each chunk of tokens comes once, every product covers every column
// once and reads only what an earlier step made, and a plan's seconds are the sum of its steps'.
#include <algorithm>
#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "shapes.h"
#include "src/cuda/linear/parts.h"
#include "src/cuda/linear/tiled/cut.h"
#include "src/cuda/linear/tiled/teams.h"

namespace logitless::cuda {
namespace {

// Collects every step; a repeated step is visited each time.
class AllSteps final : public StepVisitor {
 public:
  explicit AllSteps(const Planned& planned) {
    planned.engine.for_steps(planned.shape, planned.plan, this);
  }
  void visit(const Step& step) override { steps.push_back(step); }
  int64_t begin_repeat(int64_t count) override { return count; }
  void end_repeat(int64_t) override {}
  std::vector<Step> steps;
};

// Checks that columns follow each other without a gap.
struct Covered {
  int64_t first = -1, end = 0;
  void add(int64_t from, int64_t count) {
    if (first < 0) first = end = from;
    EXPECT_EQ(from, end) << "a gap, or columns twice";
    end = from + count;
  }
  void expect(int64_t from, int64_t to) const {
    EXPECT_EQ(first, from);
    EXPECT_EQ(end, to);
  }
};

// Adds up what a chunk's steps cover.
class ChunkJudge {
 public:
  ChunkJudge(const Engine& engine, const LinearShape& shape, const LinearPlan& plan)
      : s_(shape), p_(plan) {
    if (is_tiled(engine)) {
      tile_columns_ = static_cast<const tiled::TiledEngine&>(engine).tile().columns;
    }
    // Backward's kept state is in the caller's memory
    if (!s_.forward && !in_panels()) kept_ = s_.kept_columns;
  }
  void take(const Step& step) {
    const int64_t columns = step.columns();
    switch (step.kind) {
      case StepKind::logits:
        logits_.add(step.panel.first, columns);
        EXPECT_EQ(step.panel.first % tile_columns_, 0);
        if (is_kept(step.panel.origin))
          kept_ = std::min(step.panel.first + columns, kept_columns(p_));
        break;
      case StepKind::states:
        had_states_ = true;
        break;
      case StepKind::remake:
        EXPECT_TRUE(had_states_);
        EXPECT_GE(step.panel.first, std::max(kept_, in_panels() ? s_.kept_columns : 0));
        remade_ = step.panel;
        break;
      case StepKind::form_panel:
        EXPECT_TRUE(had_states_);
        EXPECT_LE(step.panel.end(), s_.kept_columns);
        remade_ = step.panel;
        break;
      case StepKind::grad_input:
        expect_made(step);
        input_[step.rows.first].add(step.panel.first, columns);
        rows_[step.rows.first] = step.rows.count;
        EXPECT_EQ(step.adds, step.panel.first > 0);
        break;
      case StepKind::grad_weight:
        expect_made(step);
        weight_.add(step.panel.first, columns);
        break;
      case StepKind::both_gradients:
        expect_made(step);
        input_[0].add(step.panel.first, columns);
        rows_[0] = step.rows.count;
        weight_.add(step.panel.first, columns);
        break;
      case StepKind::form_dz:
        if (is_by_rows(step.panel.origin)) break;  // then form_dz does not sum grad_bias
        [[fallthrough]];
      case StepKind::grad_bias:
        if (s_.grad_bias) bias_.add(step.panel.first, columns);
        break;
      default:
        break;
    }
  }
  void expect_whole(int64_t tokens) {
    if (s_.forward) logits_.expect(0, s_.vocab);
    if (s_.forward && s_.kept_columns > 0) {
      EXPECT_EQ(kept_, s_.kept_columns);
    }
    if (s_.grad_weight) weight_.expect(0, s_.vocab);
    if (s_.grad_bias) bias_.expect(0, s_.vocab);
    if (!s_.grad_input) {
      EXPECT_TRUE(input_.empty());
      return;
    }
    int64_t row = 0;
    for (const auto& [first, covered] : input_) {
      EXPECT_EQ(first, row);
      row += rows_[first];
      covered.expect(0, s_.vocab);
    }
    EXPECT_EQ(row, tokens);
  }

 private:
  bool in_panels() const { return s_.kernels.kept == Origin::dz_in_panels; }
  void expect_made(const Step& step) {
    EXPECT_TRUE(had_states_);
    const int64_t end = step.panel.first + step.columns();
    if (end <= kept_) return;
    EXPECT_EQ(step.panel.first, remade_.first);
    EXPECT_EQ(end, remade_.end());
  }

  const LinearShape& s_;
  const LinearPlan& p_;
  int64_t tile_columns_ = 1;
  bool had_states_ = false;
  int64_t kept_ = 0;
  PanelPlace remade_;
  Covered logits_, weight_, bias_;
  std::map<int64_t, Covered> input_;  // by the first row
  std::map<int64_t, int64_t> rows_;
};

void judge(const Planned& planned) {
  const auto& [engine, s, p] = planned;
  const std::vector<Step> steps = AllSteps(planned).steps;
  ASSERT_EQ(steps.front().kind, StepKind::tokens);
  int64_t tokens = 0;
  for (size_t i = 0; i < steps.size();) {
    if (steps[i].kind != StepKind::gather) {
      EXPECT_EQ(steps[i].tokens.count, 0) << name_of(steps[i].kind);
      ++i;
      continue;
    }
    const Range chunk = steps[i].tokens;
    EXPECT_EQ(chunk.first, tokens);
    tokens += chunk.count;
    ChunkJudge judge(engine, s, p);
    do {
      EXPECT_EQ(steps[i].tokens.count, chunk.count);
      judge.take(steps[i]);
      if (steps[i].kind == StepKind::grad_weight) {
        EXPECT_EQ(steps[i].adds, chunk.first > 0);
      }
    } while (++i < steps.size() && steps[i].tokens.count > 0 && steps[i].kind != StepKind::gather);
    judge.expect_whole(chunk.count);
  }
  EXPECT_EQ(tokens, s.tokens);
}

TEST(CudaSteps, TakeEveryTokenAndColumnOnce) {
  for (const Asked& asked : shapes()) {
    for (const uint64_t bytes : budgets(asked)) {
      for (const Planned& each : passes(asked, bytes)) {
        judge(each);
        if (HasFailure()) FAIL() << each.shape.tokens << " x " << each.shape.vocab << ", " << bytes;
      }
    }
  }
}

// The estimate adds in another order, and visits only about a hundred parts of a plan
// (plan_time.h).
TEST(CudaSteps, APlansSecondsAreItsSteps) {
  int told = 0;
  for (const Asked& asked : shapes()) {
    if (asked.shape.tokens == 0) continue;
    for (const uint64_t bytes : budgets(asked)) {
      const LinearPlan p = asked.plan(bytes);
      if (p.kind == PlanKind::two_passes) continue;
      double seconds = 30 * asked.speed.launch;
      int64_t copied = 0;
      for (const Step& step : AllSteps({asked.engine, asked.shape, p}).steps) {
        seconds += asked.engine.seconds(asked.shape, p, asked.speed, step);
        copied += step.kind == StepKind::copy_panel;
      }
      if (copied >= 100) continue;
      EXPECT_NEAR(seconds, p.seconds, 1e-9 * seconds);
      ++told;
    }
  }
  EXPECT_GT(told, 100);
}

// The steps of one part of a call.
class PartSteps final : public StepVisitor {
 public:
  PartSteps(const Asked& asked, const LinearPlan& plan, int part) {
    Parts(part, this).enumerate(asked.engine, asked.shape, plan);
  }
  void visit(const Step& step) override { steps.push_back(step); }
  std::vector<Step> steps;
};

bool writes_input(const Step& step) {
  return step.kind == StepKind::grad_input || step.kind == StepKind::write_grad_input;
}

TEST(CudaSteps, PartsAreTheStepsInOrder) {
  int halved = 0;
  for (const Asked& asked : shapes()) {
    if (!asked.shape.input_first) continue;
    for (const uint64_t bytes : budgets(asked)) {
      const LinearPlan p = asked.plan(bytes);
      const std::vector<Step> all = AllSteps({asked.engine, asked.shape, p}).steps;
      std::vector<Step> parts;
      for (const int part : {1, 2, 3}) {
        const std::vector<Step> some = PartSteps(asked, p, part).steps;
        EXPECT_EQ(std::ranges::any_of(some, writes_input), part == 1);
        parts.insert(parts.end(), some.begin(), some.end());
      }
      ASSERT_EQ(parts.size(), all.size());
      for (size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(parts[i].kind, all[i].kind) << i;
        EXPECT_EQ(parts[i].panel.first, all[i].panel.first) << i;
      }
      if (p.stored_columns < asked.shape.vocab) continue;
      // If all state is kept, no product of grad_weight comes before grad_input.
      const auto is_weight = [](const Step& s) { return s.kind == StepKind::grad_weight; };
      EXPECT_EQ(std::ranges::count_if(PartSteps(asked, p, 1).steps, is_weight), 0);
      EXPECT_EQ(std::ranges::count_if(PartSteps(asked, p, 2).steps, is_weight), 1);
      const bool has_halves = p.first_columns > 0;
      EXPECT_EQ(std::ranges::count_if(PartSteps(asked, p, 3).steps, is_weight), has_halves);
      halved += has_halves;
    }
  }
  EXPECT_GT(halved, 0);
}

// Two products of grad_weight have the bits of one: the first cuts no tile, and the second cuts the
// tiles that a single product would, in as many slices.
TEST(CudaSteps, HalvesOfGradWeightCutTheTilesOfTheWhole) {
  int halved = 0;
  for (const int64_t vocab : {6000, 12001, 32064, 37984, 64128, 128256}) {
    for (const int64_t hidden : {192, 768, 1024, 2048, 4096, 5120}) {
      LinearShape s{.tokens = 8192, .vocab = vocab, .hidden = hidden, .forward = false};
      s.grad_input = s.grad_weight = s.input_first = true;
      s.kept_columns = vocab;
      s.kernels.direct_grad_input = true;
      const Asked asked = on(hopper(), s);
      const LinearPlan p = asked.plan(uint64_t{1} << 34);
      if (p.first_columns == 0) continue;
      ++halved;
      const tiled::Tile& tile = tiled::tile_of(p);
      const int teams = tiled::teams_on(tile, asked.speed), slots = tiled::weight_slots(p);
      const auto tiles = [&](int64_t columns) {
        return static_cast<int>(divide_up(columns, tile.rows) * divide_up(hidden, tile.columns));
      };
      EXPECT_EQ(p.first_columns % (tile.rows * tile.weight_group), 0);
      EXPECT_EQ(tiles(p.first_columns) % teams, 0);
      for (int depth = 1; depth <= 128; ++depth) {
        const tiled::Cut one = tiled::cut_tiles(tiles(vocab), depth, teams, slots);
        const tiled::Cut second =
            tiled::cut_tiles(tiles(vocab - p.first_columns), depth, teams, slots);
        EXPECT_EQ(second.tail, one.tail) << vocab << " " << hidden << " " << depth;
        EXPECT_EQ(second.slices, one.slices) << vocab << " " << hidden << " " << depth;
      }
    }
  }
  EXPECT_GT(halved, 10);
}

}  // namespace
}  // namespace logitless::cuda
