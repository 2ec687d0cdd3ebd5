// SPDX-License-Identifier: Apache-2.0
// The tile of Hopper's products: left [256, depth] . right [192, depth]^T, 64 deep at a time
// through a ring of 4 stages. A persistent block has 3 warpgroups: one copies (TMA), two of 128
// rows each multiply (two m64n192k16 each with one descriptor of the right operand). Two blocks of
// a cluster, one below the other, share the right operand, each loading half of it for both.
// docs/kernels/hopper.md shows it.
#pragma once

#include "src/cuda/linear/sm90/tile.h"
#include "src/cuda/linear/sm90/tma.cuh"
#include "src/cuda/linear/sm90/wgmma.cuh"
#include "src/host_device.h"

namespace logitless::cuda::sm90 {

constexpr int stages = 4;
constexpr int left_bytes = tile_rows * tile_depth * 2, right_bytes = tile_columns * tile_depth * 2;
constexpr int stage_bytes = left_bytes + right_bytes;
// 64 rows of the left operand, whichever axis is contiguous in memory.
constexpr int left_block_bytes = 64 * 128;
// The right operand comes in two halves, one from each block of the cluster. They divide its rows
// if the depth is contiguous in memory, and the depth if rows are.
constexpr int half_right_bytes = right_bytes / 2, right_block_bytes = 32 * 128;
constexpr int shared_bytes = stages * stage_bytes + 1024 + 128;
constexpr int block_threads = 384;

// Who computes a tile: the two blocks of a cluster, or a single block (tiled/teams.h).
struct Team {
  bool apart;
  __device__ int rank() const { return apart ? 0 : static_cast<int>(cluster_rank()); }
  __device__ int number() const { return static_cast<int>(apart ? blockIdx.x : blockIdx.x / 2); }
  __device__ int count() const { return static_cast<int>(apart ? gridDim.x : gridDim.x / 2); }
  // Called when a warpgroup has finished with a stage: lanes 0 and 1 signal its producers.
  __device__ void release(uint64_t* empty, uint32_t lane) const {
    if (lane < 2) arrive_at(empty, apart ? cluster_rank() : lane);
  }
};
// Whether a warpgroup has any of `rows` rows; one without rows skips the stages.
__device__ inline bool has_some(int warpgroup, int rows) { return (warpgroup - 1) * 128 < rows; }

// The position of tile t: rows of tiles vary fastest, in groups of `group` clusters, then columns.
struct Schedule {
  int row_clusters, column_tiles, group;
  LOGITLESS_HOST_DEVICE int tiles() const { return row_clusters * column_tiles; }
  __device__ void find(int t, int* row_cluster, int* column_tile) const {
    const int per_group = group * column_tiles, full = row_clusters / group;
    const int at = min(t / per_group, full);
    const int width = at < full ? group : row_clusters - full * group;
    const int rest = t - at * per_group;
    *row_cluster = at * group + rest % width;
    *column_tile = rest / width;
  }
};

template <int kStages>
struct RingOf {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};
using Ring = RingOf<stages>;

// The stages and their barriers in shared memory.
struct Pipeline {
  uint8_t* shared;
  uint64_t* full;   // completes with one arrival and the bytes of a stage
  uint64_t* empty;  // completes with 4 arrivals: two warpgroups of two blocks, or two lanes of
                    // the two warpgroups of one block
  __device__ uint8_t* left(int stage) const { return shared + stage * stage_bytes; }
  __device__ uint8_t* right(int stage) const { return left(stage) + left_bytes; }
};

// cluster_sync must follow before the barriers are used.
__device__ inline Pipeline open_pipeline(uint8_t* dynamic) {
  Pipeline p;
  p.shared = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
  p.full = reinterpret_cast<uint64_t*>(p.shared + stages * stage_bytes);
  p.empty = p.full + stages;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(p.full + s, 1);
      barrier_init(p.empty + s, 4);
    }
    fence_barrier_init();
  }
  return p;
}

// The row of the tile that the thread's elements d[4 i + {0, 1}] of `upper` belong to; d[4 i + {2,
// 3}] are 8 rows below, those of `lower` 64.
__device__ inline int thread_row(int warpgroup) {
  return (warpgroup - 1) * 128 + static_cast<int>(threadIdx.x % 128) / 32 * 16 +
         static_cast<int>(threadIdx.x % 32) / 4;
}

