// SPDX-License-Identifier: Apache-2.0
// The rows of a chunk, for kernels: which rows count, which anchors are usable, and where rows are
// in a panel.
#pragma once

#include "src/cuda/linear/arrays.h"

namespace logitless::cuda {

// E = exp(z - z_t) is usable for anchors z_t up to this magnitude. Beyond, the rounding error of z
// is too large for an exponent, and the row is computed again.
constexpr float most_anchor = 0x1p20f;
// Codes of E (numbers.cuh) are usable if the anchor is at most this many nats below the row's
// maximum; they end at 51 ln 2.
constexpr float most_code_nats = 34;

// The number of rows that count; they are the chunk's first.
__device__ inline int valid_rows(const Chunk& chunk) {
  const int64_t left = chunk.tokens.scalars->valid - chunk.first;
  return static_cast<int>(max(int64_t{0}, min(left, int64_t{chunk.rows})));
}

// Whether this row counts, without computing how many rows do.
__device__ inline bool is_valid(const Chunk& chunk, int row) {
  return chunk.first + row < chunk.tokens.scalars->valid;
}

// The address of element (row, j) of a panel; j counts from the panel's first column.
template <class E>
__device__ inline E* panel_element(const Panel& panel, int64_t row, int64_t j) {
  E* data = reinterpret_cast<E*>(panel.data);
  if (panel.blocks) return data + (j / 64 * panel.pitch + row) * 64 + j % 64;
  return data + row * panel.pitch + j;
}

}  // namespace logitless::cuda
