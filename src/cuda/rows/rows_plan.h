// SPDX-License-Identifier: Apache-2.0
// How CUDA divides rows of given logits; host arithmetic, tested without a GPU.
#pragma once

#include <cstdint>

namespace logitless::cuda {

constexpr int most_row_threads = 256;  // of a block
constexpr int most_row_blocks = 8;     // of a cluster, on every device of sm_90 and later
constexpr int rows_margin = 144;       // bytes of shared memory around a tile

// A row is shared by a cluster of `cluster` blocks of `threads` threads. Each block handles `tiles`
// consecutive tiles of `tile` columns; a single tile stays in shared memory, so that the row is
// read once. The order of a row's sums depends on nothing else.
struct RowsPlan {
  int cluster = 1;  // a power of two
  int threads = 32;
  int tile = 0;  // columns, a multiple of 64
  int tiles = 1;
  int64_t shared_bytes = 0;  // dynamic
};
// `shared_bytes_per_block` is the most that a block may ask for; `clusters`: kernels may use them.
RowsPlan plan_rows(int64_t columns, int64_t element_bytes, int64_t shared_bytes_per_block,
                   bool clusters);

}  // namespace logitless::cuda
