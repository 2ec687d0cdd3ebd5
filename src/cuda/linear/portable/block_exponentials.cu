// SPDX-License-Identifier: Apache-2.0
// From a block of raw logits: partial sums of its rows, and E = exp(z - z_target) times the
// softcap's slope in the input's dtype, 0 at the target; for f16 inputs codes of E (numbers.cuh).
// Reads the block once, except for mass_above.
//   m = max_{j != t} z_j   s = sum_{j != t} exp(z_j - m)   E_j = exp(z_j - m) exp(m - z_t)
// The target's z comes from gather.cu and is added when the row is finished, so that a single class
// has a loss of exactly 0.
#include <algorithm>
#include <type_traits>

#include "src/cuda/linear/portable/block.cuh"
#include "src/cuda/linear/portable/kernels.h"
#include "src/cuda/runtime/early.cuh"

namespace logitless::cuda {
namespace {

struct NoPanel {};

// The sum of a segment's exponentials above the target's logit. Few calls need it: it reads the
// logits once more, so that it takes no register from the other sums.
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

enum class Sums { none, exponentials, entropy, any };

struct BlockRows {
  Chunk chunk;
  Block block;
  Partials partials;
  const float* target_logit;
  Panel panel;
};
struct MappedRows : BlockRows {
  LinearCall call;
};
// Calls with mapped logits or rare sums have more kernel parameters.
template <bool kMapped>
using RowsArguments = std::conditional_t<kMapped, MappedRows, BlockRows>;

// A tile's logits, and the row's values, loaded ahead of the tile's turn.
struct Fetched {
  WarpTile tile;
  float z[groups][4];
  int64_t target;  // within the tile
  float anchor;
  bool valid;
};

// Returns false if this warp has no tile.
template <bool kMapped>
__device__ bool fetch(const RowsArguments<kMapped>& a, int64_t item, int valid, Fetched* f) {
  const int64_t rows = (a.block.rows + warps_per_block - 1) / warps_per_block;
  const int64_t segments = (a.block.columns + segment_columns - 1) / segment_columns;
  if (item >= rows * segments) return false;
  const auto segment = static_cast<int>(item / rows);
  const int row = static_cast<int>(item - segment * rows) * warps_per_block + threadIdx.x / 32;
  f->tile = tile_of(a.block, row, segment);
  if (row >= a.block.rows) f->tile.count = 0;
  f->valid = row < a.block.rows && f->tile.row < valid;
  if (!f->valid) return true;
  f->target = a.chunk.tokens.target[a.chunk.first + f->tile.row] - f->tile.column;
  f->anchor = a.target_logit[f->tile.row];
#pragma unroll
  for (int g = 0; g < groups; ++g) {
    load_raw(f->tile, g * 128 + threadIdx.x % 32 * 4, f->z[g]);
  }
  return true;
}

template <class E, Sums kSums, bool kMapped>
__device__ void process(const RowsArguments<kMapped>& a, Fetched& f) {
  constexpr bool kStores = !std::is_same_v<E, NoPanel>, kCodes = std::is_same_v<E, __half>;
  constexpr bool kAny = kSums == Sums::any, kEntropy = kAny || kSums == Sums::entropy;
  const WarpTile& tile = f.tile;
  const Partials& partials = a.partials;
  const int lane = threadIdx.x % 32;
  MapFactors map;
  if constexpr (kMapped) {
    map = map_of_token(a.call.map, a.chunk.tokens, a.chunk.first + tile.row);
  }
  float maximum = -infinity();
#pragma unroll
  for (int g = 0; g < groups; ++g) {
    const int j = g * 128 + lane * 4;
    if constexpr (kMapped) map_four(a.call, map, tile, j, f.z[g]);
    const int64_t at = f.target - j;
    if (at >= 0 && at < 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at == i) f.z[g][i] = -infinity();
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      maximum = fmaxf(maximum, f.z[g][i]);  // fmaxf drops NaN, which the sum keeps
    }
  }
  maximum = warp_max(maximum);

