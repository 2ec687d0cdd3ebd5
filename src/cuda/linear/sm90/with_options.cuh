// SPDX-License-Identifier: Apache-2.0
// The forward modes with options (forward.cuh): bias, the map from raw to z, more statistics, more
// terms of dz. A warpgroup's epilogue runs during the other one's products: the second warpgroup
// starts later by the ring's stages, and stays that much later.
//   warpgroup 1   products of t   | epilogue of t | products of t + 1 ...
//   warpgroup 2   ... epilogue of t - 1 | products of t        | epilogue of t ...
// During its epilogue each warp has a scheduler to itself: time depends on the number of
// instructions per element, so the most common options have their own kernels (Set). Exponentials
// are relative to the anchor z_t, as in plain.cuh; option_sums.cuh explains rows that are too far
// from it, and the sums. E and dz are stored through the stage of the last step, each warp's 16
// rows separately.
#pragma once

#include "src/cuda/linear/sm90/option_sums.cuh"
#include "src/cuda/linear/units.cuh"
#include "src/row/gradient.h"

namespace logitless::cuda::sm90 {

// Code that runs once per tile is also fetched once per tile. So long code of sums has one copy for
// both halves of the rows, and long code of dz one copy for all columns. Short code has more
// copies, because moving the next logits into the registers that it works on would cost more.
template <Set kSet>
constexpr bool is_long = is_any<kSet> || has_cap<kSet>;
template <Mode kMode, Set kSet>
constexpr int halves_at_once = is_long<kSet> && kMode != Mode::dz ? 1 : 2;
template <Mode kMode, Set kSet>
constexpr int blocks_at_once = is_long<kSet> && kMode == Mode::dz ? 1 : 3;

template <class T, Set kSet, bool kRare>
__device__ inline void draw_block(const float (&d)[96], const HalfRows& rows, const RowData& data,
                                  const LeftOut& mask, const Arguments& a, int valid, int column,
                                  uint32_t box) {
  const TileOptions& o = a.options;
  const float* weights = o.class_weight + column + 2 * (threadIdx.x % 4);
  const bool smooths = has_smoothing<kSet>(a);
  const bool forgets = is_any<kSet> && again(a.options.entropy);
  float smoothing[2] = {rows.smoothing[0], rows.smoothing[1]}, entropy[2] = {0, 0},
        value[2] = {0, 0}, target_gradient[2] = {0, 0}, backward[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (has_cap<kSet>) backward[h] = backward_of<kSet>(a, rows, valid, h);
    if constexpr (is_any<kSet>) {
      const RowGradient& g = a.gradients[min(rows.row + 8 * h, valid - 1)];
      smoothing[h] = g.smoothing, entropy[h] = g.entropy, value[h] = g.entropy_value;
      if constexpr (kRare) target_gradient[h] = a.target_gradient[min(rows.row + 8 * h, valid - 1)];
    } else if constexpr (kRare) {
      target_gradient[h] = of_row(data.target_gradient, rows.part, h);
    }
  }
#pragma unroll
  for (int two = 0; two < 4; ++two) {
    uint32_t packed[4];
    if (kRare && stops(a)) break;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = 2 * two + n / 2, h = n % 2;
      float draw[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float z = d[4 * i + 2 * h + c];
        const float log2_p = nonpositive(fmaf(z - rows.anchor[h], log2e, -rows.log2_sum[h]));
        const float p = exp2_fast(log2_p);
        const auto class_weight = [&] {
          return o.class_weight == nullptr ? 1.0f : __ldg(weights + 8 * i + c);
        };
        const float information = fmaxf(log2_p * ln2, least_exponent) + value[h];
        draw[c] = dz_of<Fused>(rows.factor[h] * p, smooths, smoothing[h], class_weight, forgets,
                               entropy[h] * p, information);
        if (has_cap<kSet>) draw[c] = capped(backward[h], z, draw[c]);
        if (kRare) {
          draw[c] = 8 * i + c >= mask.end[h] ? 0.0f : draw[c];
          draw[c] = 8 * i + c == mask.target[h] ? target_gradient[h] : draw[c];
        }
      }
      packed[n] = pack<T>(draw[0], draw[1]);
    }
    write_box(box, two, packed);
  }
}

