// SPDX-License-Identifier: Apache-2.0
// The plans of a linear op whose kernels compute tiles of logits.
#include <algorithm>
#include <numeric>

#include "src/cuda/linear/plan_search.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/linear/tiled/engine.h"
#include "src/cuda/linear/tiled/panels.h"
#include "src/cuda/linear/tiled/teams.h"
#include "src/cuda/linear/units.h"

namespace logitless::cuda::tiled {
namespace {

uint64_t slot_bytes(const LinearPlan& p) {
  return static_cast<uint64_t>(slot_size(p)) * sizeof(float);
}

// Whether both products of a chunk run in one launch.
bool runs_both(const LinearShape& s, const LinearPlan& p) {
  const Tile& tile = tile_of(p);
  // The kernels count steps in 32 bits.
  const double steps = 2.0 * static_cast<double>(divide_up(p.token_chunk, tile.rows)) *
                       static_cast<double>(s.vocab / tile.depth + tile.rows) *
                       static_cast<double>(divide_up(s.hidden, tile.columns) + 1);
  return tile.runs_both && s.grad_input && s.grad_weight && !s.input_first && p.chunks > 1 &&
         s.kernels.direct_grad_input && p.stored_columns == s.vocab && steps < 1e9;
}

// Where grad_weight's columns are divided between two products: near the middle, so that the two
// compute the same tiles in the same order as one product, and the second cuts the same last tiles.
int64_t halfway(const LinearShape& s, const Tile& tile, int teams) {
  const int64_t across = divide_up(s.hidden, tile.columns);
  const int64_t rows = divide_up(s.vocab, tile.rows);
  const int64_t step =
      std::lcm<int64_t>(tile.weight_group, teams / std::gcd<int64_t>(teams, across));
  const int64_t first = rows / 2 / step * step;
  // cut_tiles may cut the tiles of two rounds.
  const bool cuts_alike = (rows - first) * across >= 2 * teams;
  return cuts_alike ? first * tile.rows : 0;
}

// The plans of one call on one device for a number of bytes.
class Plans {
 public:
  Plans(const TiledEngine& engine, const LinearShape& shape, const DeviceSpeed& speed,
        uint64_t bytes)
      : engine_(engine), tile_(engine.tile()), s_(shape), speed_(speed), bytes_(bytes) {}

  void each(const std::function<void(const LinearPlan&)>& consider) const {
    const auto use = [&](const LinearPlan& p) {
      if (s_.weight_rows == 0 || p.kind == PlanKind::chunks) consider(p);
    };
    if (s_.kept_columns > 0) return each_of_kept(use);
    if (s_.listed > 0) return each_of_top(use);
    // Logits are never in memory here: a block's size only decides sum_rows.
    const int shrink = s_.grad_input && !s_.kernels.direct_grad_input ? 2 : 64;
    for (int64_t most = round_up(std::max<int64_t>(s_.tokens, 1), 8);;
         most = std::max<int64_t>(most / 2, tile_.rows)) {
      // The kernels count tiles in 32 bits.
      const int64_t most_tiles = int64_t{1} << 30;
      if (most > tile_.rows &&
          divide_up(most, tile_.rows) * divide_up(s_.vocab, tile_.columns) > most_tiles) {
        continue;
      }
      LinearPlan p = chunked(most);
      for (int64_t block = int64_t{32} << 20; block >= int64_t{1} << 20; block /= shrink) {
        set_block(s_, block, &p);
        p.stored_columns = s_.gradients() && s_.can_keep() ? s_.vocab : 0;
        p.copies_input = true;
        if (!s_.gradients() || s_.can_keep()) use(finish(p));
        if (s_.kernels.reads_input) {
          p.copies_input = false;
          use(finish(p));
        }
        if (s_.gradients()) each_width(p, use);
      }
      if (most <= tile_.rows || s_.targets_only) break;
    }
    if (s_.gradients() && s_.can_keep() && bytes_ > 0) each_odd_chunk(use);
  }