  // A segment of -inf alone adds 0; -inf - -inf would be NaN.
  const float reference = maximum == -infinity() ? 0.0f : maximum;
  const bool stores = kStores && tile.column < a.panel.first + a.panel.columns;
  const float lift = kStores && !kCodes ? exp_any(maximum - f.anchor) : 0.0f;
  float sum = 0, shifted = 0, weighted = 0, logits = 0, squared = 0;
  int argmax = INT32_MAX, above = 0;
#pragma unroll
  for (int g = 0; g < groups; ++g) {
    const int j = g * 128 + lane * 4;
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float z = f.z[g][i], x = z - reference;
      const float y = exp2_fast(x * log2e);
      if constexpr (kSums != Sums::none) sum += y;
      if constexpr (kEntropy) shifted = fmaf(y, fmaxf(x, least_exponent), shifted);
      if constexpr (kAny) {
        const bool is_other = j + i < tile.count && j + i != f.target;
        if (partials.weighted != nullptr && is_other) {
          const TensorView& weight = a.call.in.vocab_weight;
          const float c =
              present(weight) ? load(weight, a.call.in.start() + tile.column + j + i) : 1.0f;
          if (c != 0) weighted = fmaf(c, z, weighted);
        }
        if (partials.logits != nullptr && is_other) logits += z;
        if (partials.squared != nullptr) squared = fmaf(y, y, squared);
        if (z > f.anchor) ++above;
        if (z == maximum && j + i < tile.count) argmax = min(argmax, j + i);
      }
      if constexpr (kCodes) {
        e[i] = (z - f.anchor) * log2e;
      } else if constexpr (kStores) {
        e[i] = y * lift;
        if constexpr (kMapped) e[i] *= cap_slope(map, z);
      }
    }
    if constexpr (kStores) {
      if (!stores || j >= tile.count) continue;
      E* const to = panel_row<E>(a.panel, tile) + j;
      if constexpr (kCodes) {
        store_codes(e, tile.count - j, to);
      } else {
        store_four<E>(e, tile.count - j, to);
      }
    }
  }
  if constexpr (kSums == Sums::none) return;
  const int64_t at = tile.row * partials.segments + tile.column / segment_columns;
  sum = warp_sum(sum);
  if constexpr (kEntropy) shifted = warp_sum(shifted);
  if constexpr (kAny) {
    if (partials.weighted != nullptr) weighted = warp_sum(weighted);
    if (partials.argmax != nullptr) argmax = warp_min(argmax);
    if (partials.logits != nullptr) logits = warp_sum(logits);
    if (partials.squared != nullptr) squared = warp_sum(squared);
    if (partials.above != nullptr) above = warp_sum(above);
    if (partials.mass_rows != 0) {
      const float mass = sum_above(a.call, a.chunk, tile, f.target, f.anchor, maximum);
      if (lane == 0) partials.mass()[at] = mass;
    }
  }
  if (lane != 0) return;
  partials.maximum[at] = maximum;
  partials.sum[at] = sum;
  if constexpr (kEntropy) {
    if (partials.shifted != nullptr) partials.shifted[at] = shifted;
  }
  if constexpr (kAny) {
    if (partials.weighted != nullptr) partials.weighted[at] = weighted;
    if (partials.logits != nullptr) partials.logits[at] = logits;
    if (partials.squared != nullptr) partials.squared[at] = squared;
    if (partials.above != nullptr) partials.above[at] = above;
    if (partials.argmax != nullptr) {
      partials.argmax[at] = static_cast<int32_t>(tile.column) + (argmax == INT32_MAX ? 0 : argmax);
    }
  }
}

// A row that does not count becomes zeros, because products read it too.
template <class E, bool kMapped>
__device__ void clear(const RowsArguments<kMapped>& a, const Fetched& f) {
  if constexpr (!std::is_same_v<E, NoPanel>) {
    if (f.tile.column >= a.panel.first + a.panel.columns) return;
    const float zeros[4] = {0, 0, 0, 0};
    for (int j = threadIdx.x % 32 * 4; j < f.tile.count; j += 128) {
      store_four<E>(zeros, f.tile.count - j, panel_row<E>(a.panel, f.tile) + j);
    }
  }
}

// Blocks take tiles in turn: a warp loads its next tile's logits while it works on the current one.
template <class E, Sums kSums, bool kMapped>
__global__ void __launch_bounds__(256, 2)
    exponentials_kernel(const __grid_constant__ RowsArguments<kMapped> a) {
  wait_for_kernel_before();
  const int valid = valid_rows(a.chunk);
  Fetched now, next;
  bool there = fetch<kMapped>(a, blockIdx.x, valid, &now);
  for (int64_t item = blockIdx.x; there; item += gridDim.x) {
    there = fetch<kMapped>(a, item + gridDim.x, valid, &next);
    if (now.valid) {
      process<E, kSums, kMapped>(a, now);
    } else {
      clear<E, kMapped>(a, now);
    }
    now = next;
  }
}

template <class E, Sums kSums, bool kMapped>
void launch(const LinearWork& work, const Block& block, const Panel& panel, bool early) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const BlockRows rows{chunk, block, m.partials, m.target_logit, panel};
  const auto kernel = exponentials_kernel<E, kSums, kMapped>;
  const int64_t items =
      divide_up(block.rows, warps_per_block) * divide_up(block.columns, segment_columns);
  const LaunchShape shape{
      .blocks = static_cast<unsigned>(std::min<int64_t>(items, 2 * device.multiprocessors)),
      .threads = 256,
      .early = early};
  if constexpr (kMapped) {
    stream->launch_config("exponentials", kernel, shape, MappedRows{rows, call});
  } else {
    stream->launch_config("exponentials", kernel, shape, rows);
  }
}

template <class E>
void launch(const LinearWork& work, const Block& block, bool sums, const Panel& panel, bool early) {
  const Partials& p = work.m.partials;
  const bool more = sums && asks_for_more(p), mapped = more || !work.call.plain();
  if constexpr (!std::is_same_v<E, NoPanel>) {
    if (!sums) {
      return mapped ? launch<E, Sums::none, true>(work, block, panel, early)
                    : launch<E, Sums::none, false>(work, block, panel, early);
    }
  }
  if (more) return launch<E, Sums::any, true>(work, block, panel, early);
  if (mapped) return launch<E, Sums::entropy, true>(work, block, panel, early);
  if (p.shifted != nullptr) return launch<E, Sums::entropy, false>(work, block, panel, early);
  launch<E, Sums::exponentials, false>(work, block, panel, early);
}

}  // namespace

bool exponentials_start_early(const DeviceInfo& device, Stream* stream) {
  const auto kernel = exponentials_kernel<NoPanel, Sums::exponentials, false>;
  return device.launches_early &&
         is_compiled_for_hopper(reinterpret_cast<const void*>(kernel), device, stream);
}

void exponentials(const LinearWork& work, const Block& block, bool partial_sums, const Panel& panel,
                  bool early) {
  const LinearCall& call = work.call;
  if (panel.data == nullptr) {
    launch<NoPanel>(work, block, partial_sums, panel, early);
  } else if (call.shape.dtype == DType::f32) {
    launch<float>(work, block, partial_sums, panel, early);
  } else if (call.shape.dtype == DType::f16) {
    launch<__half>(work, block, partial_sums, panel, early);
  } else {
    launch<__nv_bfloat16>(work, block, partial_sums, panel, early);
  }
}

}  // namespace logitless::cuda
