// SPDX-License-Identifier: Apache-2.0
// A family of GPUs is described to the planner by the tile of its kernels: its size, who works on
// it, what the kernels can do beside the products, and what that costs.
#pragma once

#include <cstdint>

namespace logitless::cuda::tiled {

struct Tile {
  // A team makes a tile of logits, [rows, columns], or of a gradient; `depth` of the depth axis is
  // multiplied at a time. Columns are a multiple of 64.
  int32_t rows = 0, columns = 0, depth = 0;
  // A team has so many blocks. Two lie below each other; of few tokens they work apart, each as a
  // team of its own with half or a quarter of the rows.
  int32_t blocks = 1;
  // The loss alone leaves sums of units (units.h, whose rows a tile then has), else of tiles.
  bool in_units = false;
  bool slices = false;        // a gradient's tile can be cut along the depth axis (cut.h)
  bool runs_both = false;     // one launch can make both gradients of a chunk
  bool reads_rows = false;    // the loss alone can read the caller's rows of input
  bool starts_early = false;  // kernels start before those in front of them end (early.cuh)
  // Seconds beyond the products: of a wave of logits, of one that also stores E, and of a round of
  // a gradient's tiles, of one that adds to sums in memory.
  double logits_wave = 1e-6, stored_wave = 3e-6, round = 3e-6, summed_round = 24e-6;

  int teams(int multiprocessors) const { return multiprocessors / blocks; }
};

}  // namespace logitless::cuda::tiled
