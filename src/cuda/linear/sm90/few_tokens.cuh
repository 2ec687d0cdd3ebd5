// SPDX-License-Identifier: Apache-2.0
// grad_weight [columns, D] = panel^T . input of few tokens on Hopper. Time is mostly spent on
// writing V D elements. A tile has few steps of depth, too few for product.cuh to hide its stores
// under products, and stores from registers reach half of the memory's speed. Here a tile goes
// through shared memory, 64 rows of a warpgroup at a time, and TMA stores it during the next
// products. Three stages of the ring hold operands, the fourth stage's memory the boxes. Sums have
// the bits of product.cuh.
#pragma once

#include "src/cuda/linear/sm90/product.cuh"

namespace logitless::cuda::sm90 {

constexpr int few_stages = stages - 1, half_boxes = tile_columns / 64;
static_assert(2 * half_boxes * box_bytes <= stage_bytes);

// Writes 64 rows of a warpgroup's sums to the three boxes starting at `boxes`.
template <class T>
__device__ __forceinline__ void write_boxes(const float (&d)[96], float scale,
                                            const uint8_t* boxes) {
#pragma unroll
  for (int block = 0; block < half_boxes; ++block) {
#pragma unroll
    for (int two = 0; two < 4; ++two) {
      uint32_t packed[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = 8 * block + 2 * two + n / 2, h = n % 2;
        packed[n] = pack<T>(scale * d[4 * i + 2 * h], scale * d[4 * i + 2 * h + 1]);
      }
      write_matrices(boxes + block * box_bytes, two, packed);
    }
  }
}

template <class T>
__device__ __forceinline__ void multiply_few(const CUtensorMap* out, const ProductArguments& a,
                                             const Work& work, int cluster,
                                             const Pipeline& pipeline, int warpgroup) {
  float upper[96], lower[96];
  const float scale = a.scaled ? a.chunk.tokens.scalars->gradient_scale : 1.0f;
  const bool stores = threadIdx.x % 128 == 0;
  const uint8_t* boxes = pipeline.left(few_stages) + (warpgroup - 1) * half_boxes * box_bytes;
  // Writes 64 rows of the tile, from `row` on.
  const auto write = [&](const float(&d)[96], int row, int column) {
    if (stores) stores_wait();  // the boxes of the rows before have been read
    group_sync(warpgroup);
    write_boxes<T>(d, scale, boxes);
    fence_copies();
    group_sync(warpgroup);
    if (!stores || row >= a.rows) return;
#pragma unroll
    for (int box = 0; box < half_boxes; ++box) {
      if (column + 64 * box >= a.columns) break;
      store_box_at(out, boxes + box * box_bytes, column + 64 * box, row);
    }
  };
  RingOf<few_stages> ring;
  for (int tile = cluster; tile < work.cut.tiles; tile += a.teams) {
    if (work.depth == 0) {
#pragma unroll
      for (int i = 0; i < 96; ++i) upper[i] = lower[i] = 0;
    }
    multiply_tile<T, Along::rows, Along::rows>(upper, lower, work.depth, pipeline, &ring, warpgroup,
                                               a.team);
    int row_cluster, column_tile;
    work.schedule.find(tile, &row_cluster, &column_tile);
    const int row = row_cluster * cluster_rows + a.team.rank() * tile_rows + (warpgroup - 1) * 128;
    write(upper, row, column_tile * tile_columns);
    write(lower, row + box_rows, column_tile * tile_columns);
  }
  if (stores) stores_wait();
}

template <class T>
__global__ void __launch_bounds__(block_threads, 1)
    few_tokens_kernel(const __grid_constant__ Operands operands,
                      const __grid_constant__ CUtensorMap out,
                      const __grid_constant__ ProductArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  __shared__ Work work;
  const Pipeline pipeline = open_pipeline(dynamic);
  const int warpgroup = __shfl_sync(whole_warp, static_cast<int>(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    prefetch_map(&operands.left);
    prefetch_map(&operands.right);
    prefetch_map(&out);
    work = find_work<Gradient::weight>(a);
  }
  cluster_sync();
  if (warpgroup == 0) {
    fewer_registers<40>();
    copy_operands<Gradient::weight, few_stages>(operands, a, work, a.team.number(), pipeline);
    __syncwarp();
  } else {
    more_registers<232>();
    multiply_few<T>(&out, a, work, a.team.number(), pipeline, warpgroup);
  }
  cluster_sync();  // a block must not exit while another may signal it
#endif
}

}  // namespace logitless::cuda::sm90
