// SPDX-License-Identifier: Apache-2.0
// These are the device arrays of a linear op as its kernels take them: the rows of a chunk, their
// partial sums and factors, blocks of logits and panels of what is made of these.
#pragma once

#include <cstdint>

#include "src/cuda/tokens/arrays.h"
#include "src/host_device.h"

namespace logitless::cuda {

// Each array holds one sum of every row over each segment of the vocabulary, [rows, segments]; it
// is null where nobody asks for that sum. The target's own column is left out, so that 1 - p_t is
// known without cancellation.
struct Partials {
  float* maximum = nullptr;  // it is max_{j != t} z_j, or the anchor in its place
  float* sum = nullptr;      // it is sum_{j != t} exp(z_j - maximum)
  // It is sum_{j != t} exp(z_j - maximum) (z_j - maximum); entropy needs it.
  float* shifted = nullptr;
  float* weighted = nullptr;  // it is sum_{j != t} c_j z_j
  float* logits = nullptr;    // it is sum_{j != t} z_j, and null where `weighted` is the same sum
  float* squared = nullptr;   // it is sum_{j != t} exp(z_j - maximum)^2
  int32_t* above = nullptr;   // it counts the columns j != t with z_j > z_t
  int32_t* argmax = nullptr;  // it is the lowest column that has the maximum
  int64_t segments = 0;
  // `maximum` may then be an anchor, which need not be near it: sm90/plain.cuh
  bool anchored = false;
  // Of tiled kernels, which may sum rows in units (units.h): with a width of 0 there are no units,
  // with 1 each tile is a segment.
  int32_t unit_width = 0;   // a segment covers so many tiles
  int32_t single_rows = 0;  // so many rows of a single tile have sums of their own
  int32_t mass_rows = 0;    // where it is not 0, `mass` lies so many rows behind `above`
  // [single tiles, single_rows]  it is there where a segment is a unit
  float* single_maximum = nullptr;
  float* single_sum = nullptr;  // [single tiles, single_rows]

  // It is sum exp(z_j - maximum) of the columns that `above` counts, or null. Kernels that do not
  // know of it keep their arguments' places.
  LOGITLESS_HOST_DEVICE float* mass() const {
    return mass_rows == 0 ? nullptr : reinterpret_cast<float*>(above + mass_rows * segments);
  }
};

// These make a row of gradients of E:  draw_j = scale E_j - smoothing c_j.
struct RowFactors {
  float scale;      // the glossary calls it v
  float smoothing;  // the glossary calls it s
  float at_target;  // the target's column of E is set to it
  int32_t again;    // it is 1 where finish_panel.cu makes the row again
};

// What a Backward adds to dz at chosen columns, by place: columns of the views, negative where
// there is nothing to add, each at most once a token, and their logits.
struct ChosenGradients {
  int32_t* column = nullptr;  // [places]
  float* gradient = nullptr;  // [places]
  float* logit = nullptr;     // [places]
};

// A chunk covers the compacted tokens [first, first + rows), of which fewer may be valid.
struct Chunk {
  Tokens tokens;
  int64_t first = 0;
  int32_t rows = 0;
};

// Says how units (units.h) were shared out, for the rows' kernel to find their sums.
struct UnitShares {
  int32_t tiles = 0;  // the vocabulary has so many columns of tiles
  int32_t teams = 0;  // so many teams worked, each on units of its own
};

// A block holds raw logits of rows [row, row + rows) of the chunk and columns [column, column +
// columns).
struct Block {
  const float* logits = nullptr;
  int64_t pitch = 0;
  int32_t row = 0, rows = 0;
  int64_t column = 0, columns = 0;
};
// A panel receives the exponentials or gradients of a block: element (k, j) of the chunk lies at
// data + k pitch + j - first; or, as Hopper's products read them, in blocks of 64 columns, of which
// block b is [pitch, 64].
struct Panel {
  char* data = nullptr;
  int64_t pitch = 0, first = 0, columns = 0;
  bool blocks = false;
};

}  // namespace logitless::cuda
