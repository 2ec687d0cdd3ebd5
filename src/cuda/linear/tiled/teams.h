// SPDX-License-Identifier: Apache-2.0
// Who computes a tile under a plan: the blocks of a team together, or each block alone.
#pragma once

#include <algorithm>

#include "src/cuda/linear/tiled/plan.h"

namespace logitless::cuda::tiled {

// The two blocks of a team, one below the other, share the right operand. If the only chunk has few
// rows, the second block would have none: then the blocks work apart, each on its own tiles.
inline bool works_apart(const LinearPlan& p) {
  const Tile& tile = tile_of(p);
  return tile.works_apart && p.chunks == 1 && p.token_chunk <= tile.rows / 2;
}
// The number of a device's teams whose blocks work together.
inline int teams_on(const Tile& tile, const DeviceSpeed& speed) {
  return tile.teams(static_cast<int>(speed.multiprocessors));
}
// The number of teams under a plan: `teams`, or twice as many independent blocks.
inline int teams_of(const LinearPlan& p, int teams) { return works_apart(p) ? 2 * teams : teams; }
// Rows per slot: those of a team's tile.
inline int32_t slot_rows(const LinearPlan& p) {
  const int32_t rows = tile_of(p).rows;
  if (!works_apart(p)) return rows;
  return p.token_chunk <= rows / 4 ? rows / 4 : rows / 2;
}
// Floats per slot.
inline int64_t slot_size(const LinearPlan& p) { return int64_t{slot_rows(p)} * tile_of(p).columns; }
// The most rows of a block's tile.
inline int32_t rows_of_tile(const LinearPlan& p) {
  return std::min(slot_rows(p), tile_of(p).rows / tile_of(p).blocks);
}
// grad_weight's slots; its blocks never work apart.
inline int32_t weight_slots(const LinearPlan& p) {
  return tiled_part(p).slots / (tile_of(p).rows / slot_rows(p));
}

}  // namespace logitless::cuda::tiled
