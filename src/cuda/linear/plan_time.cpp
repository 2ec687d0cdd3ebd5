// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/plan_time.h"

#include <algorithm>
#include <cmath>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/sm90/cut.h"
#include "src/cuda/linear/sm90/forward.h"

namespace logitless::cuda {
namespace {

// cost(size) of every piece of `total`: whole ones and what is left.
template <class F>
double in_pieces(int64_t total, int64_t piece, F&& cost) {
  const int64_t left = total % piece;
  return static_cast<double>(total / piece) * cost(piece) + (left > 0 ? cost(left) : 0);
}

// A matrix product [rows, columns] x depth: whole waves of 128 x 256 tiles over the
// multiprocessors, or what its operands and result take to move (`sums`: an f32 result, read too).
double product_time(const LinearShape& s, const DeviceSpeed& speed, int64_t rows, int64_t columns,
                    int64_t depth, bool sums) {
  const double rate = s.dtype == DType::f32 ? speed.products_f32 : speed.products;
  const double element = static_cast<double>(size_of(s.dtype));
  const double r = static_cast<double>(rows), c = static_cast<double>(columns),
               d = static_cast<double>(depth);
  const double tiles = static_cast<double>(divide_up(rows, 128) * divide_up(columns, 256));
  const double waves = std::ceil(tiles / speed.multiprocessors);
  const double arithmetic = waves * speed.multiprocessors * 128 * 256 * 2 * d / rate;
  const double moved = (r + c) * d * element + r * c * (sums ? 8 : element);
  // Where the result is read and written in f32 its traffic is not hidden.
  const double shown = sums ? r * c * 8 / speed.memory / 2 : 0;
  return std::max(arithmetic + shown, moved / speed.memory) + speed.launch;
}

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
  return s.fused ? own_time(s, speed, speed.clusters(), weight_slots(p), columns, tokens, sums)
                 : product_time(s, speed, columns, s.hidden, tokens, sums);
}
double input_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                  int64_t tokens, int64_t columns, bool sums) {
  return s.fused ? own_time(s, speed, teams_of(p, speed.clusters()), p.slots, tokens, columns, sums)
                 : product_time(s, speed, tokens, s.hidden, columns, sums);
}

// The logits of `rows` tokens and `columns`, and the pass over them.
double pass_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed, int64_t rows,
                 int64_t columns, bool stores) {
  const double element = static_cast<double>(size_of(s.dtype));
  if (s.fused) {  // waves of clusters' tiles, 512 x 192
    const double tiles = static_cast<double>(divide_up(rows, 512) * divide_up(columns, 192));
    const double waves = std::ceil(tiles / teams_of(p, speed.clusters()));
    const double tile = 512.0 * 192 * 2 * static_cast<double>(s.hidden) /
                        (speed.products / (speed.multiprocessors / 2));
    // 6 us a wave of epilogues at D 4096 and below (docs/kernels/hopper.md).
    return waves * (tile + (stores ? 3e-6 : 1e-6)) + 2 * speed.launch;
  }
  return in_pieces(rows, p.block_rows, [&](int64_t block_rows) {
    const double logits = static_cast<double>(block_rows) * static_cast<double>(columns);
    const auto blocks = static_cast<double>(divide_up(columns, p.block_columns));
    const double product =
        product_time(s, speed, block_rows, std::min(columns, p.block_columns), s.hidden, false);
    return blocks * (product + speed.launch) +
           logits * (8 / (1.5 * speed.memory) + (stores ? element / speed.memory : 0));
  });
}

// What is kept of E costs its store; each part is a launch of its own.
double forward_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                    int64_t rows) {
  if (!s.fused) return pass_time(s, p, speed, rows, s.vocab, p.stored_columns > 0);
  double time = 0;
  for (const int64_t columns : {p.stored_columns, p.lent_columns}) {
    if (columns > 0) time += pass_time(s, p, speed, rows, columns, true);
  }
  const int64_t others = s.vocab - kept_columns(p);
  return others > 0 ? time + pass_time(s, p, speed, rows, others, false) : time;
}

// use(panel, count) with the panels of Hopper's kernels that are made again, `count` alike at a
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
double fused_panels_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                         int64_t n, F&& weight, G&& input) {
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
  const bool adds_weight = p.grad_weight_sum || (s.grad_weight_f32 && p.chunks > 1);
  double time = s.forward ? forward_time(s, p, speed, n) : 0;
  if (s.gradients()) {
    const auto weight = [&](int64_t columns) {
      if (!s.grad_weight || p.input_clusters > 0) return 0.0;
      return weight_time(s, p, speed, std::min(columns, s.rows_of_weight()), n, adds_weight);
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
    if (s.fused) {
      time += fused_panels_time(s, p, speed, n, weight, input);
    } else {
      if (p.stored_columns > 0) time += weight(p.stored_columns) + input(p.stored_columns);
      if (p.stored_columns < s.vocab) {
        time += in_pieces(s.vocab - p.stored_columns, p.remade_columns, [&](int64_t columns) {
          return pass_time(s, p, speed, n, columns, true) + 4 * speed.launch + weight(columns) +
                 input(columns);
        });
      }
    }
  }
  return time;
}

}  // namespace

bool runs_both(const LinearShape& s, const LinearPlan& p) {
  // Steps are counted in 32 bits.
  const double steps = 2.0 * static_cast<double>(divide_up(p.token_chunk, 512)) *
                       static_cast<double>(s.vocab / 64 + 512) *
                       static_cast<double>(divide_up(s.hidden, sm90::sum_columns) + 1);
  return s.fused && s.grad_input && s.grad_weight && p.chunks > 1 && s.direct_grad_input &&
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

double predicted_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed) {
  const int64_t last = std::max<int64_t>(s.tokens, 1) - (p.chunks - 1) * p.token_chunk;
  double time = chunk_time(s, p, speed, p.chunks > 1 ? p.token_chunk : last) *
                static_cast<double>(std::max<int64_t>(p.chunks - 1, 1));
  if (p.chunks > 1) time += chunk_time(s, p, speed, last);
  time += 30 * speed.launch;
  // Rows that are copied one by one where not all tokens count take half as long again.
  if (!p.copies_input) time += 1e-6;
  const double outputs = static_cast<double>(s.rows_of_weight()) * static_cast<double>(s.hidden);
  if (p.grad_weight_sum) time += outputs * 6 / speed.memory;
  if (s.copies_weight) time += outputs * 2 * static_cast<double>(size_of(s.dtype)) / speed.memory;
  return time;
}

}  // namespace logitless::cuda
