// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/sm90/plan_time.h"

#include <algorithm>
#include <cmath>

#include "src/cuda/linear/plan_time.h"
#include "src/cuda/linear/sm90/cut.h"
#include "src/cuda/linear/sm90/forward.h"
#include "src/cuda/linear/sm90/panels.h"
#include "src/cuda/linear/sm90/teams.h"

namespace logitless::cuda::sm90 {
namespace {

// Tiles of a gradient's product on Hopper, [rows, D].
int64_t own_tiles(const LinearShape& s, int64_t rows) {
  return divide_up(rows, 512) * divide_up(round_up(s.hidden, 8), sm90::sum_columns);
}
// 64 of the depth axis of a tile.
double step_time(const DeviceSpeed& speed) {
  return 512.0 * sm90::sum_columns * 64 * 2 / (speed.products / speed.clusters());
}
// One of the gradients' products on Hopper (sm90/product.h): [rows, D] over `depth`. Rounds that
// are whole however the rest is cut stand apart: Cut counts in 32 bits.
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
  return steps * step_time(speed) + rounds * (sums ? 24e-6 : 3e-6) + 2 * speed.launch;
}
// Both of them at once, of one chunk.
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
  return own_time(s, speed, teams_of(p, speed.clusters()), p.slots, tokens, columns, sums);
}

// The logits of `rows` tokens and `columns`, and what is made of them: waves of clusters' tiles.
double pass_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed, int64_t rows,
                 int64_t columns, bool stores) {
  const double tiles = static_cast<double>(divide_up(rows, 512) * divide_up(columns, 192));
  const double waves = std::ceil(tiles / teams_of(p, speed.clusters()));
  const double tile = 512.0 * 192 * 2 * static_cast<double>(s.hidden) /
                      (speed.products / (speed.multiprocessors / 2));
  // 6 us a wave of epilogues at D 4096 and below (docs/kernels/hopper.md).
  return waves * (tile + (stores ? 3e-6 : 1e-6)) + 2 * speed.launch;
}

// What is kept of E costs its store; each part is a launch of its own.
double forward_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                    int64_t rows) {
  double time = 0;
  for (const int64_t columns : {p.stored_columns, p.lent_columns}) {
    if (columns > 0) time += pass_time(s, p, speed, rows, columns, true);
  }
  const int64_t others = s.vocab - kept_columns(p);
  return others > 0 ? time + pass_time(s, p, speed, rows, others, false) : time;
}

// use(panel, count) with the panels that are made again, `count` alike at a
// time: a large vocabulary has millions, and some hundred plans are priced.
template <class F>
void for_remade_panels(const LinearShape& s, const LinearPlan& p, F&& use) {
  for (int64_t first = kept_columns(p); first < s.vocab;) {
    const PanelPlace at = panel_at(s, p, first);
    const int64_t count = panels_like(s, p, at);
    use(at, count);
    first += count * at.columns;
  }
}
// The same with the parts in which what is kept becomes rows of grad_weight; of those behind the
// first hundred as if each were copied.
template <class F>
void for_kept_parts(const LinearShape& s, const LinearPlan& p, F&& use) {
  const int64_t kept = s.grad_weight ? kept_columns(p) : 0;
  PanelPlace at;
  for (int parts = 0; at.end() < kept && parts < 100; ++parts) {
    at = kept_part_at(s, p, at.end());
    use(at, 1);
  }
  const int64_t width = std::max(p.stored_columns, p.remade_columns);
  if (at.end() < kept) use({at.end(), width, true, true}, divide_up(kept - at.end(), width));
}

