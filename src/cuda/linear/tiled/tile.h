// SPDX-License-Identifier: Apache-2.0
// A family of GPUs as the planner sees it, by the tile of its kernels: its size, what works on it,
// what the kernels can do beside the products, and what that costs. Operands have 16 bits.
#pragma once

#include <cstdint>

#include "src/cuda/linear/units.h"

namespace logitless::cuda::tiled {

struct Tile {
  // A team makes a tile of logits, [rows, columns], or of a gradient, `depth` of the depth axis at
  // a time.
  int32_t rows = 0, columns = 0, depth = 0;
  int32_t blocks = 1;  // of a team: one, or two below each other
  // With few tokens two blocks can work apart, each as a team of its own with half or a quarter of
  // the rows.
  bool works_apart = false;
  bool in_units = false;      // for the loss alone the sums are of units (units.h), else of tiles
  bool slices = false;        // a gradient's tile can be cut along the depth axis (cut.h)
  bool runs_both = false;     // one launch can make both gradients of a chunk
  bool reads_rows = false;    // for the loss alone the caller's rows of input can be read
  bool starts_early = false;  // kernels start before those in front of them end (early.cuh)
  // Seconds beyond the products, measured on an H200: of a wave of logits, of one that also stores
  // E, of a round of a gradient's tiles, of one that adds to sums in memory.
  double logits_wave = 1e-6, stored_wave = 3e-6, round = 3e-6, summed_round = 24e-6;

  constexpr int teams(int multiprocessors) const { return multiprocessors / blocks; }
  // Panels and kept state are in blocks of 64 columns, and kept state has rows up to a multiple of
  // 64, which a product reads in steps of the depth. For a family to check of its tile.
  constexpr bool is_valid() const {
    return columns % 64 == 0 && depth > 0 && 64 % depth == 0 && rows % depth == 0 &&
           (blocks == 1 || blocks == 2) && (!works_apart || (blocks == 2 && rows % 4 == 0)) &&
           (!in_units || rows == unit_rows);
  }
};

}  // namespace logitless::cuda::tiled
