// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/rows/rows_plan.h"
#include "src/rounding.h"

namespace logitless::cuda {
namespace {

constexpr int64_t column_multiple = 64;  // keeps the row's alignment in every tile
// Shared memory besides the tile: the kernel's own variables, and what the driver reserves per
// block.
constexpr int64_t own_bytes = 1024, driver_bytes = 1024;
constexpr int blocks_per_multiprocessor = 3;  // one loads while another computes or writes

constexpr int64_t whole_columns(int64_t columns) {
  return divide_up(columns, column_multiple) * column_multiple;
}

}  // namespace

RowsPlan plan_rows(int64_t columns, int64_t element_bytes, int64_t shared_bytes_per_block,
                   bool clusters) {
  const int64_t most = shared_bytes_per_block - own_bytes - rows_margin;
  const int64_t fine = (shared_bytes_per_block + driver_bytes) / blocks_per_multiprocessor -
                       driver_bytes - own_bytes - rows_margin;
  RowsPlan plan;
  int64_t slice = whole_columns(columns);
  while (clusters && plan.cluster < most_row_blocks && slice * element_bytes > fine) {
    plan.cluster *= 2;
    slice = whole_columns(divide_up(columns, plan.cluster));
  }
  if (slice * element_bytes > most) {
    const int64_t fitting = fine / element_bytes / column_multiple * column_multiple;
    plan.tiles = static_cast<int>(divide_up(slice, fitting));
  }
  plan.tile = static_cast<int>(whole_columns(divide_up(slice, plan.tiles)));
  // The work that every warp repeats for a row (reductions, the state) makes more threads slower:
  // 62-76 % of a copy's speed with 512, 73-81 % with 256.
  constexpr int most_threads = 256;
  while (plan.threads < most_threads && plan.threads * 16 < plan.tile) plan.threads *= 2;
  plan.shared_bytes = plan.tile * element_bytes + rows_margin;
  return plan;
}

}  // namespace logitless::cuda
