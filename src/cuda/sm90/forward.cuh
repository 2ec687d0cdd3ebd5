// SPDX-License-Identifier: Apache-2.0
// One product and what becomes of its logits, for Hopper: input [N, D] . weight [V, D]^T in tiles
// of 256 tokens x 192 columns, the logits never leaving the registers.
//   sums     max and sum of exponentials of every row and tile (192 columns), the target's left out
//   sums_e   the same, and E = exp(z - z_target) in the input's dtype
//   sums_kept  the same without the softcap's slope, and near the cap what is left to it
//   dz       P exp(z - lse), with P p - o at the target
// Here with any of the options: bias, the map from raw to z, more statistics, more terms of dz
// (options.cuh). Without them: plain.cuh.
// The tile and its pipeline: tile.cuh. Rows of tiles run fastest in groups of 2048 tokens, then the
// vocabulary.
#pragma once

#include "src/cuda/sm90/options.cuh"
#include "src/cuda/sm90/tile.cuh"

namespace logitless::cuda::sm90 {

enum class Mode { sums, sums_e, sums_kept, dz };

constexpr int half_right_rows = tile_columns / 2, group_clusters = 4;

struct Arguments {
  Chunk chunk;
  Partials partials;
  const float* target_logit;
  const RowGradient* gradients;   // dz
  const float* target_gradient;   // dz
  Panel panel;                    // all but sums
  int64_t first_column, columns;  // of the vocabulary
  int64_t panel_end;              // whole blocks: behind the last column they are zeros
  int32_t depth_tiles;
  float most_distance;  // plain.cuh: log2 of a tile's maximum above the anchor's exponential
  TileOptions options;
};

// The target's column of the view, or one that is in no tile.
__device__ inline int find_target(const Arguments& a, int row, int valid) {
  return row < valid ? a.chunk.tokens.target[a.chunk.first + row] : -1;
}

// What a row's exponents start from.
struct RowStart {
  float anchor;    // E: z of the target; dz: m
  float log2_sum;  // dz: log2 s
  float factor;    // dz: P
};
template <Mode kMode>
__device__ inline RowStart load_start(const Arguments& a, int row, int valid) {
  RowStart r{0, 0, 0};
  if (row >= valid) return r;
  if constexpr (kMode == Mode::sums_e || kMode == Mode::sums_kept) r.anchor = a.target_logit[row];
  if constexpr (kMode == Mode::dz) {
    const RowGradient& g = a.gradients[row];
    r.anchor = g.reference;
    r.log2_sum = g.log_sum * log2e;
    r.factor = g.reference == g.reference && g.log_sum == g.log_sum ? g.probability : nan_value();
  }
  return r;
}

// 64 x 192 logits of a warpgroup; its thread's elements of row `h` (0 or 1) are d[4 i + 2 h + {0,
// 1}] at columns 8 i + 2 (lane % 4) + {0, 1}.
template <class T, Mode kMode>
__device__ inline void epilogue(float (&d)[96], const Arguments& a, int row0, int valid,
                                int column_tile) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int column = static_cast<int>(a.first_column) + column_tile * tile_columns;
  const int left = min(tile_columns, static_cast<int>(a.first_column + a.columns) - column);
  map_tile(d, a.options, column);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + 8 * h;
    const RowStart start = load_start<kMode>(a, row, valid);
    const int target = find_target(a, row, valid) - column;
    const bool has_target = target >= 0 && target < tile_columns;
    const int own = has_target ? target - 2 * quad : -1;
    if (kMode != Mode::dz && has_target) {
#pragma unroll
      for (int i = 0; i < 24; ++i) {
        if (own == 8 * i) d[4 * i + 2 * h] = -infinity();
        if (own == 8 * i + 1) d[4 * i + 2 * h + 1] = -infinity();
      }
    }
    if (left < tile_columns) {
#pragma unroll
      for (int i = 0; i < 24; ++i) {
        if (8 * i + 2 * quad >= left) d[4 * i + 2 * h] = -infinity();
        if (8 * i + 2 * quad + 1 >= left) d[4 * i + 2 * h + 1] = -infinity();
      }
    }
    if constexpr (kMode == Mode::dz) {
      const auto log2_p = [&](float x) {
        return fminf(fmaf(x - start.anchor, log2e, -start.log2_sum), 0.0f);
      };
      const RowGradient* terms = a.gradients + min(row, valid - 1);
      each_of_row(d, h, [&](float& x, int j) {
        x = draw_of(a.options, start.factor, *terms, x, log2_p(x), column + j, j < left);
      });
      if (has_target) {
        const float x = a.target_gradient[row];
#pragma unroll
        for (int i = 0; i < 24; ++i) {
          if (own == 8 * i) d[4 * i + 2 * h] = x;
          if (own == 8 * i + 1) d[4 * i + 2 * h + 1] = x;
        }
      }
    } else {
      float m0 = -infinity(), m1 = -infinity();
#pragma unroll
      for (int i = 0; i < 24; ++i) {
        m0 = fmaxf(m0, d[4 * i + 2 * h]);
        m1 = fmaxf(m1, d[4 * i + 2 * h + 1]);
      }
      float maximum = fmaxf(m0, m1);
      maximum = fmaxf(maximum, __shfl_xor_sync(whole_warp, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(whole_warp, maximum, 2));
      // Of -inf alone: every exponential is 0, and a NaN stays.
      const float reference = maximum == -infinity() ? 0.0f : maximum;
      float lift = 0;
      if constexpr (kMode != Mode::sums) {
        // Finite, so that columns behind the last one stay 0; a row that needs more is made again.
        lift = fminf(exp_any(maximum - start.anchor), 0x1p127f);
      }
      const int64_t at = int64_t{row} * a.partials.segments + column_tile;
      const bool writes = quad == 0 && row < valid;
      if (a.partials.weighted != nullptr) {
        const float sum = weighted_sum(d, h, a.options, column, left, target);
        if (writes) a.partials.weighted[at] = sum;
      }
      if (a.partials.argmax != nullptr) {
        const int lowest = lowest_column(d, h, maximum);
        if (writes) a.partials.argmax[at] = column + (lowest == INT32_MAX ? 0 : lowest);
      }
      if (a.partials.shifted != nullptr) {
        const float sum = shifted_sum(d, h, reference);
        if (writes) a.partials.shifted[at] = sum;
      }
      float s0 = 0, s1 = 0;
      const bool caps = kMode == Mode::sums_e && a.options.map.capped;
#pragma unroll
      for (int i = 0; i < 24; ++i) {
        if (i % 4 == 0 && again(!caps)) asm volatile("");
        float& x = d[4 * i + 2 * h];
        float& y = d[4 * i + 2 * h + 1];
        // Not fma(x, log2(e), -m log2(e)): its rounding is an exponent where |m| is large.
        const float e0 = exp2_fast((x - reference) * log2e);
        const float e1 = exp2_fast((y - reference) * log2e);
        s0 += e0;
        s1 += e1;
        if constexpr (kMode == Mode::sums_kept) {
          x = fabsf(x) > a.options.near_cap ? encode_left(a.options.map, x) : e0 * lift;
          y = fabsf(y) > a.options.near_cap ? encode_left(a.options.map, y) : e1 * lift;
        } else if constexpr (kMode != Mode::sums) {
          x = caps ? capped(a.options, x, e0) * lift : e0 * lift;
          y = caps ? capped(a.options, y, e1) * lift : e1 * lift;
        }
      }
      // A capped column that is left out is 0 inf. The target's is written later.
      if (kMode != Mode::sums && caps && left < tile_columns) {
        each_of_row(d, h, [&](float& x, int j) { x = j < left ? x : 0.0f; });
      }
      float sum = s0 + s1;
      sum += __shfl_xor_sync(whole_warp, sum, 1);
      sum += __shfl_xor_sync(whole_warp, sum, 2);
      if (writes) {
        a.partials.maximum[at] = maximum;
        a.partials.sum[at] = sum;
      }
    }
    if constexpr (kMode != Mode::sums) {
      // Two lanes trade half of what they have: each then stores 4 neighbours, two of them 32
      // bytes.
      const bool odd = quad % 2 != 0;
      const int first = column - static_cast<int>(a.panel.first);
      T* to = panel_element<T>(a.panel, row, first);
      const int end = min(tile_columns, static_cast<int>(a.panel_end) - first);
#pragma unroll
      for (int i = 0; i < 24; i += 2) {
        if (i == 8 || i == 16) to += (a.panel.pitch - 1) * 64;  // the next block's row, less j's 64
        const uint32_t low = pack<T>(d[4 * i + 2 * h], d[4 * i + 2 * h + 1]);
        const uint32_t high = pack<T>(d[4 * i + 4 + 2 * h], d[4 * i + 5 + 2 * h]);
        const uint32_t own = odd ? high : low;
        const uint32_t other = __shfl_xor_sync(whole_warp, odd ? low : high, 1);
        const int j = odd ? 8 * (i + 1) + 2 * (quad - 1) : 8 * i + 2 * quad;
        uint2 four = odd ? uint2{other, own} : uint2{own, other};
        // Of a row that only fills the tile: 0, whatever the weight holds.
        if (row >= valid) four = uint2{0, 0};
        if (row < static_cast<int>(a.panel.pitch) && j < end) {
          __stcs(reinterpret_cast<uint2*>(to + j), four);
        }
      }
    }
  }
}