// What to add to a descriptor to get step `step` of 16, of a stage's depth of 64.
template <Along kAlong>
constexpr uint64_t left_step(int step) {
  return (kAlong == Along::rows ? step * 16 * 128 : step * 32) >> 4;
}
template <Along kAlong>
constexpr uint64_t right_step(int step) {
  const int halves = step / 2 * half_right_bytes + step % 2 * 16 * 128;
  return (kAlong == Along::rows ? halves : step * 32) >> 4;
}

// TMA stores a warpgroup's results in boxes of 64 rows x 64 columns.
constexpr int box_rows = 64, box_bytes = box_rows * 128;

// Writes four 8 x 8 blocks of a warp's 16 rows of a box: the 16 columns of group `two` of four.
__device__ inline void write_matrices(const uint8_t* box, int two, const uint32_t (&x)[4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int chunk = (2 * two + lane / 16) ^ lane % 8;  // the box is swizzled
  const uint32_t to = shared_address(box) + (16 * warp + lane % 16) * 128 + chunk * 16;
  store_matrices(to, x);
}

// A warpgroup's descriptors for a stage of the ring; left + lower_left is for its lower 64 rows.
struct StageOperands {
  uint64_t left, right;
  __device__ StageOperands(const Pipeline& pipeline, int stage, int warpgroup)
      : left(descriptor(pipeline.left(stage) + (warpgroup - 1) * 2 * left_block_bytes, 16)),
        right(descriptor(pipeline.right(stage), right_block_bytes)) {}
};
constexpr uint64_t lower_left = left_block_bytes >> 4;

// Starts a stage's products of a warpgroup's 128 rows. If `on_top`, they are added to the
// accumulators.
template <class T, Along kLeft, Along kRight>
__device__ inline void multiply_stage(float (&upper)[96], float (&lower)[96], uint64_t left,
                                      uint64_t right, bool on_top) {
  products_begin();
#pragma unroll
  for (int step = 0; step < tile_depth / 16; ++step) {
    const int add = on_top || step > 0;
    const uint64_t a = left + left_step<kLeft>(step), b = right + right_step<kRight>(step);
    product_64x192<T, kLeft, kRight>(upper, a, b, add);
    product_64x192<T, kLeft, kRight>(lower, a + lower_left, b, add);
  }
  products_commit();
}

// The same for 64 of the rows; if `first`, they replace the accumulators.
template <class T, Along kLeft, Along kRight>
__device__ inline void multiply_rows(float (&d)[96], uint64_t left, uint64_t right, bool first) {
  products_begin();
#pragma unroll
  for (int step = 0; step < tile_depth / 16; ++step) {
    product_64x192<T, kLeft, kRight>(d, left + left_step<kLeft>(step),
                                     right + right_step<kRight>(step), !first || step > 0);
  }
  products_commit();
}

// Multiplies a warpgroup's 128 rows of a tile, over `depth_tiles` stages of the ring. One group of
// products is in flight while the previous group's stage is released.
template <class T, Along kLeft, Along kRight, int kStages>
__device__ inline void multiply_tile(float (&upper)[96], float (&lower)[96], int depth_tiles,
                                     const Pipeline& pipeline, RingOf<kStages>* ring, int warpgroup,
                                     const Team& team) {
  const uint32_t lane = threadIdx.x % 128;
  int previous = -1;
#pragma unroll 1
  for (int k = 0; k < depth_tiles; ++k, ring->next()) {
    const StageOperands now(pipeline, ring->stage, warpgroup);
    wait(pipeline.full + ring->stage, ring->phase);
    multiply_stage<T, kLeft, kRight>(upper, lower, now.left, now.right, k > 0);
    products_wait<1>();
    if (previous >= 0) team.release(pipeline.empty + previous, lane);
    previous = ring->stage;
  }
  products_wait<0>();
  if (previous >= 0) team.release(pipeline.empty + previous, lane);
}

// Skips a tile in which this warpgroup has no rows. Only one warp does this: no products keep the
// four warps together, and a barrier can only distinguish two consecutive rounds of the ring.
__device__ inline void skip_tile(int depth_tiles, const Pipeline& pipeline, Ring* ring,
                                 const Team& team) {
  if (threadIdx.x % 128 >= 32) return;
  for (int k = 0; k < depth_tiles; ++k, ring->next()) {
    wait(pipeline.full + ring->stage, ring->phase);
    team.release(pipeline.empty + ring->stage, threadIdx.x % 32);
  }
}

}  // namespace logitless::cuda::sm90
