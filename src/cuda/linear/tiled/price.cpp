// SPDX-License-Identifier: Apache-2.0
// The cost model of tiled kernels: seconds on a device, from its measured speed.
#include <algorithm>
#include <cmath>

#include "src/cuda/linear/plan_time.h"
#include "src/cuda/linear/tiled/cut.h"
#include "src/cuda/linear/tiled/engine.h"
#include "src/cuda/linear/tiled/teams.h"

namespace logitless::cuda::tiled {
namespace {

// How a gradient's product is cut. Rounds that are whole in any case are counted separately,
// because Cut counts in 32 bits.
struct RoundsAndCut {
  int64_t rounds = 0;
  Cut cut;
  int64_t steps(int teams) const { return rounds * cut.depth + cut.steps(teams); }
};

class Model {
 public:
  Model(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed)
      : s_(shape), p_(plan), speed_(speed), tile_(tile_of(plan)) {}

  int teams() const { return teams_on(tile_, speed_); }
  // How a product [rows, D] over `depth` is cut.
  RoundsAndCut cut_of(int teams, int64_t rows, int64_t depth, int32_t slots) const {
    const int64_t tiles = tiles_of(rows);
    const int64_t rounds = std::max<int64_t>(tiles / teams - 2, 0);
    return {rounds,
            cut_tiles(static_cast<int>(tiles - rounds * teams), depth_steps(depth), teams, slots)};
  }
  // How one chunk's two products share the teams in one launch.
  Shares shares_of(int64_t tokens, int32_t slots) const {
    const auto tiles = [&](int64_t rows) { return static_cast<int>(tiles_of(rows)); };
    return share_teams(tiles(tokens), depth_steps(s_.vocab), tiles(s_.rows_of_weight()),
                       depth_steps(tokens), teams(), slots);
  }
  double weight_time(int64_t columns, int64_t tokens, bool sums) const {
    return product_time(teams(), weight_slots(p_), columns, tokens, sums);
  }
  double input_time(int64_t tokens, int64_t columns, bool sums) const {
    return product_time(teams_of(p_, teams()), tiled_part(p_).slots, tokens, columns, sums);
  }
  // The time of both products in one launch, each on its own teams.
  double both_time(int64_t tokens) const {
    const double steps = shares_of(tokens, tiled_part(p_).slots).steps;
    // Products hide the time of sums going to memory and back, but not the power: a sixth of a
    // microsecond per megabyte moved.
    const auto sums = static_cast<double>(s_.rows_of_weight()) * static_cast<double>(s_.hidden);
    return steps * step_time() + 4 * speed_.launch + sums * 8 / (1.6 * speed_.memory);
  }
  // The time to compute the logits of `rows` tokens and `columns` columns, and their sums and E:
  // waves of the teams' tiles.
  double pass_time(int64_t rows, int64_t columns, bool stores) const {
    const auto tiles =
        static_cast<double>(divide_up(rows, tile_.rows) * divide_up(columns, tile_.columns));
    const double waves = std::ceil(tiles / teams_of(p_, teams()));
    const double tile = tile_size() * 2 * static_cast<double>(s_.hidden) /
                        (speed_.products / (speed_.multiprocessors / tile_.blocks));
    return waves * (tile + (stores ? tile_.stored_wave : tile_.logits_wave)) + 2 * speed_.launch;
  }

 private:
  double tile_size() const { return static_cast<double>(tile_.rows) * tile_.columns; }
  // Tiles of a gradient's product [rows, D].
  int64_t tiles_of(int64_t rows) const {
    return divide_up(rows, tile_.rows) * divide_up(round_up(s_.hidden, 8), tile_.columns);
  }
  int depth_steps(int64_t depth) const { return static_cast<int>(divide_up(depth, tile_.depth)); }
  // Seconds per step of a tile along the depth axis.
  double step_time() const { return tile_size() * tile_.depth * 2 / (speed_.products / teams()); }
  double product_time(int teams, int32_t slots, int64_t rows, int64_t depth, bool sums) const {
    const RoundsAndCut of = cut_of(teams, rows, depth, slots);
    const auto steps = static_cast<double>(of.steps(teams));
    const auto rounds = static_cast<double>(of.rounds + divide_up(of.cut.items(), teams));
    return steps * step_time() + rounds * (sums ? tile_.summed_round : tile_.round) +
           2 * speed_.launch;
  }

