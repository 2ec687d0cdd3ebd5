// SPDX-License-Identifier: Apache-2.0
// A plan says who works on a tile: the two blocks of a cluster together, or each on its own.
#pragma once

#include <algorithm>

#include "src/cuda/linear/sm90/panels.h"

namespace logitless::cuda::sm90 {

// Two blocks of a cluster lie below each other and share half of what they read. With so few rows,
// of one chunk, the second one would have nothing to do: they work apart, each on tiles of its own.
inline constexpr int64_t apart_rows = 256;
inline bool works_apart(const LinearPlan& p) {
  return p.chunks == 1 && p.token_chunk <= apart_rows;
}
// Returns how many teams a device has: its clusters, or the blocks that work apart.
inline int teams_of(const LinearPlan& p, int clusters) {
  return works_apart(p) ? 2 * clusters : clusters;
}
// Returns how many rows a slot has: those of a team's tile.
inline int32_t slot_rows(const LinearPlan& p) {
  if (!works_apart(p)) return 512;
  return p.token_chunk <= apart_rows / 2 ? 128 : 256;
}
// Returns how many rows a block's tile may have: a warpgroup's, or those of both.
inline int32_t rows_of_tile(const LinearPlan& p) { return std::min(slot_rows(p), 256); }
// Returns how many slots grad_weight has, whose blocks never work apart.
inline int32_t weight_slots(const LinearPlan& p) {
  return tiled_part(p).slots / (512 / slot_rows(p));
}

}  // namespace logitless::cuda::sm90
