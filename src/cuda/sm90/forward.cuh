// SPDX-License-Identifier: Apache-2.0
// One product and what becomes of its logits, for Hopper: input [N, D] . weight [V, D]^T in tiles
// of 256 tokens x 192 columns, the logits never leaving the registers.
//   sums     max and sum of exponentials of every row and tile (192 columns), the target's left out
//   sums_e   the same, and E = exp(z - z_target) in the input's dtype
//   e        E alone, of a range of columns
//   dz       P exp(z - lse), with P p - o at the target
// A persistent block of 3 warpgroups: one thread copies (TMA, 4 stages of 64 deep), two warpgroups
// of 128 rows multiply (two m64n192k16 each with one descriptor of the weight). Two blocks of a
// cluster share the weight's rows, each loading half of them for both. Rows of tiles run fastest in
// groups of 2048 tokens, then the vocabulary. Why this tile: docs/kernels/hopper.md.
#pragma once

#include "src/cuda/linear.cuh"
#include "src/cuda/sm90/tma.cuh"
#include "src/cuda/sm90/wgmma.cuh"

namespace logitless::cuda::sm90 {

enum class Mode { sums, sums_e, e, dz };

constexpr int tile_rows = 256, tile_columns = 192, tile_depth = 64, stages = 4;
constexpr int cluster_rows = 2 * tile_rows, group_clusters = 4;
constexpr int input_bytes = tile_rows * tile_depth * 2,
              weight_bytes = tile_columns * tile_depth * 2;
constexpr int stage_bytes = input_bytes + weight_bytes, half_weight_rows = tile_columns / 2;
constexpr int shared_bytes = stages * stage_bytes + 1024 + 128;
constexpr int block_threads = 384;

struct Arguments {
  Chunk chunk;
  Partials partials;
  const float* target_logit;
  const RowGradient* gradients;   // dz
  Panel panel;                    // sums_e, e, dz
  int64_t first_column, columns;  // of the vocabulary
  int32_t depth_tiles;
};

// Where tile t of the schedule lies.
struct Schedule {
  int row_clusters, column_tiles;
  __device__ int tiles() const { return row_clusters * column_tiles; }
  __device__ void find(int t, int* row_cluster, int* column_tile) const {
    const int per_group = group_clusters * column_tiles, full = row_clusters / group_clusters;
    const int group = min(t / per_group, full);
    const int width = group < full ? group_clusters : row_clusters - full * group_clusters;
    const int rest = t - group * per_group;
    *row_cluster = group * group_clusters + rest % width;
    *column_tile = rest / width;
  }
};

struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void next() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// What the epilogue needs of a row, asked for before the products.
struct Row {
  int target;      // column of the view, or one that is in no tile
  float anchor;    // E: z of the target; dz: m
  float log2_sum;  // dz: log2 s
  float factor;    // dz: P
};

constexpr float log2e = 0x1.715476p0f;

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <Mode kMode>
__device__ inline Row load_row(const Arguments& a, int row, int valid) {
  Row r{-1, 0, 0, 0};
  if (row >= valid) return r;
  r.target = a.chunk.tokens.target[a.chunk.first + row];
  if constexpr (kMode == Mode::sums_e || kMode == Mode::e) r.anchor = a.target_logit[row];
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
__device__ inline void epilogue(float (&d)[96], const Row (&rows)[2], const Arguments& a, int row0,
                                int valid, int column_tile) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int64_t column = a.first_column + int64_t{column_tile} * tile_columns;
  const int left = static_cast<int>(
      min(int64_t{tile_columns}, a.first_column + a.columns - column));  // columns of the tile
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + 8 * h;
    const int64_t target = rows[h].target - column;
    const bool has_target = target >= 0 && target < tile_columns;
    if (has_target) {
      const int own = static_cast<int>(target) - 2 * quad;
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
#pragma unroll
      for (int i = 0; i < 24; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = d[4 * i + 2 * h + c];
          const float log2_p = fmaf(x - rows[h].anchor, log2e, -rows[h].log2_sum);
          x = rows[h].factor * exp2_fast(fminf(log2_p, 0.0f));
        }
      }
      if (has_target) {
        const RowGradient& g = a.gradients[row];
        const float log_p = fminf((a.target_logit[row] - g.reference) - g.log_sum, 0.0f);
        const float x = target_draw(g.probability, g.onehot, exp_any(log_p), -expm1f(log_p));
        const int own = static_cast<int>(target) - 2 * quad;
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
        lift = row < valid ? exp_any(maximum - rows[h].anchor) : 0.0f;
      }
      float s0 = 0, s1 = 0;
#pragma unroll
      for (int i = 0; i < 24; ++i) {
        float& x = d[4 * i + 2 * h];
        float& y = d[4 * i + 2 * h + 1];
        // Not fma(x, log2(e), -m log2(e)): its rounding is an exponent where |m| is large.
        x = exp2_fast((x - reference) * log2e);
        y = exp2_fast((y - reference) * log2e);
        s0 += x;
        s1 += y;
        if constexpr (kMode != Mode::sums) x *= lift, y *= lift;
      }
      if constexpr (kMode != Mode::e) {
        float sum = s0 + s1;
        sum += __shfl_xor_sync(whole_warp, sum, 1);
        sum += __shfl_xor_sync(whole_warp, sum, 2);
        if (quad == 0 && row < valid) {
          const int64_t at = row * a.partials.segments + column_tile;
          a.partials.maximum[at] = maximum;
          a.partials.sum[at] = sum;
        }
      }
    }
    if constexpr (kMode != Mode::sums) {
      // Two lanes trade half of what they have: each then stores 4 neighbours, two of them 32
      // bytes.
      T* to = reinterpret_cast<T*>(a.panel.data) + row * a.panel.pitch + (column - a.panel.first);
      const int64_t end = (a.panel.columns + 3) / 4 * 4 - (column - a.panel.first);
      const bool odd = quad % 2 != 0;
      const bool writes = row < a.chunk.rows;
#pragma unroll
      for (int i = 0; i < 24; i += 2) {
        alignas(4) T low[2] = {from_f32<T>(d[4 * i + 2 * h]), from_f32<T>(d[4 * i + 2 * h + 1])};
        alignas(4)
            T high[2] = {from_f32<T>(d[4 * i + 4 + 2 * h]), from_f32<T>(d[4 * i + 5 + 2 * h])};
        const uint32_t own = *reinterpret_cast<uint32_t*>(odd ? high : low);
        const uint32_t other =
            __shfl_xor_sync(whole_warp, *reinterpret_cast<uint32_t*>(odd ? low : high), 1);
        const int j = odd ? 8 * (i + 1) + 2 * (quad - 1) : 8 * i + 2 * quad;
        const uint2 four = odd ? uint2{other, own} : uint2{own, other};
        if (writes && j < end) __stcs(reinterpret_cast<uint2*>(to + j), four);
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
  uint8_t* shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + stages * stage_bytes);
  uint64_t* empty = full + stages;
  const int warpgroup = __shfl_sync(whole_warp, static_cast<int>(threadIdx.x / 128), 0);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, 4);  // two warpgroups of two blocks
    }
    fence_barrier_init();
    prefetch_map(&input_map);
    prefetch_map(&weight_map);
  }
  cluster_sync();

  const int valid = valid_rows(a.chunk);
  const Schedule schedule{(valid + cluster_rows - 1) / cluster_rows,
                          static_cast<int>((a.columns + tile_columns - 1) / tile_columns)};
  const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
  Ring ring;
  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      for (int t = cluster; t < schedule.tiles(); t += clusters) {
        int row_cluster, column_tile;
        schedule.find(t, &row_cluster, &column_tile);
        const int row = row_cluster * cluster_rows + static_cast<int>(rank) * tile_rows;
        const int column = static_cast<int>(a.first_column) + column_tile * tile_columns +
                           static_cast<int>(rank) * half_weight_rows;
        for (int k = 0; k < a.depth_tiles; ++k, ring.next()) {
          wait(empty + ring.stage, ring.phase ^ 1);
          uint8_t* stage = shared + ring.stage * stage_bytes;
          expect_bytes(full + ring.stage, stage_bytes);
          load_box(&input_map, full + ring.stage, stage, k * tile_depth, row);
          load_box_to(&weight_map, full + ring.stage,
                      stage + input_bytes + rank * (weight_bytes / 2), k * tile_depth, column, 3);
        }
      }
    }
    __syncwarp();
  } else {
    more_registers<240>();
    const int group_row = (warpgroup - 1) * 128 + static_cast<int>(threadIdx.x % 128) / 32 * 16 +
                          static_cast<int>(threadIdx.x % 32) / 4;
    const uint32_t signals = threadIdx.x % 128;
    float upper[96], lower[96];
    for (int t = cluster; t < schedule.tiles(); t += clusters) {
      int row_cluster, column_tile;
      schedule.find(t, &row_cluster, &column_tile);
      const int row = row_cluster * cluster_rows + static_cast<int>(rank) * tile_rows + group_row;
      const Row upper_rows[2] = {load_row<kMode>(a, row, valid),
                                 load_row<kMode>(a, row + 8, valid)};
      const Row lower_rows[2] = {load_row<kMode>(a, row + 64, valid),
                                 load_row<kMode>(a, row + 72, valid)};
      int previous = -1;
#pragma unroll 1
      for (int k = 0; k < a.depth_tiles; ++k, ring.next()) {
        const uint8_t* stage = shared + ring.stage * stage_bytes;
        const uint64_t input = descriptor(stage + (warpgroup - 1) * (128 * 128));
        const uint64_t weight = descriptor(stage + input_bytes);
        wait(full + ring.stage, ring.phase);
        products_begin();
#pragma unroll
        for (int step = 0; step < tile_depth / 16; ++step) {
          const int add = k > 0 || step > 0;
          product_64x192<T>(upper, input + step * depth_step, weight + step * depth_step, add);
          product_64x192<T>(lower, input + step * depth_step + (64 * 128 >> 4),
                            weight + step * depth_step, add);
        }
        products_commit();
        products_wait<1>();
        if (previous >= 0 && signals < 2) arrive_at(empty + previous, signals);
        previous = ring.stage;
      }
      products_wait<0>();
      if (signals < 2) arrive_at(empty + previous, signals);
      epilogue<T, kMode>(upper, upper_rows, a, row, valid, column_tile);
      epilogue<T, kMode>(lower, lower_rows, a, row + 64, valid, column_tile);
    }
  }
  cluster_sync();  // no block ends while another may signal it
#endif
}

// Rows of the panel that no tile covers, of tokens that do not count: zeros for the products.
template <class T>
__global__ void __launch_bounds__(256) zero_tail_kernel(Chunk chunk, Panel panel) {
  const int64_t counted = chunk.tokens.scalars->valid - chunk.first;
  const int64_t valid = max(int64_t{0}, min(counted, int64_t{chunk.rows}));
  const int64_t covered = (valid + cluster_rows - 1) / cluster_rows * cluster_rows;
  for (int64_t row = covered + blockIdx.x; row < chunk.rows; row += gridDim.x) {
    uint32_t* to =
        reinterpret_cast<uint32_t*>(reinterpret_cast<T*>(panel.data) + row * panel.pitch);
    for (int64_t j = threadIdx.x; j < panel.pitch / 2; j += 256) to[j] = 0;
  }
}

}  // namespace logitless::cuda::sm90
