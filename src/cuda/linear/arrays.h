// SPDX-License-Identifier: Apache-2.0
// What kernels are given of a linear op's device arrays: the rows of a chunk, their partial sums
// and factors, blocks of logits and panels of what is made of these.
#pragma once

#include <cstdint>

#include "src/cuda/tokens/arrays.h"

namespace logitless::cuda {

// Sums of one row over the segments of the vocabulary, each [rows, segments]; absent ones null. The
// target's own column is left out, so that 1 - p_t is known without cancellation.
struct Partials {
  float* maximum = nullptr;   // max_{j != t} z_j, or what stands in its place
  float* sum = nullptr;       // sum_{j != t} exp(z_j - maximum)
  float* shifted = nullptr;   // sum_{j != t} exp(z_j - maximum) (z_j - maximum), for the entropy
  float* weighted = nullptr;  // sum_{j != t} c_j z_j
  float* logits = nullptr;    // sum_{j != t} z_j, where that is another
  float* squared = nullptr;   // sum_{j != t} exp(z_j - maximum)^2
  int32_t* above = nullptr;   // columns j != t of z_j > z_t
  int32_t* argmax = nullptr;  // lowest column of the maximum
  int64_t segments = 0;
  bool anchored = false;  // `maximum` may be an anchor, which need not be near it: sm90/plain.cuh
  // The kernel of sm90/plain.cuh sets these, whose rows are summed in units (units.h): a segment is
  // a unit, or a tile, or these sums are of no unit (0).
  int32_t unit_width = 0;           // tiles of a segment
  int32_t single_rows = 0;          // of a single tile
  float* single_maximum = nullptr;  // [single tiles, single_rows]  where a segment is a unit
  float* single_sum = nullptr;      // [single tiles, single_rows]
};

// A row of gradients comes from these. With E:  draw_j = scale E_j - smoothing c_j.
struct RowFactors {
  float scale;      // v
  float smoothing;  // s
  float at_target;  // E of the target's column
  int32_t again;    // the row is made again by itself: panel_kernel in kept.cu
};

// A chunk of compacted tokens [first, first + rows); fewer of them may be valid.
struct Chunk {
  Tokens tokens;
  int64_t first = 0;
  int32_t rows = 0;
};

// Says how units (units.h) were shared out, for the rows' kernel to find their sums.
struct UnitShares {
  int32_t tiles = 0;  // columns of tiles
  int32_t teams = 0;  // who worked, each on units of its own
};

// A block of raw logits: rows [row, row + rows) of the chunk, columns [column, column + columns).
struct Block {
  const float* logits = nullptr;
  int64_t pitch = 0;
  int32_t row = 0, rows = 0;
  int64_t column = 0, columns = 0;
};
// Its exponentials or gradients go here: element (k, j) of the chunk at data + k pitch + j -
// first; or, as Hopper's products read them, in blocks of 64 columns: block b is [pitch, 64].
struct Panel {
  char* data = nullptr;
  int64_t pitch = 0, first = 0, columns = 0;
  bool blocks = false;
};

}  // namespace logitless::cuda
