// SPDX-License-Identifier: Apache-2.0
// How the tiles of a product are divided: most tiles are computed whole, one after the other, by
// the teams in turn; the last ones, which would leave teams idle, are cut into slices of the depth
// axis. A slice's sums go to a slot of the workspace, and a second kernel adds a tile's slots in
// order: no block ever waits for another, and the order of every sum is a function of the shape,
// the teams and the slots.
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/host_device.h"

namespace logitless::cuda::tiled {

constexpr int most_slices = 8;  // more only if the tiles would not fill the teams
// On Hopper: the cost of a slice's store, and of the second kernel for all slices together. In
// steps of 64 of the depth axis, which take a microsecond each.
constexpr int slice_cost = 4, join_cost = 10;

struct Cut {
  int tiles = 0, depth = 0;  // depth in steps of the tile's
  int tail = 0, slices = 1;  // the last `tail` tiles are cut in `slices` slices each

  LOGITLESS_HOST_DEVICE int whole() const { return tiles - tail; }
  LOGITLESS_HOST_DEVICE int items() const { return whole() + tail * slices; }
  LOGITLESS_HOST_DEVICE int slots() const { return tail * slices; }
  LOGITLESS_HOST_DEVICE int tile(int item) const {
    return item < whole() ? item : whole() + (item - whole()) % tail;
  }
  // An item covers the steps from begin to end.
  LOGITLESS_HOST_DEVICE int begin(int item) const {
    return item < whole() ? 0 : depth * ((item - whole()) / tail) / slices;
  }
  LOGITLESS_HOST_DEVICE int end(int item) const {
    return item < whole() ? depth : depth * ((item - whole()) / tail + 1) / slices;
  }
  // The number of steps of the busiest team.
  LOGITLESS_HOST_DEVICE int steps(int teams) const {
    const int rounds = (whole() + teams - 1) / teams * depth;
    if (tail == 0) return rounds;
    const int slice = (depth + slices - 1) / slices + slice_cost;
    return rounds + (slots() + teams - 1) / teams * slice + join_cost + slices / 4;
  }
};

// Returns the fastest of a few cuts with at most `slots` slots.
LOGITLESS_HOST_DEVICE inline Cut cut_tiles(int tiles, int depth, int teams, int slots) {
  const Cut whole{tiles, depth, 0, 1};
  Cut best = whole;
  int least = whole.steps(teams);
  for (int tail = tiles % teams; tail > 0 && tail <= tiles && tail < 2 * teams; tail += teams) {
    const int most = teams / tail > most_slices ? teams / tail : most_slices;
    for (int slices = 2; slices <= most && tail * slices <= slots; ++slices) {
      const Cut cut{tiles, depth, tail, slices};
      const int steps = cut.steps(teams);
      if (steps < least) least = steps, best = cut;
    }
  }
  return best;
}

// For two products side by side: the first teams compute grad_input's tiles, the others
// grad_weight's, uncut. Adding a tile to memory takes as long as sum_cost steps.
constexpr int sum_cost = 4;
struct Shares {
  int input_teams = 0;
  Cut input;
  int steps = 0;  // of the busiest team
};
// Returns the fastest way to share the teams, near grad_input's share of the steps.
inline Shares share_teams(int input_tiles, int input_depth, int weight_tiles, int weight_depth,
                          int teams, int slots) {
  const int64_t input = int64_t{input_tiles} * input_depth;
  const int64_t weight = int64_t{weight_tiles} * (weight_depth + sum_cost);
  const int share = static_cast<int>(teams * input / std::max<int64_t>(input + weight, 1));
  Shares best;
  for (int mine = std::max(share - 6, 1); mine <= std::min(share + 8, teams - 1); ++mine) {
    const int others = teams - mine;
    const Cut cut = cut_tiles(input_tiles, input_depth, mine, slots);
    const int steps =
        std::max(cut.steps(mine), (weight_tiles + others - 1) / others * (weight_depth + sum_cost));
    if (best.steps == 0 || steps < best.steps) best = {mine, cut, steps};
  }
  return best;
}

}  // namespace logitless::cuda::tiled