  const LinearShape& s_;
  const LinearPlan& p_;
  const DeviceSpeed& speed_;
  const Tile& tile_;
};

// Finds the largest number of slots that a product of a plan can use.
class Slots final : public Estimate {
 public:
  Slots(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed)
      : p_(plan), model_(shape, plan, speed) {}
  void visit(const Step& step) override {
    const int64_t columns = step.columns();
    if (step.kind == StepKind::grad_input) {
      use(teams_of(p_, model_.teams()), p_.token_chunk, columns, 1);
    } else if (step.kind == StepKind::grad_weight && columns != weight_columns_) {
      use(model_.teams(), columns, p_.token_chunk, tile_of(p_).rows / slot_rows(p_));
      weight_columns_ = columns;  // equal parts are consecutive: the last is enough
    }
  }
  int32_t most() const { return slots_; }

 private:
  // More than two slots per team must save an eighth of the steps to be worth their memory, as in
  // Gemma 3 1B's grad_input of 4096 tokens: its 48 tiles want four slices each on the 66 teams of
  // an H200.
  void use(int teams, int64_t rows, int64_t depth, int32_t each) {
    const RoundsAndCut usual = model_.cut_of(teams, rows, depth, 2 * model_.teams());
    const RoundsAndCut more = model_.cut_of(teams, rows, depth, 3 * model_.teams());
    const bool wins = 8 * more.steps(teams) <= 7 * usual.steps(teams);
    slots_ = std::max(slots_, (wins ? more : usual).cut.slots() * each);
  }

  const LinearPlan& p_;
  Model model_;
  int32_t slots_ = 0;
  int64_t weight_columns_ = 0;
};

// The time of a block of logits for top-k, beyond that of its sums: kernels that begin and end, a
// kernel that reads few of the logits, and the weight's rows, which few tokens do not hide.
double list_time(const LinearShape& s, int64_t columns, const DeviceSpeed& speed) {
  const auto weight = static_cast<double>(columns * s.hidden * size_of(s.dtype));
  return 15e-6 + weight / (3 * speed.memory);
}

}  // namespace

void TiledEngine::complete(const LinearShape& s, const DeviceSpeed& speed, LinearPlan* p) const {
  if (p->kind == PlanKind::two_passes || tiled_part(*p).input_teams == 0) return;
  tiled_part(*p).input_teams =
      Model(s, *p, speed).shares_of(p->token_chunk, tiled_part(*p).slots).input_teams;
}

int32_t TiledEngine::slots_of(const LinearShape& shape, const LinearPlan& p,
                              const DeviceSpeed& speed) const {
  const Model model(shape, p, speed);
  if (tiled_part(p).input_teams > 0) {
    return model.shares_of(p.token_chunk, 2 * model.teams()).input.slots();
  }
  LinearShape s = shape;
  s.tokens = std::max<int64_t>(s.tokens, 1);
  Slots slots(s, p, speed);
  for_steps(s, p, &slots);
  return slots.most();
}

double TiledEngine::seconds(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                            const Step& step) const {
  const Model model(s, p, speed);
  const int64_t columns = step.columns(), n = step.tokens.count;
  const auto bytes = [&] {
    return static_cast<double>(columns) * static_cast<double>(n) *
           static_cast<double>(size_of(s.dtype));
  };
  const double launches =
      step.panel.first == 0 ? 2 * speed.launch : 0;  // paid once for all kept columns
  switch (step.kind) {
    case StepKind::logits:
      if (s.listed == 0) return model.pass_time(n, columns, is_kept(step.panel.origin));
      return in_pieces(columns, p.block_columns, [&](int64_t some) {
        return model.pass_time(n, some, false) + list_time(s, some, speed);
      });
    case StepKind::remake:
      return model.pass_time(n, columns, true) + 2 * speed.launch;
    case StepKind::finish_panel:
      return launches;
    case StepKind::form_panel:
      return bytes() * 2 / speed.memory + 2 * speed.launch;
    case StepKind::form_dz:
      return launches + bytes() * 2 / speed.memory;
    case StepKind::copy_panel:
      return bytes() * 2 / (0.8 * speed.memory) + speed.launch;
    case StepKind::grad_input:
      return model.input_time(step.rows.count, columns, step.to_sums);
    case StepKind::grad_weight:
      return model.weight_time(std::min(columns, s.rows_of_weight()), n, adds_to_weight(s, p));
    case StepKind::both_gradients:
      return model.both_time(n);
    default:
      return shared_step_time(s, p, speed, step);
  }
}

}  // namespace logitless::cuda::tiled