 private:
  // Considers the plans of a call for top-k. More tokens at a time save no time, but take memory
  // for their partial sums.
  template <class F>
  void each_of_top(F&& use) const {
    int64_t most = std::min(round_up(std::max<int64_t>(s_.tokens, 1), 8), 4 * int64_t{tile_.rows});
    for (;; most = std::max<int64_t>(most / 2, tile_.rows)) {
      each_block(chunked(most), use);
      if (most <= tile_.rows) return;
    }
  }
  // Considers the plans of a chunk for top-k, by the teams' rounds in a block of logits of all the
  // chunk's tokens.
  template <class F>
  void each_block(LinearPlan p, F&& use) const {
    constexpr int64_t most_block = int64_t{128} << 20;
    p.block_rows = p.token_chunk;
    const int64_t across = divide_up(p.token_chunk, tile_.rows);
    const int64_t teams = teams_of(p, teams_on(tile_, speed_));
    const auto use_tiles = [&](int64_t tiles) {
      p.block_columns = std::min(tiles * tile_.columns, round_up(s_.vocab, tile_.columns));
      if (tiles == 1 || p.block_rows * p.block_columns * 4 <= most_block) use(finish(p));
    };
    for (const int64_t rounds : {64, 32, 16, 8, 4, 3, 2, 1}) {
      if (rounds * teams > across) use_tiles(rounds * teams / across);
    }
    use_tiles(1);
  }

  // Considers the plans with E of all tokens in the caller's memory: gradients of all tokens at
  // once; without gradients, also logits of a chunk at a time.
  template <class F>
  void each_of_kept(F&& use) const {
    for (int64_t most = round_up(std::max<int64_t>(s_.tokens, 1), 8);;
         most = std::max<int64_t>(most / 2, tile_.rows)) {
      each_of_kept_in(chunked(most), use);
      if (s_.gradients() || most <= tile_.rows) return;
    }
  }
  template <class F>
  void each_of_kept_in(LinearPlan p, F&& use) const {
    const int shrink = s_.grad_input && !s_.kernels.direct_grad_input ? 2 : 64;
    for (int64_t block = int64_t{32} << 20; block >= int64_t{1} << 20; block /= shrink) {
      set_block(s_, block, &p);
      p.stored_columns = s_.kernels.kept == Origin::dz_in_panels ? 0 : s_.kept_columns;
      if (!s_.gradients() || p.stored_columns == s_.vocab) {
        use(finish(p));
        continue;
      }
      for (const int64_t width : panel_widths) {
        if (width < (bytes_ > 0 ? 4 : least_width(p))) break;
        p.remade_columns = width * tile_.columns;
        use(finish(p));
      }
    }
  }

  // Nearly equal chunks of at most `most` tokens.
  LinearPlan chunked(int64_t most) const {
    const int64_t tokens = std::max<int64_t>(s_.tokens, 1);
    const int64_t even = divide_up(tokens, divide_up(tokens, most));
    LinearPlan p;
    tiled_part(p) = {.tile = &tile_};
    p.token_chunk =
        std::min(round_up(even, most >= tile_.rows ? tile_.rows : 8), round_up(tokens, 8));
    p.chunks = divide_up(tokens, p.token_chunk);
    p.panel_rows = round_up(p.token_chunk, tile_.depth);
    place_sums(&p);
    return p;
  }

  // Sets the number of partial sums of a row.
  void place_sums(LinearPlan* p) const {
    const int64_t tiles = divide_up(s_.vocab, tile_.columns);
    p->segments = tiles;
    TiledPart& own = tiled_part(*p);
    own.single_rows = static_cast<int32_t>(std::min<int64_t>(p->token_chunk, tile_.rows));
    if (!s_.kernels.plain || !tile_.in_units) return;
    const bool makes_e = s_.gradients() || s_.kept_columns > 0;
    own.unit_width = makes_e ? 1 : unit_tiles;
    if (makes_e) return;
    const auto rows = static_cast<int>(divide_up(p->token_chunk, tile_.rows));
    const int teams = teams_of(*p, teams_on(tile_, speed_));
    const Units all = Units::make(rows, static_cast<int>(tiles), own.unit_width, teams);
    p->segments = all.whole > 0 ? all.columns() : 0;
    own.single_tiles = most_singles(rows, static_cast<int>(tiles), teams);
  }

