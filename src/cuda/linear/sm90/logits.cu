// SPDX-License-Identifier: Apache-2.0
// Stores a head's logits in f32 with their sums, for the divergences.
#include "src/cuda/linear/sm90/plain.cuh"
#include "src/cuda/linear/sm90/weight_map.h"
#include "src/cuda/linear/sm90/whole_chip.cuh"

namespace logitless::cuda::sm90 {

void HopperEngine::store_logits(const LinearWork& work, const StoredLogits& to) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const LinearShape& s = call.shape;
  const char* input = m.input + to.row * s.hidden_pitch() * size_of(s.dtype);
  const CUtensorMap input_map =
      make_map(input, s.dtype, chunk.rows, s.hidden_pitch(), s.hidden_pitch(), tile_rows, stream);
  const int32_t depth_tiles = static_cast<int32_t>(divide_up(s.hidden, int64_t{tile_depth}));
  const Arguments arguments{
      .chunk = chunk,
      .team = {false},
      .left_rows = tile_rows,
      .partials = to.partials,
      .panel = {reinterpret_cast<char*>(to.to), to.pitch, to.first, to.columns, false},
      .first_column = to.first,
      .columns = to.columns,
      .depth_tiles = std::max(depth_tiles, 2 * split_steps<Mode::logits>),
      .options = {.map = call.map,
                  .row_map = m.tokens.map,
                  .row_slope = m.slope == nullptr ? nullptr : m.slope + to.row},
  };
  const auto launch = [&](auto kernel) {
    stream->launch_config("sm90 logits", kernel, whole_chip(device), input_map, weight_map(work),
                          CUtensorMap{}, InputRows{}, arguments);
  };
  if (s.dtype == DType::f16) return launch(plain_forward_kernel<__half, Mode::logits>);
  launch(plain_forward_kernel<__nv_bfloat16, Mode::logits>);
}

}  // namespace logitless::cuda::sm90
