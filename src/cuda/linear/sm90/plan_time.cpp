// SPDX-License-Identifier: Apache-2.0
// The cost model of Hopper's plans predicts seconds on a device from its measured speed.
#include <algorithm>
#include <cmath>

#include "src/cuda/linear/plan_time.h"
#include "src/cuda/linear/sm90/cut.h"
#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/sm90/forward.h"
#include "src/cuda/linear/sm90/panels.h"
#include "src/cuda/linear/sm90/teams.h"

namespace logitless::cuda::sm90 {
namespace {

// Returns how many tiles a gradient's product [rows, D] has.
int64_t own_tiles(const LinearShape& s, int64_t rows) {
  return divide_up(rows, 512) * divide_up(round_up(s.hidden, 8), sm90::sum_columns);
}
// Returns the seconds that a tile takes for 64 of the depth axis.
double depth_time(const DeviceSpeed& speed) {
  return 512.0 * sm90::sum_columns * 64 * 2 / (speed.products / speed.clusters());
}
// Says how a gradient's product (sm90/product.h), [rows, D] over `depth`, is cut. Rounds that are
// whole however the rest is cut stand apart, because Cut counts in 32 bits.
struct RoundsAndCut {
  int64_t rounds = 0;
  sm90::Cut cut;
};
RoundsAndCut cut_of(const LinearShape& s, int teams, int64_t rows, int64_t depth, int32_t slots) {
  const int64_t tiles = own_tiles(s, rows);
  const int64_t rounds = std::max<int64_t>(tiles / teams - 2, 0);
  return {rounds, sm90::cut_tiles(static_cast<int>(tiles - rounds * teams),
                                  static_cast<int>(divide_up(depth, 64)), teams, slots)};
}
double own_time(const LinearShape& s, const DeviceSpeed& speed, int teams, int32_t slots,
                int64_t rows, int64_t depth, bool sums) {
  const auto [whole, cut] = cut_of(s, teams, rows, depth, slots);
  const double steps = static_cast<double>(whole * cut.depth + cut.steps(teams));
  const double rounds = static_cast<double>(whole + divide_up(cut.items(), teams));
  return steps * depth_time(speed) + rounds * (sums ? 24e-6 : 3e-6) + 2 * speed.launch;
}
// Returns how one chunk's two products share the clusters when both run at once.
sm90::Shares shares_of(const LinearShape& s, int64_t tokens, const DeviceSpeed& speed,
                       int32_t slots) {
  const auto tiles = [&](int64_t rows) { return static_cast<int>(own_tiles(s, rows)); };
  const auto steps = [](int64_t depth) { return static_cast<int>(divide_up(depth, 64)); };
  return sm90::share_clusters(tiles(tokens), steps(s.vocab), tiles(s.rows_of_weight()),
                              steps(tokens), speed.clusters(), slots);
}
double weight_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                   int64_t columns, int64_t tokens, bool sums) {
  return own_time(s, speed, speed.clusters(), weight_slots(p), columns, tokens, sums);
}
double input_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                  int64_t tokens, int64_t columns, bool sums) {
  return own_time(s, speed, teams_of(p, speed.clusters()), tiled_part(p).slots, tokens, columns,
                  sums);
}

// Predicts the product that makes the logits of `rows` tokens and `columns`, with what is made of
// them: waves of clusters' tiles.
double pass_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed, int64_t rows,
                 int64_t columns, bool stores) {
  const double tiles = static_cast<double>(divide_up(rows, 512) * divide_up(columns, 192));
  const double waves = std::ceil(tiles / teams_of(p, speed.clusters()));
  const double tile = 512.0 * 192 * 2 * static_cast<double>(s.hidden) /
                      (speed.products / (speed.multiprocessors / 2));
  // A wave of epilogues takes 6 us at D 4096 and below (docs/kernels/hopper.md).
  return waves * (tile + (stores ? 3e-6 : 1e-6)) + 2 * speed.launch;
}

// Predicts both products at once, on the clusters that each has.
double both_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                 int64_t tokens) {
  const double steps = shares_of(s, tokens, speed, tiled_part(p).slots).steps;
  // Sums go to memory and back hidden under products, but that takes power: a sixth of a
  // microsecond a megabyte (docs/kernels/hopper.md).
  const auto sums = static_cast<double>(s.rows_of_weight()) * static_cast<double>(s.hidden);
  return steps * depth_time(speed) + 4 * speed.launch + sums * 8 / (1.6 * speed.memory);
}