  // Completes a plan, except for its time, with slots if they fit.
  LinearPlan finish(LinearPlan p) const {
    p.lent_columns = s_.gradients() ? most_lent_columns(s_, p) : 0;
    settle(s_, &p);
    TiledPart& own = tiled_part(p);
    own.lent_scaled = lent_scaled_input(s_, p);
    own.input_teams = runs_both(s_, p);  // complete() decides how many
    own.slots = 0;
    const bool halves = s_.input_first && s_.grad_weight && p.stored_columns == s_.vocab &&
                        p.chunks == 1 && !sums_grad_weight(s_, p);
    p.first_columns = halves ? halfway(s_, tile_, teams_on(tile_, speed_)) : 0;
    p.bytes = bytes_of(engine_, s_, p);
    if (!tile_.slices || !s_.gradients() || p.bytes > bytes_) return p;
    const uint64_t room = (bytes_ - p.bytes) / slot_bytes(p);
    own.slots = engine_.slots_of(s_, p, speed_);
    p.bytes = bytes_of(engine_, s_, p);
    if (p.bytes > bytes_) {
      own.slots = static_cast<int32_t>(std::min<uint64_t>(own.slots, room));
      p.bytes = bytes_of(engine_, s_, p);
    }
    return p;
  }

  // Narrow panels send the sum of grad_input to memory and back too often: that takes 22 % of the
  // products' time with 4 tiles, 7 % with 12; with more tokens a tile takes longer. The smallest
  // plan has no narrow panels; larger plans may use them to leave room for slices.
  static int64_t least_width(const LinearPlan& p) { return p.token_chunk > 8192 ? 8 : 12; }

  // Considers the plans of a chunk that recompute columns, by the width of their panels.
  template <class F>
  void each_width(LinearPlan p, F&& use) const {
    const int64_t least = least_width(p);
    const int64_t narrowest = bytes_ > 0 ? 4 : least;
    for (const int64_t width : panel_widths) {
      if (width < narrowest) return;
      p.stored_columns = 0;
      p.remade_columns = width * tile_.columns;
      each_lending(s_, p, [&](const LinearPlan& lending) {
        const LinearPlan made = finish(lending);
        use(made);
        return sums_grad_input(s_, made);
      });
      if (!s_.can_keep() || width != least) continue;
      each_lending(s_, p, [&](LinearPlan lending) {
        // After E is used, its memory holds the panels that are computed again.
        const LinearPlan mixed =
            largest_share(s_, bytes_, lending.remade_columns, tile_.columns,
                          lending.panel_rows * size_of(s_.dtype), [&](int64_t columns) {
                            lending.stored_columns = lending.remade_columns = columns;
                            return finish(lending);
                          });
        if (mixed.bytes > 0) use(mixed);
        return false;
      });
    }
  }

  // Considers chunks of 3/4, 3/8, 3/16 ... of the tokens, between those of each(); and, if E of a
  // tile's rows does not fit, chunks of fewer rows, which take as long as a tile's.
  template <class F>
  void each_odd_chunk(F&& use) const {
    const auto whole = [&](int64_t rows) {
      LinearPlan p = chunked(rows);
      set_block(s_, int64_t{1} << 20, &p);
      p.stored_columns = s_.vocab;
      p = finish(p);
      if (p.bytes <= bytes_) use(p);
      return p.bytes <= bytes_;
    };
    for (int64_t rows = s_.tokens / 8 * 6; rows > tile_.rows; rows /= 2) {
      whole(round_up(rows, tile_.rows));
    }
    for (int64_t rows = tile_.rows; rows >= tile_.rows / 2 && rows < s_.tokens;
         rows -= tile_.depth) {
      if (whole(rows)) return;
    }
  }