// What is kept of E, and the panels that are made again: weight(columns) and input(columns) are
// their products.
template <class F, class G>
double panels_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed, int64_t n,
                   F&& weight, G&& input) {
  double time = 0;
  const double column = static_cast<double>(n) * static_cast<double>(size_of(s.dtype));
  if (const int64_t kept = kept_columns(p); kept > 0) {
    time += input(kept) + 2 * speed.launch;
    if (s.forms_dz) time += static_cast<double>(kept) * column * 2 / speed.memory;
    for_kept_parts(s, p, [&](const PanelPlace& at, int64_t count) {
      double each = weight(at.columns);
      if (at.copied) {
        each += static_cast<double>(at.columns) * column * 2 / (0.8 * speed.memory) + speed.launch;
      }
      time += static_cast<double>(count) * each;
    });
  }
  for_remade_panels(s, p, [&](const PanelPlace& at, int64_t count) {
    time +=
        static_cast<double>(count) * (pass_time(s, p, speed, n, at.columns, true) +
                                      weight(at.columns) + input(at.columns) + 2 * speed.launch);
  });
  return time;
}

// Of a chunk of n tokens.
double chunk_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed, int64_t n) {
  double time = s.forward ? forward_time(s, p, speed, n) : 0;
  if (!s.gradients()) return time;
  const auto weight = [&](int64_t columns) {
    if (!s.grad_weight || p.input_clusters > 0) return 0.0;
    return weight_time(s, p, speed, std::min(columns, s.rows_of_weight()), n, adds_to_weight(s, p));
  };
  const auto input = [&](int64_t columns) {
    return p.grad_input_sum ? input_time(s, p, speed, n, columns, true) : 0.0;
  };
  if (p.input_clusters > 0) {
    time += shares_of(s, n, speed, p.slots).steps * step_time(speed) + 4 * speed.launch;
    // The way of the sums to memory and back is hidden, but takes power: a sixth of a microsecond
    // a megabyte (docs/kernels/hopper.md).
    const auto sums = static_cast<double>(s.rows_of_weight()) * static_cast<double>(s.hidden);
    time += sums * 8 / (1.6 * speed.memory);
  } else if (s.grad_input && !p.grad_input_sum && s.direct_grad_input) {
    time += input_time(s, p, speed, n, s.vocab, false);
  } else if (s.grad_input && !p.grad_input_sum) {
    time += in_pieces(n, p.sum_rows, [&](int64_t rows) {
      return input_time(s, p, speed, rows, s.vocab, true) + speed.launch;
    });
  }
  return time + panels_time(s, p, speed, n, weight, input);
}

}  // namespace

bool runs_both(const LinearShape& s, const LinearPlan& p) {
  // Steps are counted in 32 bits.
  const double steps = 2.0 * static_cast<double>(divide_up(p.token_chunk, 512)) *
                       static_cast<double>(s.vocab / 64 + 512) *
                       static_cast<double>(divide_up(s.hidden, sm90::sum_columns) + 1);
  return s.grad_input && s.grad_weight && p.chunks > 1 && s.direct_grad_input &&
         p.stored_columns == s.vocab && steps < 1e9;
}

int32_t input_clusters_of(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed) {
  return shares_of(s, p.token_chunk, speed, p.slots).input_clusters;
}

int32_t slots_of(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed) {
  const int32_t most = 2 * speed.clusters();
  if (runs_both(s, p)) return shares_of(s, p.token_chunk, speed, most).input.slots();
  int32_t slots = 0;
  const auto input = [&](int64_t columns) {
    if (!s.grad_input || columns == 0) return;
    const int teams = teams_of(p, speed.clusters());
    slots = std::max(slots, cut_of(s, teams, p.token_chunk, columns, most).cut.slots());
  };
  const auto weight = [&](const PanelPlace& panel, int64_t) {
    if (!s.grad_weight) return;
    const auto [rounds, cut] = cut_of(s, speed.clusters(), panel.columns, p.token_chunk, most);
    slots = std::max(slots, cut.slots() * (512 / slot_rows(p)));
  };
  input(kept_columns(p));
  for_kept_parts(s, p, weight);
  for_remade_panels(s, p, [&](const PanelPlace& panel, int64_t count) {
    input(panel.columns);
    weight(panel, count);
  });
  return slots;
}

double seconds_of(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed) {
  return predicted_time(s, p, speed, [&](int64_t n) { return chunk_time(s, p, speed, n); });
}

}  // namespace logitless::cuda::sm90
