// SPDX-License-Identifier: Apache-2.0
// The kernel makes of a block of raw logits partial sums of its rows, and E = exp(z - z_target)
// times the softcap's slope in the input's dtype, 0 at the target; of f16 inputs it makes codes of
// E (numbers.cuh). It reads the block, which lies in L2, once.
//   m = max_{j != t} z_j   s = sum_{j != t} exp(z_j - m)   E_j = exp(z_j - m) exp(m - z_t)
// The target's z is that of the gather-dot, added when the row is finished, so that one class alone
// has a loss of exactly 0.
#include "src/cuda/linear/portable/block.cuh"
#include "src/cuda/linear/portable/kernels.h"

namespace logitless::cuda {
namespace {

struct NoPanel {};

// Returns the sum of a segment's exponentials whose logits are above the target's. Few calls ask
// for it, so that it reads them once more and takes no register from the other sums.
__device__ inline float sum_above(const LinearCall& call, const Chunk& chunk, const WarpTile& tile,
                                  int64_t target, float anchor, float maximum) {
  const MapFactors map = map_of_token(call.map, chunk.tokens, chunk.first + tile.row);
  float mass = 0;
#pragma unroll 1
  for (int j = threadIdx.x % 32 * 4; j < tile.count; j += 128) {
    float z[4];
    load_four<false>(call, map, tile, j, z);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (z[i] > anchor && j + i != target) mass += exp_nonpositive(z[i] - maximum);
    }
  }
  return warp_sum(mass);
}

template <class E, bool kPlain, bool kSums>
__global__ void __launch_bounds__(256, 2)
    exponentials_kernel(LinearCall call, Chunk chunk, Block block, Partials partials,
                        const float* target_logit, Panel panel) {
  constexpr bool kStores = !std::is_same_v<E, NoPanel>, kCodes = std::is_same_v<E, __half>;
  WarpTile tile;
  if (!find_tile(block, &tile)) return;
  const int lane = threadIdx.x % 32;
  // A panel may end before the block does, always at a segment's end.
  const bool stores = kStores && tile.column < panel.first + panel.columns;
  if (!is_valid(chunk, tile.row)) {
    if constexpr (kStores) {  // the products read these rows too, and zeros add nothing
      const float zeros[4] = {0, 0, 0, 0};
      for (int g = 0; g < groups; ++g) {
        const int j = g * 128 + lane * 4;
        if (stores && j < tile.count)
          store_four<E>(zeros, tile.count - j, panel_row<E>(panel, tile) + j);
      }
    }
    return;
  }
  const int64_t k = chunk.first + tile.row;
  const int64_t target = chunk.tokens.target[k] - tile.column;  // it is counted in the tile
  const float anchor = target_logit[tile.row];
  MapFactors map;
  if constexpr (!kPlain) map = map_of_token(call.map, chunk.tokens, k);
  float z[groups][4];
  float maximum = -infinity();
#pragma unroll
  for (int g = 0; g < groups; ++g) {
    const int j = g * 128 + lane * 4;
    load_four<kPlain>(call, map, tile, j, z[g]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (j + i == target) z[g][i] = -infinity();
      maximum = fmaxf(maximum, z[g][i]);  // fmaxf drops a NaN, which the sum keeps
    }
  }
  maximum = warp_max(maximum);

  const float lift = kStores ? exp_any(maximum - anchor) : 0.0f;
  float sum = 0, shifted = 0, weighted = 0, logits = 0, squared = 0;
  int argmax = INT32_MAX, above = 0;
#pragma unroll
  for (int g = 0; g < groups; ++g) {
    const int j = g * 128 + lane * 4;
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = z[g][i] - maximum;
      // A whole segment of -inf adds 0; -inf - -inf would make it NaN.
      float y = z[g][i] == -infinity() ? 0.0f : exp_nonpositive(x);
      sum += y;
      if constexpr (kSums && !kPlain) {
        if (partials.shifted != nullptr) shifted = fmaf(y, fmaxf(x, least_exponent), shifted);
        if (partials.weighted != nullptr && j + i < tile.count && j + i != target) {
          const TensorView& weight = call.in.vocab_weight;
          const float c =
              present(weight) ? load(weight, call.in.start() + tile.column + j + i) : 1.0f;
          if (c != 0) weighted = fmaf(c, z[g][i], weighted);
        }
        if (partials.logits != nullptr && j + i < tile.count && j + i != target) {
          logits += z[g][i];
        }
        if (partials.squared != nullptr) squared = fmaf(y, y, squared);
        if (z[g][i] > anchor) ++above;
        if (z[g][i] == maximum && j + i < tile.count) argmax = min(argmax, j + i);
      }
      if constexpr (kCodes) {
        e[i] = (z[g][i] - anchor) * log2e;
      } else if constexpr (kStores) {
        e[i] = y * lift * (kPlain ? 1.0f : cap_slope(map, z[g][i]));
      }
    }
    if (!stores || j >= tile.count) continue;
    if constexpr (kCodes) {
      store_codes(e, tile.count - j, panel_row<E>(panel, tile) + j);
    } else if constexpr (kStores) {
      store_four<E>(e, tile.count - j, panel_row<E>(panel, tile) + j);
    }
  }
  if constexpr (!kSums) return;
  const int64_t at = tile.row * partials.segments + tile.column / segment_columns;
  sum = warp_sum(sum);
  if constexpr (!kPlain) {
    if (partials.shifted != nullptr) shifted = warp_sum(shifted);
    if (partials.weighted != nullptr) weighted = warp_sum(weighted);
    if (partials.argmax != nullptr) argmax = warp_min(argmax);
    if (partials.logits != nullptr) logits = warp_sum(logits);
    if (partials.squared != nullptr) squared = warp_sum(squared);
    if (partials.above != nullptr) above = warp_sum(above);
    if (partials.mass_rows != 0) {
      const float mass = sum_above(call, chunk, tile, target, anchor, maximum);
      if (lane == 0) partials.mass()[at] = mass;
    }
  }
  if (lane != 0) return;
  partials.maximum[at] = maximum;
  partials.sum[at] = sum;
  if constexpr (!kPlain) {
    if (partials.shifted != nullptr) partials.shifted[at] = shifted;
    if (partials.weighted != nullptr) partials.weighted[at] = weighted;
    if (partials.logits != nullptr) partials.logits[at] = logits;
    if (partials.squared != nullptr) partials.squared[at] = squared;
    if (partials.above != nullptr) partials.above[at] = above;
    if (partials.argmax != nullptr) {
      partials.argmax[at] = static_cast<int32_t>(tile.column) + (argmax == INT32_MAX ? 0 : argmax);
    }
  }
}

