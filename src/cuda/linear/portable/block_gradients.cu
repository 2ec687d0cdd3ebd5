// SPDX-License-Identifier: Apache-2.0
// From a block of raw logits and the known lse: dz times the map's slope in the input's dtype. At
// the target 1 - p_t is computed by expm1.
//   draw_j = slope_j (P p_j - s c_j - o [j = t] - h p_j (log p_j + H))
//   log p_j = (z_j - m) - log s
#include "src/cuda/linear/portable/block.cuh"
#include "src/cuda/linear/portable/kernels.h"

namespace logitless::cuda {
namespace {

template <class T, bool kPlain>
__global__ void __launch_bounds__(256)
    gradients_kernel(LinearCall call, Chunk chunk, Block block, const RowGradient* gradients,
                     const float* target_logit, Panel panel) {
  WarpTile tile;
  if (!find_tile(block, &tile)) return;
  const int lane = threadIdx.x % 32;
  const bool valid = is_valid(chunk, tile.row);
  const RowGradient g = valid ? gradients[tile.row] : RowGradient{};
  const int64_t target = valid ? chunk.tokens.target[chunk.first + tile.row] - tile.column : -1;
  MapFactors map;
  if (!kPlain && valid) map = map_of_token(call.map, chunk.tokens, chunk.first + tile.row);
  T* to = panel_row<T>(panel, tile);
  for (int group = 0; group < groups; ++group) {
    const int j = group * 128 + lane * 4;
    if (j >= tile.count) break;
    float z[4] = {0, 0, 0, 0}, draw[4] = {0, 0, 0, 0};
    if (valid) {
      load_four<kPlain>(call, map, tile, j, z);
      for (int i = 0; i < 4; ++i) {
        const bool is_target = j + i == target;
        if (is_target) z[i] = target_logit[tile.row];
        // Two products round z differently, so log p may come out above 0; at |z| of 1e20 by any
        // amount.
        float log_p = (z[i] - g.reference) - g.log_sum;
        log_p = log_p > 0 ? 0.0f : log_p;
        const float p = exp_any(log_p);
        draw[i] =
            is_target ? target_draw(g.probability, g.onehot, p, -expm1f(log_p)) : g.probability * p;
        if constexpr (!kPlain) {
          const bool smooths = g.smoothing != 0 && j + i < tile.count;
          const auto c = [&] { return class_weight(call.in, tile.column + j + i); };
          const float information = fmaxf(log_p, least_exponent) + g.entropy_value;
          draw[i] = dz_of<Fused>(draw[i], smooths, g.smoothing, c, g.entropy != 0, g.entropy * p,
                                 information) *
                    cap_slope(map, z[i]);
        }
      }
    }
    store_four<T>(draw, tile.count - j, to + j);
  }
}

}  // namespace

void block_gradients(const LinearWork& work, const Block& block, const Panel& panel) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const bool plain = call.plain() && call.in.options.label_smoothing == 0 && !call.in.grad_entropy;
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    const auto kernel = plain ? gradients_kernel<T, true> : gradients_kernel<T, false>;
    stream->launch("block_gradients", kernel, grid_of(block), 256, call, chunk, block, m.gradients,
                   m.target_logit, panel);
  });
}

}  // namespace logitless::cuda
