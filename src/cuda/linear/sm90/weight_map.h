// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/sm90/tensor_map.h"

namespace logitless::cuda::sm90 {

// The map of a head's weight; each block of a team loads half of the weight's rows of a tile.
inline CUtensorMap weight_map(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const LinearShape& s = call.shape;
  const int64_t hidden = s.copies_weight ? s.hidden_pitch() : s.hidden;
  const void* weight = s.copies_weight
                           ? m.weight
                           : static_cast<const char*>(call.weight.data) + call.weight.byte_offset;
  return make_map(weight, s.dtype, s.vocab, hidden, weight_stride(call), tile_columns / 2, stream);
}

}  // namespace logitless::cuda::sm90
