// SPDX-License-Identifier: Apache-2.0
// Two blocks of 256 rows make a tile on Hopper, a cluster; docs/kernels/hopper.md says why it has
// this size, and what its epilogues take.
#pragma once

#include "src/cuda/linear/tiled/tile.h"
#include "src/cuda/linear/units.h"

namespace logitless::cuda::sm90 {

inline constexpr tiled::Tile tile{.rows = 512,
                                  .columns = 192,
                                  .depth = 64,
                                  .blocks = 2,
                                  .in_units = true,
                                  .slices = true,
                                  .runs_both = true,
                                  .reads_rows = true,
                                  .starts_early = true};

static_assert(tile.rows == unit_rows);

}  // namespace logitless::cuda::sm90
