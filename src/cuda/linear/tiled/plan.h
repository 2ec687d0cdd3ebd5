// SPDX-License-Identifier: Apache-2.0
// The part of a plan that is specific to kernels that compute tiles of logits.
#pragma once

#include <cassert>

#include "src/cuda/linear/plan.h"
#include "src/cuda/linear/tiled/tile.h"

namespace logitless::cuda::tiled {

struct TiledPart {
  const Tile* tile = nullptr;
  // E is copied before rows overwrite it, so that as many columns as fit can be lent
  bool copies_lent = true;
  int32_t slots = 0;        // for partial sums of sliced tiles: cut.h
  int32_t input_teams = 0;  // teams for grad_input, if both products share a launch
  // The scaled input's offset in grad_weight's memory, or -1 if it is elsewhere.
  int64_t lent_scaled = -1;
  int32_t unit_width = 0;    // tiles per segment, or 0: units.h
  int32_t single_tiles = 0;  // most_singles(): for any number of tokens that count
  int32_t single_rows = 0;   // rows of each of these tiles
};
inline TiledPart& tiled_part(LinearPlan& p) { return p.own.as<TiledPart>(); }
inline const TiledPart& tiled_part(const LinearPlan& p) { return p.own.as<TiledPart>(); }
inline const Tile& tile_of(const LinearPlan& p) {
  assert(tiled_part(p).tile != nullptr);  // a plan of two passes has none; its passes have
  return *tiled_part(p).tile;
}

}  // namespace logitless::cuda::tiled