// Stores z of 64 columns for top-k; the list takes the target's from elsewhere.
__device__ inline void store_logits(const float (&d)[96], const HalfRows& rows, const Arguments& a,
                                    int valid, int column) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = rows.row + 8 * h;
    asm volatile("" : "+r"(row));  // keeps the addresses out of registers until now
    if (row >= valid) continue;
    const int64_t from = row * a.panel.pitch + (column - a.panel.first) + 2 * (threadIdx.x % 4);
    float* to = reinterpret_cast<float*>(a.panel.data) + from;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      *reinterpret_cast<float2*>(to + 8 * n) = {d[4 * n + 2 * h], d[4 * n + 2 * h + 1]};
    }
  }
}

template <class T, Mode kMode, Set kSet>
__device__ inline void finish_half(float (&d)[96], const RowData& data, int row, int part,
                                   int column_tile, const Arguments& a, int valid,
                                   const CUtensorMap* panel_map, uint32_t boxes) {
  constexpr bool stores = kMode != Mode::sums;
  const int column = static_cast<int>(a.first_column) + column_tile * tile_columns;
  const HalfRows rows = find_rows<kMode>(data, row, part, column, column_tile);
  const bool masked = needs_mask<kMode>(data, rows, a, valid);
  Sums sums;
  constexpr int at_once = blocks_at_once<kMode, kSet>;
#pragma unroll at_once
  for (int block = 0; block < 3; ++block) {
    const uint32_t box = boxes + (part + block) % 2 * warp_box_bytes;
    const int first = column + 64 * block;
    const bool large = map_block<kSet>(d, a, rows, data, valid, first);
    if constexpr (stores) {
      if (threadIdx.x % 32 == 0) stores_wait<1>();
      __syncwarp();
    }
    if constexpr (kMode == Mode::sums && has_more<kSet>) {
      if (again(a.panel.data != nullptr)) store_logits(d, rows, a, valid, first);
    }
    const bool rare = masked || (kMode == Mode::sums_kept && large);
    if constexpr (kMode != Mode::dz) {
      add_columns<T, kMode, kSet>(d, rows, data, a, valid, first, block, box, rare, &sums);
    } else if (rare) {
      const LeftOut mask = find_left_out<kMode>(data, rows, a, valid, block);
      draw_block<T, kSet, true>(d, rows, data, mask, a, valid, first, box);
    } else {
      draw_block<T, kSet, false>(d, rows, data, LeftOut{}, a, valid, first, box);
    }
    if constexpr (stores) {
      fence_copies();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        const int panel_block = (first - static_cast<int>(a.panel.first)) / 64;
        store_box(panel_map, box_at(box), row, panel_block);
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {  // moves the next 64 columns to the working registers
      if constexpr (at_once == 1) {
        asm volatile("mov.b32 %0, %1;" : "=f"(d[i]) : "f"(d[i + 32]));
        asm volatile("mov.b32 %0, %1;" : "=f"(d[i + 32]) : "f"(d[i + 64]));
      } else {
        d[i] = d[i + 32], d[i + 32] = d[i + 64];
      }
    }
  }
  if constexpr (kMode != Mode::dz) {
    write_half<kSet>(rows, a, valid, sums);
  }
}

// Starts a stage's products of a warpgroup's 128 rows; if `first`, they replace the accumulators.
template <class T>
__device__ inline void multiply_step(float (&upper)[96], float (&lower)[96],
                                     const Pipeline& pipeline, int stage, int warpgroup,
                                     bool first) {
  const StageOperands now(pipeline, stage, warpgroup);
  multiply_stage<T, Along::depth, Along::depth>(upper, lower, now.left, now.right, !first);
}

// Prefetches into the L1 cache what the epilogue reads per column.
template <Mode kMode>
__device__ inline void fetch_columns(const Arguments& a, int column_tile) {
  const int lane = threadIdx.x % 128,
            column = static_cast<int>(a.first_column) + column_tile * tile_columns;
  if (lane >= 24) return;
  const bool weights = kMode == Mode::dz ? a.options.smoothing : a.partials.weighted != nullptr;
  if (a.options.bias != nullptr) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(a.options.bias + column + 8 * lane));
  }
  if (weights && a.options.class_weight != nullptr) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(a.options.class_weight + column + 8 * lane));
  }
}

