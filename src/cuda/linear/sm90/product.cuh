// SPDX-License-Identifier: Apache-2.0
// The gradients' products on Hopper, on the tile of tile.cuh:
//   grad_input  [tokens, D] = panel [tokens, columns] . weight [columns, D]
//   grad_weight [columns, D] = panel [tokens, columns]^T . input [tokens, D]
// Neither operand is transposed in memory: tensor cores can read along either axis. The number of
// tokens that count is read on the device, so ignored tokens take no time. A tile's sums are
// written during other products (product_rows.cuh): its upper rows' during the last step's lower
// products, its lower rows' during the next tile's first.
#pragma once

#include "src/cuda/linear/sm90/product_rows.cuh"

namespace logitless::cuda::sm90 {

// Writes 64 rows of an item, the upper (part 0) or lower half, to the output or to a slice's slot.
template <Gradient kGradient, class Out>
__device__ __forceinline__ void write_half(const float (&d)[96], const ProductArguments& a,
                                           const Work& work, int item, int part, int warpgroup,
                                           const float* line) {
  const Cut& cut = work.cut;
  const int rank = a.team.rank();
  if (item >= cut.whole()) {
    float4* to = slot_part(a, item - cut.whole(), rank * 4 + (warpgroup - 1) * 2 + part);
#pragma unroll
    for (int i = 0; i < 24; ++i) {
      to[i * 128] = {d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
    }
    return;
  }
  int row_cluster, column_tile;
  work.schedule.find(item, &row_cluster, &column_tile);
  const int row = row_cluster * cluster_rows + rank * tile_rows + thread_row(warpgroup) + 64 * part;
  write_rows<kGradient, Out>(d, a, work, row, column_tile * tile_columns,
                             [&](int j) { return *reinterpret_cast<const float2*>(line + j); });
}

// Whether a warpgroup copies the smoothing's line of a tile's columns to shared memory: during
// products a load takes some 200 cycles, and the sums leave no registers for many loads in flight.
// Slices have no line; join.cuh subtracts it.
__device__ inline bool has_line(const ProductArguments& a, const Work& work, int item) {
  return a.line != nullptr && item < work.cut.whole();
}
__device__ __forceinline__ void copy_line(const ProductArguments& a, const Work& work, int item,
                                          int warpgroup, float* line) {
  if (!has_line(a, work, item)) return;
  int row_cluster, column_tile;
  work.schedule.find(item, &row_cluster, &column_tile);
  group_sync(warpgroup);  // the previous tile is written, so its line is free
  const int j = 2 * static_cast<int>(threadIdx.x % 128);
  if (j >= tile_columns) return;
  *reinterpret_cast<float2*>(line + j) = line_pair(a, column_tile * tile_columns + j);
}

// The maps of one product, for a launch or for the clusters that compute it. grad_input's left
// operand may be in two places.
struct Operands {
  CUtensorMap left, behind, right;
};

// Copies both operands of every item for the multiplying warpgroups. Each lane copies one box, so
// that none needs more than one address: lane 0 the left operand's, lanes 1 to 3 the right one's,
// of which a team's block loads 32 of the 64 along the depth for both; alone it loads both halves.
template <Gradient kGradient, int kStages = stages>
__device__ inline void copy_operands(const Operands& operands, const ProductArguments& a,
                                     const Work& work, int cluster, const Pipeline& pipeline) {
  constexpr bool is_input = kGradient == Gradient::input;
  const Cut& cut = work.cut;
  const int rank = a.team.rank();
  const int lane = static_cast<int>(threadIdx.x), box = lane - 1;
  if (lane > a.right_boxes) return;
  const int half = rank * (tile_depth / 2);
  const uint32_t offset = left_bytes + rank * half_right_bytes + box * right_block_bytes;
  RingOf<kStages> ring;
  for (int item = cluster; item < cut.items(); item += a.teams) {
    int row_cluster, column_tile;
    work.schedule.find(cut.tile(item), &row_cluster, &column_tile);
    const int row = row_cluster * cluster_rows + rank * tile_rows;
    const int across = 64 * box + column_tile * tile_columns;
    const bool blocks = a.right_boxes == 1;
    const int x = blocks ? 0 : across, z = blocks ? across / 64 : 0;
    const int end = cut.end(item);
    for (int k = cut.begin(item); k < end; ++k, ring.next()) {
      uint64_t* full = pipeline.full + ring.stage;
      wait(pipeline.empty + ring.stage, ring.phase ^ 1);
      uint8_t* to = pipeline.left(ring.stage);
      if (lane == 0) {
        expect_bytes(full, a.left_rows * tile_depth * 2 + right_bytes);
        if constexpr (is_input) {
          const bool behind = k >= a.steps_in_front;
          const int block = behind ? k - a.steps_in_front : k;
          load_box(behind ? &operands.behind : &operands.left, full, to, 0,
                   block * a.panel_rows + a.first_row + row);
        } else {
          load_blocks(&operands.left, full, to, 0, k * tile_depth, row / 64);
        }
      } else {
        if (!a.team.apart) {
          load_blocks_to(&operands.right, full, to + offset, x, k * tile_depth + half, z, 3);
          continue;
        }
        load_blocks(&operands.right, full, to + offset, x, k * tile_depth, z);
        load_blocks(&operands.right, full, to + offset + half_right_bytes, x,
                    k * tile_depth + tile_depth / 2, z);
      }
    }
  }
}

// Three loops: for a warpgroup without rows; for items of one step or none, one after the other;
// and for all others, whose sums are written during products. Force-inlined, with everything it
// calls, because ptxas allows no products in flight across a call.
template <class T, Gradient kGradient, class Out>
__device__ __forceinline__ void multiply_items(const ProductArguments& a, const Work& work,
                                               int cluster, const Pipeline& pipeline, int warpgroup,
                                               float* line) {
  constexpr Along left_along = kGradient == Gradient::input ? Along::depth : Along::rows;
  const Cut& cut = work.cut;
  const uint32_t signals = threadIdx.x % 128;
  const auto release = [&](int stage) { a.team.release(pipeline.empty + stage, signals); };
  const auto multiply = [&](float(&d)[96], int stage, bool is_lower, bool first) {
    const StageOperands now(pipeline, stage, warpgroup);
    multiply_rows<T, left_along, Along::rows>(d, now.left + (is_lower ? lower_left : 0), now.right,
                                              first);
  };
  Ring ring;
  if (kGradient == Gradient::input && !has_some(warpgroup, a.rows)) {
    for (int item = cluster; item < cut.items(); item += a.teams) {
      skip_tile(cut.end(item) - cut.begin(item), pipeline, &ring, a.team);
    }
    return;
  }
  int item = cluster;
  if (item >= cut.items()) return;
  float upper[96], lower[96];
  if (work.depth < 2 * cut.slices) {  // items of one step, or none
    for (; item < cut.items(); item += a.teams) {
      if (work.depth == 0) {
#pragma unroll
        for (int i = 0; i < 96; ++i) upper[i] = lower[i] = 0;
      }
      copy_line(a, work, item, warpgroup, line);
      multiply_tile<T, left_along, Along::rows>(upper, lower, cut.end(item) - cut.begin(item),
                                                pipeline, &ring, warpgroup, a.team);
      if (has_line(a, work, item)) group_sync(warpgroup);
      write_half<kGradient, Out>(upper, a, work, item, 0, warpgroup, line);
      write_half<kGradient, Out>(lower, a, work, item, 1, warpgroup, line);
    }
    return;
  }
  wait(pipeline.full + ring.stage, ring.phase);
  multiply(upper, ring.stage, false, true);
  multiply(lower, ring.stage, true, true);
  do {  // with the first step in flight
    copy_line(a, work, item, warpgroup, line);
    const int steps = cut.end(item) - cut.begin(item);
    int previous = ring.stage;
    ring.next();
#pragma unroll 1
    for (int k = 2; k < steps; ++k) {
      const StageOperands now(pipeline, ring.stage, warpgroup);
      wait(pipeline.full + ring.stage, ring.phase);
      multiply_stage<T, left_along, Along::rows>(upper, lower, now.left, now.right, true);
      products_wait<1>();
      release(previous);
      previous = ring.stage;
      ring.next();
    }
    wait(pipeline.full + ring.stage, ring.phase);
    multiply(upper, ring.stage, false, false);
    products_wait<1>();
    release(previous);
    multiply(lower, ring.stage, true, false);
    previous = ring.stage;
    ring.next();
    products_wait<1>();
    if (has_line(a, work, item)) group_sync(warpgroup);
    write_half<kGradient, Out>(upper, a, work, item, 0, warpgroup, line);
    // After the last item it multiplies arbitrary memory; the result is not used.
    if (item + a.teams < cut.items()) wait(pipeline.full + ring.stage, ring.phase);
    multiply(upper, ring.stage, false, true);
    products_wait<1>();
    release(previous);
    write_half<kGradient, Out>(lower, a, work, item, 1, warpgroup, line);
    multiply(lower, ring.stage, true, true);
    item += a.teams;
  } while (item < cut.items());
  products_wait<0>();
}

template <class T, Gradient kGradient, class Out>
__device__ __forceinline__ void run_product(const Operands& operands, const ProductArguments& a,
                                            Work* shared_work, float* lines, int cluster,
                                            const Pipeline& pipeline) {
  const int warpgroup = __shfl_sync(whole_warp, static_cast<int>(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    prefetch_map(&operands.left);
    prefetch_map(&operands.right);
    *shared_work = find_work<kGradient>(a);
  }
  cluster_sync();
  if (warpgroup == 0) {
    fewer_registers<40>();
    copy_operands<kGradient>(operands, a, *shared_work, cluster, pipeline);
    __syncwarp();
  } else {
    more_registers<232>();
    multiply_items<T, kGradient, Out>(a, *shared_work, cluster, pipeline, warpgroup,
                                      lines + (warpgroup - 1) * tile_columns);
  }
}

template <class T, Gradient kGradient, class Out>
__global__ void __launch_bounds__(block_threads, 1)
    product_kernel(const __grid_constant__ Operands operands,
                   const __grid_constant__ ProductArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  // In shared memory, because the sums take the registers.
  __shared__ Work work;
  __shared__ alignas(8) float lines[2 * tile_columns];
  const Pipeline pipeline = open_pipeline(dynamic);
  run_product<T, kGradient, Out>(operands, a, &work, lines, a.team.number(), pipeline);
  cluster_sync();  // a block must not exit while another may signal it
#endif
}

}  // namespace logitless::cuda::sm90
