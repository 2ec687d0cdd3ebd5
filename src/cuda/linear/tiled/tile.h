// SPDX-License-Identifier: Apache-2.0
// What the planner knows of a family of GPUs: the size of its kernels' tile, the blocks that
// compute it, what else the kernels can do besides products, and its cost. Operands have 16 bits.
#pragma once

#include <cstdint>

#include "src/cuda/linear/units.h"

namespace logitless::cuda::tiled {

struct Tile {
  // A team computes a tile of logits or of a gradient, [rows, columns], `depth` of the depth axis
  // at a time.
  int32_t rows = 0, columns = 0, depth = 0;
  int32_t blocks = 1;  // per team: one, or two, one below the other
  // Whether, with few tokens, two blocks can work apart, each as its own team with half or a
  // quarter of the rows.
  bool works_apart = false;
  bool in_units = false;      // without gradients, sums are of units (units.h), not tiles
  bool slices = false;        // a gradient's tile can be cut along the depth axis (cut.h)
  bool runs_both = false;     // one launch can make both gradients of a chunk
  int32_t weight_group = 1;   // rows of grad_weight's tiles that its order of tiles takes together
  bool reads_rows = false;    // without gradients, the caller's rows of input can be read
  bool starts_early = false;  // kernels can be launched early (early.cuh)
  // Seconds in addition to the products, measured on an H200: per wave of logits, per wave that
  // also stores E, per round of a gradient's tiles, per round that adds to sums in memory.
  double logits_wave = 1e-6, stored_wave = 3e-6, round = 3e-6, summed_round = 24e-6;

  constexpr int teams(int multiprocessors) const { return multiprocessors / blocks; }
  // Panels and kept state are in blocks of 64 columns, and kept state has rows up to a multiple of
  // 64, which a product reads in steps of the depth. A family should static_assert this.
  constexpr bool is_valid() const {
    return columns % 64 == 0 && depth > 0 && 64 % depth == 0 && rows % depth == 0 &&
           (blocks == 1 || blocks == 2) && (!works_apart || (blocks == 2 && rows % 4 == 0)) &&
           (!in_units || rows == unit_rows);
  }
};

}  // namespace logitless::cuda::tiled
