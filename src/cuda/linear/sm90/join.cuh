// SPDX-License-Identifier: Apache-2.0
// Adds the slots of a product's last tiles if these were cut into slices (cut.h).
#pragma once

#include "src/cuda/linear/sm90/product_rows.cuh"
#include "src/cuda/runtime/early.cuh"

namespace logitless::cuda::sm90 {

// A block adds the slots of a sliced tile, in order, for 64 rows and 16 columns.
constexpr int join_parts = 12;  // blocks that share a tile's columns

template <Gradient kGradient, class Out>
__global__ void __launch_bounds__(128, 6) join_kernel(const __grid_constant__ ProductArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // The tokens were counted before the product started, so find_work need not wait for it.
  const Work work = find_work<kGradient>(a);
  wait_for_kernel_before();
  let_next_start();
  const Cut& cut = work.cut;
  const int slices = cut.slices;
  constexpr int fours = 24 / join_parts, together = 4;  // slots loaded at a time
  for (int item = blockIdx.x; item < 8 * join_parts * cut.tail; item += gridDim.x) {
    const int at = item / join_parts / 8, part = item / join_parts % 8, columns = item % join_parts;
    int row_cluster, column_tile;
    work.schedule.find(cut.whole() + at, &row_cluster, &column_tile);
    const int row = row_cluster * cluster_rows + part * 64;
    if (row >= work.rows) continue;  // rows that no warpgroup has written
    float d[4 * fours];
#pragma unroll
    for (int i = 0; i < 4 * fours; ++i) d[i] = 0;
    for (int first = 0; first < slices; first += together) {
      float4 x[together][fours];
#pragma unroll
      for (int n = 0; n < together; ++n) {
        if (first + n >= slices) break;
        const int slot = (first + n) * cut.tail + at;
        const float4* from = slot_part(a, slot, part) + columns * fours * 128;
#pragma unroll
        for (int i = 0; i < fours; ++i) x[n][i] = from[i * 128];
      }
#pragma unroll
      for (int n = 0; n < together; ++n) {
        if (first + n >= slices) break;
#pragma unroll
        for (int i = 0; i < fours; ++i) {
          const float4& y = x[n][i];
          d[4 * i] += y.x, d[4 * i + 1] += y.y, d[4 * i + 2] += y.z, d[4 * i + 3] += y.w;
        }
      }
    }
    const int column = column_tile * tile_columns + columns * 8 * fours;
    write_rows<kGradient, Out>(d, a, work, row + thread_row(1), column,
                               [&](int j) { return line_pair(a, column + j); });
  }
#endif
}

}  // namespace logitless::cuda::sm90
