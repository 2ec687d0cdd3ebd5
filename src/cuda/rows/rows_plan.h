// SPDX-License-Identifier: Apache-2.0
// Rows of given logits are cut as this says on CUDA. It is pure host arithmetic, tested without a
// GPU.
#pragma once

#include <cstdint>

namespace logitless::cuda {

constexpr int most_row_threads = 256;  // a block has at most so many
constexpr int most_row_blocks = 8;     // every device of sm_90 and later has clusters of so many
constexpr int rows_margin = 144;       // a tile needs so many bytes of shared memory around it

// A row is shared by a cluster of `cluster` blocks of `threads` threads. A block takes `tiles`
// consecutive tiles of `tile` columns; one alone stays in shared memory, so that the row is read
// once. The bits of a row depend on nothing else.
struct RowsPlan {
  int cluster = 1;  // it is a power of two
  int threads = 32;
  int tile = 0;  // a tile has so many columns, a multiple of 64
  int tiles = 1;
  int64_t shared_bytes = 0;  // they are dynamic
};
// A block may ask for at most shared_bytes_per_block; `clusters` says whether the device has them.
RowsPlan plan_rows(int64_t columns, int64_t element_bytes, int64_t shared_bytes_per_block,
                   bool clusters);

}  // namespace logitless::cuda
