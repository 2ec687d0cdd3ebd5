// SPDX-License-Identifier: Apache-2.0
// Device arrays that the kernels of linear ops read and write: the rows of a chunk, their partial
// sums and factors, blocks of logits, and panels of E or dz.
#pragma once

#include <cstdint>

#include "src/cuda/tokens/arrays.h"
#include "src/host_device.h"

namespace logitless::cuda {

// An array is [rows, segments] of the vocabulary, except those of single tiles; null if it is not
// needed. The target's own column is left out, so that 1 - p_t is known without cancellation.
struct Partials {
  float* maximum = nullptr;  // max_{j != t} z_j, or the anchor instead
  float* sum = nullptr;      // sum_{j != t} exp(z_j - maximum)
  // sum_{j != t} exp(z_j - maximum) (z_j - maximum), for the entropy
  float* shifted = nullptr;
  float* weighted = nullptr;  // sum_{j != t} c_j z_j
  float* logits = nullptr;    // sum_{j != t} z_j; null if `weighted` is the same sum
  float* squared = nullptr;   // sum_{j != t} exp(z_j - maximum)^2
  int32_t* above = nullptr;   // the number of columns j != t with z_j > z_t
  int32_t* argmax = nullptr;  // the lowest column that has the maximum
  int64_t segments = 0;
  // `maximum` may be an anchor, not near the maximum: sm90/plain.cuh
  bool anchored = false;
  // For tiled kernels, which may sum rows in units (units.h). Width 0: no units; width 1: each tile
  // is a segment.
  int32_t unit_width = 0;   // tiles per segment
  int32_t single_rows = 0;  // rows of a single tile's sums
  int32_t mass_rows = 0;    // if not 0, mass() is this many rows after `above`
  // [single tiles, single_rows] if a segment is a unit, else null
  float* single_maximum = nullptr;
  float* single_sum = nullptr;  // [single tiles, single_rows]

  // sum exp(z_j - maximum) over the columns that `above` counts, or null. Not a member, so that the
  // arguments of kernels without it keep their layout.
  LOGITLESS_HOST_DEVICE float* mass() const {
    return mass_rows == 0 ? nullptr : reinterpret_cast<float*>(above + mass_rows * segments);
  }
};

// A row of gradients from E:  draw_j = scale E_j - smoothing c_j.
struct RowFactors {
  float scale;      // v of the glossary
  float smoothing;  // s of the glossary
  float at_target;  // E of the target's column is set to it
  int32_t again;    // 1 if finish_panel.cu computes the row again
};

// What a Backward adds to dz at chosen columns, per place: the columns, each at most once per token
// and negative if nothing is added there, and their logits.
struct ChosenGradients {
  int32_t* column = nullptr;  // [places]
  float* gradient = nullptr;  // [places]
  float* logit = nullptr;     // [places]
};

// The compacted tokens [first, first + rows), of which fewer may be valid.
struct Chunk {
  Tokens tokens;
  int64_t first = 0;
  int32_t rows = 0;
};

// How units (units.h) were divided, so that finish_rows finds their sums.
struct UnitShares {
  int32_t tiles = 0;  // tiles across the vocabulary
  int32_t teams = 0;  // teams that worked, each on its own units
};

// Raw logits of the chunk's rows [row, row + rows) and of columns [column, column + columns).
struct Block {
  const float* logits = nullptr;
  int64_t pitch = 0;
  int32_t row = 0, rows = 0;
  int64_t column = 0, columns = 0;
};
// Exponentials or gradients of some columns: element (k, j) of the chunk is at data + k pitch + j -
// first; or, as Hopper's products read them, in blocks of 64 columns, block b being [pitch, 64].
struct Panel {
  char* data = nullptr;
  int64_t pitch = 0, first = 0, columns = 0;
  bool blocks = false;
};

}  // namespace logitless::cuda
