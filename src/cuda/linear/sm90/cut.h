// SPDX-License-Identifier: Apache-2.0
// A cut says how the tiles of a product are shared out: most of them go whole, one after the other,
// to whichever clusters there are; the last ones, which would leave clusters idle, are cut in
// slices of the depth axis. A slice's sums go to a slot of the workspace, and a second kernel adds
// a tile's slots in order: no block ever waits for another, and the order of every sum is a
// function of the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/host_device.h"

namespace logitless::cuda::sm90 {

constexpr int most_slices = 8;  // there are more where the tiles would not fill the clusters
// A slice costs its store, and all of them the second kernel. Both are counted in steps of 64 of
// the depth axis, which take a microsecond each.
constexpr int slice_cost = 4, join_cost = 10;

struct Cut {
  int tiles = 0, depth = 0;  // depth is counted in steps of 64
  int tail = 0, slices = 1;  // the last `tail` tiles are cut in so many slices each

  LOGITLESS_HOST_DEVICE int whole() const { return tiles - tail; }
  LOGITLESS_HOST_DEVICE int items() const { return whole() + tail * slices; }
  LOGITLESS_HOST_DEVICE int slots() const { return tail * slices; }
  LOGITLESS_HOST_DEVICE int tile(int item) const {
    return item < whole() ? item : whole() + (item - whole()) % tail;
  }
  // An item takes the steps from begin to end.
  LOGITLESS_HOST_DEVICE int begin(int item) const {
    return item < whole() ? 0 : depth * ((item - whole()) / tail) / slices;
  }
  LOGITLESS_HOST_DEVICE int end(int item) const {
    return item < whole() ? depth : depth * ((item - whole()) / tail + 1) / slices;
  }
  // Counts the steps that the busiest cluster takes.
  LOGITLESS_HOST_DEVICE int steps(int clusters) const {
    const int rounds = (whole() + clusters - 1) / clusters * depth;
    if (tail == 0) return rounds;
    const int slice = (depth + slices - 1) / slices + slice_cost;
    return rounds + (slots() + clusters - 1) / clusters * slice + join_cost + slices / 4;
  }
};

// Returns the quickest of a few cuts with at most `slots` slots.
LOGITLESS_HOST_DEVICE inline Cut cut_tiles(int tiles, int depth, int clusters, int slots) {
  const Cut whole{tiles, depth, 0, 1};
  Cut best = whole;
  int least = whole.steps(clusters);
  for (int tail = tiles % clusters; tail > 0 && tail <= tiles && tail < 2 * clusters;
       tail += clusters) {
    const int most = clusters / tail > most_slices ? clusters / tail : most_slices;
    for (int slices = 2; slices <= most && tail * slices <= slots; ++slices) {
      const Cut cut{tiles, depth, tail, slices};
      const int steps = cut.steps(clusters);
      if (steps < least) least = steps, best = cut;
    }
  }
  return best;
}

// Two products run side by side: grad_input's tiles on the first clusters, grad_weight's, whole, on
// the others. Adding a tile to memory takes as long as so many steps.
constexpr int sum_cost = 4;
struct Shares {
  int input_clusters = 0;
  Cut input;
  int steps = 0;  // the busiest cluster takes so many
};
// Returns the quickest of the shares about grad_input's part of the steps.
inline Shares share_clusters(int input_tiles, int input_depth, int weight_tiles, int weight_depth,
                             int clusters, int slots) {
  const int64_t input = int64_t{input_tiles} * input_depth;
  const int64_t weight = int64_t{weight_tiles} * (weight_depth + sum_cost);
  const int share = static_cast<int>(clusters * input / std::max<int64_t>(input + weight, 1));
  Shares best;
  for (int mine = std::max(share - 6, 1); mine <= std::min(share + 8, clusters - 1); ++mine) {
    const int others = clusters - mine;
    const Cut cut = cut_tiles(input_tiles, input_depth, mine, slots);
    const int steps =
        std::max(cut.steps(mine), (weight_tiles + others - 1) / others * (weight_depth + sum_cost));
    if (best.steps == 0 || steps < best.steps) best = {mine, cut, steps};
  }
  return best;
}

}  // namespace logitless::cuda::sm90