template <class E>
void launch(const LinearWork& work, const Block& block, bool sums, const Panel& panel) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const Partials& p = m.partials;
  const bool plain = call.plain() && p.shifted == nullptr && p.weighted == nullptr &&
                     p.argmax == nullptr && p.logits == nullptr && p.squared == nullptr &&
                     p.above == nullptr;
  const auto kernel =
      plain ? (sums ? exponentials_kernel<E, true, true> : exponentials_kernel<E, true, false>)
            : (sums ? exponentials_kernel<E, false, true> : exponentials_kernel<E, false, false>);
  stream->launch("exponentials", kernel, grid_of(block), 256, call, chunk, block, p, m.target_logit,
                 panel);
}

}  // namespace

void exponentials(const LinearWork& work, const Block& block, bool partial_sums,
                  const Panel& panel) {
  const LinearCall& call = work.call;
  if (panel.data == nullptr) {
    launch<NoPanel>(work, block, partial_sums, panel);
  } else if (call.shape.dtype == DType::f32) {
    launch<float>(work, block, partial_sums, panel);
  } else if (call.shape.dtype == DType::f16) {
    launch<__half>(work, block, partial_sums, panel);
  } else {
    launch<__nv_bfloat16>(work, block, partial_sums, panel);
  }
}

}  // namespace logitless::cuda