// Finds the most slots that a product of a plan can use.
class Slots final : public Estimate {
 public:
  Slots(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed)
      : s_(shape), p_(plan), speed_(speed) {}
  void visit(const Step& step) override {
    const int64_t columns = step.columns();
    if (step.kind == StepKind::grad_input) {
      use(teams_of(p_, speed_.clusters()), p_.token_chunk, columns, 1);
    } else if (step.kind == StepKind::grad_weight && columns != weight_columns_) {
      use(speed_.clusters(), columns, p_.token_chunk, 512 / slot_rows(p_));
      weight_columns_ = columns;  // parts of one width follow each other, so the last one is enough
    }
  }
  int32_t most() const { return slots_; }

 private:
  // A third slot a cluster is memory, which has to win an eighth of the steps, as in Gemma 3 1B's
  // grad_input of 4096 tokens: its 48 tiles want four slices each on the 66 clusters of an H200.
  void use(int teams, int64_t rows, int64_t depth, int32_t each) {
    const auto cut_for = [&](int32_t each_cluster) {
      return cut_of(s_, teams, rows, depth, each_cluster * speed_.clusters());
    };
    const auto steps = [&](const RoundsAndCut& of) {
      return of.rounds * of.cut.depth + of.cut.steps(teams);
    };
    const RoundsAndCut usual = cut_for(2), more = cut_for(3);
    const bool wins = 8 * steps(more) <= 7 * steps(usual);
    slots_ = std::max(slots_, (wins ? more : usual).cut.slots() * each);
  }

  const LinearShape& s_;
  const LinearPlan& p_;
  const DeviceSpeed& speed_;
  int32_t slots_ = 0;
  int64_t weight_columns_ = 0;
};

}  // namespace

void HopperEngine::complete(const LinearShape& s, const DeviceSpeed& speed, LinearPlan* p) const {
  if (tiled_part(*p).input_teams == 0) return;
  tiled_part(*p).input_teams =
      shares_of(s, p->token_chunk, speed, tiled_part(*p).slots).input_clusters;
}

int32_t slots_of(const LinearShape& shape, const LinearPlan& p, const DeviceSpeed& speed) {
  const int32_t most = 2 * speed.clusters();
  if (tiled_part(p).input_teams > 0)
    return shares_of(shape, p.token_chunk, speed, most).input.slots();
  LinearShape s = shape;
  s.tokens = std::max<int64_t>(s.tokens, 1);
  Slots slots(s, p, speed);
  HopperEngine().for_steps(s, p, &slots);
  return slots.most();
}

double HopperEngine::seconds(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                             const Step& step) const {
  const int64_t columns = step.columns(), n = step.tokens.count;
  const auto bytes = [&] {
    return static_cast<double>(columns) * static_cast<double>(n) *
           static_cast<double>(size_of(s.dtype));
  };
  const double launches =
      step.panel.first == 0 ? 2 * speed.launch : 0;  // this is paid once for all that is kept
  switch (step.kind) {
    case StepKind::logits:
      return pass_time(s, p, speed, n, columns, is_kept(step.panel.origin));
    case StepKind::remake:
      return pass_time(s, p, speed, n, columns, true) + 2 * speed.launch;
    case StepKind::finish_panel:
      return launches;
    case StepKind::form_panel:
      return bytes() * 2 / speed.memory + 2 * speed.launch;
    case StepKind::form_dz:
      return launches + bytes() * 2 / speed.memory;
    case StepKind::copy_panel:
      return bytes() * 2 / (0.8 * speed.memory) + speed.launch;
    case StepKind::grad_input:
      return input_time(s, p, speed, step.rows.count, columns, step.to_sums);
    case StepKind::grad_weight:
      return weight_time(s, p, speed, std::min(columns, s.rows_of_weight()), n,
                         adds_to_weight(s, p));
    case StepKind::both_gradients:
      return both_time(s, p, speed, n);
    default:
      return shared_step_time(s, p, speed, step);
  }
}

}  // namespace logitless::cuda::sm90
