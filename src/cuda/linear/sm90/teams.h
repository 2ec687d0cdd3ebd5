// SPDX-License-Identifier: Apache-2.0
// Who works on a tile under a plan: the two blocks of a cluster together, or each on its own.
#pragma once

#include <algorithm>

#include "src/cuda/linear/plan.h"

namespace logitless::cuda::sm90 {

// Two blocks of a cluster lie below each other and share half of what they read. Of up to
// so many rows, of one chunk, the second one would have nothing to do: they work apart, each on
// tiles of its own.
inline constexpr int64_t apart_rows = 256;
inline bool works_apart(const LinearPlan& p) {
  return p.chunks == 1 && p.token_chunk <= apart_rows;
}
// Clusters, or blocks that work apart, of a device.
inline int teams_of(const LinearPlan& p, int clusters) {
  return works_apart(p) ? 2 * clusters : clusters;
}
// Rows of a slot, a team's.
inline int32_t slot_rows(const LinearPlan& p) {
  if (!works_apart(p)) return 512;
  return p.token_chunk <= apart_rows / 2 ? 128 : 256;
}
// Rows of a block's tile that there may be: a warpgroup's, or both ones'.
inline int32_t rows_of_tile(const LinearPlan& p) { return std::min(slot_rows(p), 256); }
// Returns how many slots grad_weight has, whose blocks never work apart.
inline int32_t weight_slots(const LinearPlan& p) { return p.slots / (512 / slot_rows(p)); }

}  // namespace logitless::cuda::sm90