// Read where it is used: the registers are the logits'.
struct ForwardWork {
  int valid;
  Schedule schedule;
};
__device__ inline ForwardWork find_work(const Arguments& a) {
  const int valid = valid_rows(a.chunk);
  return {valid,
          {(valid + cluster_rows - 1) / cluster_rows,
           static_cast<int>((a.columns + tile_columns - 1) / tile_columns), group_clusters}};
}

// The first warpgroup: a lane an operand, so that neither keeps more than one address.
__device__ inline void copy_tiles(const CUtensorMap* input_map, const CUtensorMap* weight_map,
                                  const Pipeline& pipeline, const Schedule& schedule,
                                  const Arguments& a) {
  const bool is_input = threadIdx.x == 0;
  const int rank = static_cast<int>(cluster_rank());
  const uint32_t offset = is_input ? 0 : left_bytes + rank * half_right_bytes;
  Ring ring;
  for (int t = blockIdx.x / 2; t < schedule.tiles(); t += gridDim.x / 2) {
    int row_cluster, column_tile;
    schedule.find(t, &row_cluster, &column_tile);
    const int row = is_input ? row_cluster * cluster_rows + rank * tile_rows
                             : static_cast<int>(a.first_column) + column_tile * tile_columns +
                                   rank * half_right_rows;
    for (int k = 0; k < a.depth_tiles; ++k, ring.next()) {
      uint64_t* full = pipeline.full + ring.stage;
      wait(pipeline.empty + ring.stage, ring.phase ^ 1);
      if (is_input) {
        expect_bytes(full, stage_bytes);
        load_box(input_map, full, pipeline.left(ring.stage), k * tile_depth, row);
      } else {
        load_box_to(weight_map, full, pipeline.left(ring.stage) + offset, k * tile_depth, row, 3);
      }
    }
  }
}

