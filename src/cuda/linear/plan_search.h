// SPDX-License-Identifier: Apache-2.0
// Helpers of every engine's planner: an engine enumerates plans, and these functions complete them.
#pragma once

#include <algorithm>

#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

// Completes a plan, except for its bytes and time, from its chunk and its stored and remade
// columns.
void settle(const LinearShape& shape, LinearPlan* plan);
// Chooses the rows and columns of a block of f32 logits of `bytes`.
void set_block(const LinearShape& shape, int64_t bytes, LinearPlan* plan);

// Widths of panels of columns that are computed again, in blocks of logits or in tiles.
inline constexpr int64_t panel_widths[] = {66, 33, 24, 20, 16, 12, 10, 8, 7, 6, 5, 4, 2, 1};

// Returns the plan with the largest share of E that fits into `bytes`. Tries numbers of columns in
// whole steps, downward from a little more than may fit, because other arrays grow or shrink with
// the share, or no longer fit into grad_weight's memory. finish(columns) completes a plan. Returns
// a plan without bytes if none fits.
template <class F>
LinearPlan largest_share(const LinearShape& s, uint64_t bytes, int64_t least, int64_t step,
                         int64_t column_bytes, F&& finish) {
  const LinearPlan smallest = finish(least);
  if (smallest.bytes > bytes) return {};
  const int64_t more = static_cast<int64_t>(
      std::min<uint64_t>((bytes - smallest.bytes) / static_cast<uint64_t>(column_bytes),
                         static_cast<uint64_t>(s.vocab)));
  int64_t columns = std::min(least + (more / step + 2) * step, (s.vocab - 1) / step * step);
  for (int tries = 0; tries < 6 && columns > 0; ++tries) {
    const LinearPlan mixed = finish(columns);
    if (mixed.bytes <= bytes) return mixed;
    const auto over = static_cast<int64_t>(mixed.bytes - bytes);
    columns = mixed.stored_columns - round_up(divide_up(over, column_bytes), step);
  }
  return {};
}

}  // namespace logitless::cuda
