// SPDX-License-Identifier: Apache-2.0
// This is what a plan of kernels that make tiles of logits has of its own.
#pragma once

#include <cassert>

#include "src/cuda/linear/plan.h"
#include "src/cuda/linear/tiled/tile.h"

namespace logitless::cuda::tiled {

struct TiledPart {
  const Tile* tile = nullptr;
  // E is copied before its rows are written, so that as many columns are lent as fit
  bool copies_lent = true;
  int32_t slots = 0;        // so many slots take the sums of sliced tiles: cut.h
  int32_t input_teams = 0;  // so many teams make grad_input, where both products run at once
  // The scaled input lies at this byte of grad_weight's memory, or not there (-1).
  int64_t lent_scaled = -1;
  int32_t unit_width = 0;    // a segment has so many tiles, or is none (0): units.h
  int32_t single_tiles = 0;  // at most so many tiles have sums that lie apart
  int32_t single_rows = 0;   // each of these tiles has so many rows
};
inline TiledPart& tiled_part(LinearPlan& p) { return p.own.as<TiledPart>(); }
inline const TiledPart& tiled_part(const LinearPlan& p) { return p.own.as<TiledPart>(); }
inline const Tile& tile_of(const LinearPlan& p) {
  assert(tiled_part(p).tile != nullptr);  // a plan of two passes has none, but each of its passes
  return *tiled_part(p).tile;
}

}  // namespace logitless::cuda::tiled