  // Calls use(plan) for each way to keep E in grad_weight's memory: as much as fits if it is
  // copied, or if nothing is copied; and all of it, with grad_input written at once or through f32
  // sums, which leave the compacted input in its memory. The last is left out if use(plan) returns
  // that the plan has these sums either way.
  template <class F>
  static void each_lending(const LinearShape& s, LinearPlan p, F&& use) {
    const bool has_sums = use(p);
    if (!s.kernels.lends_grad_weight || !s.can_keep() || p.chunks > 1) return;
    tiled_part(p).copies_lent = false;
    use(p);
    tiled_part(p).copies_lent = true, p.input_first = false;
    if (s.kernels.direct_grad_input && !has_sums) use(p);
  }

  const TiledEngine& engine_;
  const Tile& tile_;
  const LinearShape& s_;
  const DeviceSpeed& speed_;
  uint64_t bytes_;
};

// Two passes require that no E outlives its chunk of tokens, and that the second pass writes each
// row once.
bool takes_two_passes(const LinearShape& s) {
  return s.forward && s.can_keep() && s.grad_input && s.grad_weight &&
         s.kernels.lends_grad_weight && !s.grad_weight_f32 && !s.copies_weight &&
         s.weight_rows == 0;
}
// Half of grad_weight's rows, whose f32 sums fit in its own memory: adding to sums takes less time
// than computing these columns again. None if the second pass computes all of grad_bias.
int64_t rows_of_first_pass(const Tile& tile, const LinearShape& s) {
  return s.grad_bias ? 0 : s.vocab / 2 / tile.rows * tile.rows;
}
LinearPlan two_passes(const TiledEngine& engine, const LinearShape& s, const DeviceSpeed& speed,
                      uint64_t bytes) {
  const int64_t first_rows = rows_of_first_pass(engine.tile(), s);
  LinearPlan p;
  p.bytes = UINT64_MAX;
  const uint64_t state = state_bytes(s);
  if (bytes <= state) return p;
  const uint64_t room = bytes - state;
  const LinearPlan first = search(engine, first_pass(s, first_rows), speed, room).best;
  if (first.bytes == 0 || first.bytes > room) return p;
  const LinearPlan second = search(engine, second_pass(s, first_rows), speed, room).best;
  const uint64_t most = std::max(first.bytes, second.bytes);
  if (most > room) return p;
  p.kind = PlanKind::two_passes;
  p.token_chunk = first.token_chunk;
  p.chunks = first.chunks;
  p.first_rows = first_rows;
  p.bytes = state + most;
  p.seconds = first.seconds + second.seconds;
  return p;
}

}  // namespace

void TiledEngine::each_plan(const LinearShape& s, const DeviceSpeed& speed, uint64_t bytes,
                            const std::function<void(const LinearPlan&)>& consider) const {
  Plans(*this, s, speed, bytes).each(consider);
}

LinearPlan TiledEngine::in_passes(const LinearShape& s, const DeviceSpeed& speed, uint64_t minimum,
                                  uint64_t bytes, const LinearPlan& best) const {
  if (!takes_two_passes(s)) return best;
  if (minimum > 0) {
    if (best.kind == PlanKind::whole) return best;
    const LinearPlan both = two_passes(*this, s, speed, bytes);
    // The passes of the smallest plan were planned for fewer bytes than there are.
    if (best.kind == PlanKind::two_passes) return both;
    return both.bytes >= minimum && both.bytes <= bytes && is_better(both, best) ? both : best;
  }
  const int64_t first_rows = rows_of_first_pass(tile(), s);
  const auto least_of = [&](const LinearShape& pass) {
    return search(*this, pass, speed, 0).least.bytes;
  };
  const uint64_t least = state_bytes(s) + std::max(least_of(first_pass(s, first_rows)),
                                                   least_of(second_pass(s, first_rows)));
  if (least >= best.bytes) return best;
  // Tries the passes with memory for slots of no team, of half of the teams and of all.
  for (const int half : {0, 1, 2}) {
    const uint64_t slots =
        static_cast<uint64_t>(teams_on(tile(), speed) * half / 2) * slot_bytes(best);
    const LinearPlan both = two_passes(*this, s, speed, least + slots);
    if (both.bytes < best.bytes && both.seconds <= 1.1 * best.seconds) return both;
  }
  return best;
}

}  // namespace logitless::cuda::tiled