template <class T, Mode kMode>
__global__ void __launch_bounds__(block_threads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap input_map,
                   const __grid_constant__ CUtensorMap weight_map,
                   const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  const int warpgroup = __shfl_sync(whole_warp, static_cast<int>(threadIdx.x / 128), 0);
  const uint32_t rank = cluster_rank();
  __shared__ ForwardWork work;
  if (threadIdx.x == 0) {
    prefetch_map(&input_map);
    prefetch_map(&weight_map);
  }
  const Pipeline pipeline = open_pipeline(dynamic);
  if (threadIdx.x == 0) work = find_work(a);
  cluster_sync();
  const Schedule& schedule = work.schedule;
  if (warpgroup == 0) {
    fewer_registers<40>();
    if (threadIdx.x < 2) copy_tiles(&input_map, &weight_map, pipeline, schedule, a);
    __syncwarp();
  } else {
    more_registers<232>();
    float upper[96], lower[96];
    Ring ring;
    for (int t = blockIdx.x / 2; t < schedule.tiles(); t += gridDim.x / 2) {
      int row_cluster, column_tile;
      schedule.find(t, &row_cluster, &column_tile);
      const int row =
          row_cluster * cluster_rows + static_cast<int>(rank) * tile_rows + thread_row(warpgroup);
      multiply_tile<T, Along::depth, Along::depth>(upper, lower, a.depth_tiles, pipeline, &ring,
                                                   warpgroup);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {  // one copy of long code
        epilogue<T, kMode>(upper, a, row + 64 * half, work.valid, column_tile);
#pragma unroll
        for (int i = 0; i < 96; ++i) upper[i] = lower[i];
      }
    }
  }
  cluster_sync();  // no block ends while another may signal it
#endif
}

}  // namespace logitless::cuda::sm90