template <class T, Mode kMode, Set kSet>
__device__ inline void option_tiles(const CUtensorMap* panel_map, const Pipeline& pipeline,
                                    const ForwardWork& work, int warpgroup, const Arguments& a) {
  constexpr bool stores = kMode != Mode::sums;
  constexpr int at_once = halves_at_once<kMode, kSet>;
  float upper[96], lower[96];
  const uint32_t signals = threadIdx.x % 128;
  const auto release = [&](int stage) { a.team.release(pipeline.empty + stage, signals); };
  const auto last = [](const Ring& r) { return (r.stage + stages - 1) % stages; };
  Ring ring;
  if (!has_some(warpgroup, a.chunk.rows)) {
    for (int t = a.team.number(); t < work.schedule.tiles(); t += a.team.count()) {
      skip_tile(a.depth_tiles, pipeline, &ring, a.team);
    }
    return;
  }
  if (warpgroup == 2 && a.team.number() < work.schedule.tiles()) {
    wait(pipeline.full + min(a.depth_tiles, stages) - 1, 0);  // the second warpgroup starts later
  }
  for (int t = a.team.number(); t < work.schedule.tiles(); t += a.team.count()) {
    int row_cluster, column_tile;
    work.schedule.find(t, &row_cluster, &column_tile);
    const int row = row_cluster * cluster_rows + a.team.rank() * tile_rows + thread_row(warpgroup);
    const RowData data = load_row<kMode, slopes_by_row<kSet>>(a, row, work.valid);
    fetch_columns<kMode>(a, column_tile);
    wait(pipeline.full + ring.stage, ring.phase);
    multiply_step<T>(upper, lower, pipeline, ring.stage, warpgroup, true);
    if (stores && t >= a.team.count()) {  // the previous tile's boxes must have been read
      if (signals % 32 == 0) stores_wait();
      group_sync(warpgroup);
      release(last(ring));
    }
    ring.next();
#pragma unroll 1
    for (int k = 1; k < a.depth_tiles; ++k, ring.next()) {
      wait(pipeline.full + ring.stage, ring.phase);
      multiply_step<T>(upper, lower, pipeline, ring.stage, warpgroup, false);
      products_wait<1>();
      release(last(ring));
    }
    products_wait<0>();
    uint32_t boxes = 0;
    if constexpr (stores) {
      group_sync(warpgroup);  // until no warp's products read the boxes
      boxes = lane_of_box(pipeline.left(last(ring)) + (warpgroup - 1) * 2 * left_block_bytes +
                          threadIdx.x % 128 / 32 * 2 * warp_box_bytes);
    } else {
      release(last(ring));
    }
#pragma unroll at_once
    for (int part = 0; part < 2; ++part) {
      finish_half<T, kMode, kSet>(upper, data, row + 64 * part, part, column_tile, a, work.valid,
                                  panel_map, boxes);
#pragma unroll
      for (int i = 0; i < 96; ++i) upper[i] = lower[i];
    }
  }
  if (stores && signals % 32 == 0) stores_wait();
}

template <class T, Mode kMode, Set kSet>
__global__ void __launch_bounds__(block_threads, 1)
    option_forward_kernel(const __grid_constant__ CUtensorMap input_map,
                          const __grid_constant__ CUtensorMap weight_map,
                          const __grid_constant__ CUtensorMap panel_map,
                          const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  const int warpgroup = __shfl_sync(whole_warp, static_cast<int>(threadIdx.x / 128), 0);
  __shared__ ForwardWork work;
  if (threadIdx.x == 0) {
    prefetch_map(&input_map);
    prefetch_map(&weight_map);
    if (kMode != Mode::sums) prefetch_map(&panel_map);
  }
  const Pipeline pipeline = open_pipeline(dynamic);
  if (threadIdx.x == 0) work = find_work(a);
  cluster_sync();
  if (warpgroup == 0) {
    fewer_registers<40>();
    if (threadIdx.x < 2) copy_tiles(&input_map, &weight_map, pipeline, work.schedule, a);
    __syncwarp();
  } else {
    more_registers<232>();
    option_tiles<T, kMode, kSet>(&panel_map, pipeline, work, warpgroup, a);
  }
  cluster_sync();  // a block must not exit while another may signal it
#endif
}

}  // namespace logitless::cuda::sm90
