// SPDX-License-Identifier: Apache-2.0
// How kernels divide a block of raw logits: a warp handles one row and one segment of 1024 columns,
// a lane the columns 128 i + 4 lane + {0, 1, 2, 3}. Which thread adds a column depends only on the
// column.
#pragma once

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/logit_map.cuh"

namespace logitless::cuda {

constexpr int warps_per_block = 8, groups = segment_columns / 128;

struct WarpTile {
  int row;         // within the chunk
  int64_t column;  // the segment's first column of the vocabulary
  int count;       // columns of the segment in the block
  const float* logits;
};

__device__ inline WarpTile tile_of(const Block& block, int row, int segment) {
  const int64_t offset = int64_t{segment} * segment_columns;
  return {.row = block.row + row,
          .column = block.column + offset,
          .count = static_cast<int>(min(int64_t{segment_columns}, block.columns - offset)),
          .logits = block.logits + row * block.pitch + offset};
}
// Returns false if this warp has no row.
__device__ inline bool find_tile(const Block& block, WarpTile* tile) {
  const int row = blockIdx.x * warps_per_block + threadIdx.x / 32;
  if (row >= block.rows) return false;
  *tile = tile_of(block, row, static_cast<int>(blockIdx.y));
  return true;
}

inline dim3 grid_of(const Block& block) {
  return {blocks_for(block.rows, warps_per_block), blocks_for(block.columns, segment_columns), 1};
}

// Loads four raw logits of the tile from `j` on; those after the last column become -inf.
__device__ inline void load_raw(const WarpTile& tile, int j, float z[4]) {
  if (j + 3 < tile.count) {
    const float4 raw = *reinterpret_cast<const float4*>(tile.logits + j);
    z[0] = raw.x, z[1] = raw.y, z[2] = raw.z, z[3] = raw.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = j + i < tile.count ? tile.logits[j + i] : -infinity();
  }
}
__device__ inline void map_four(const LinearCall& call, const MapFactors& map, const WarpTile& tile,
                                int j, float z[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (j + i >= tile.count) continue;
    if (present(call.bias)) z[i] += load(call.bias, tile.column + j + i);
    z[i] = map_raw(map, z[i]);
  }
}
template <bool kPlain>
__device__ void load_four(const LinearCall& call, const MapFactors& map, const WarpTile& tile,
                          int j, float z[4]) {
  load_raw(tile, j, z);
  if constexpr (!kPlain) map_four(call, map, tile, j, z);
}

// Stores four consecutive elements of a panel's row; `to` is aligned to four elements.
template <class T>
__device__ void store_four(const float x[4], int count, T* to) {
  if (count >= 4) {
    alignas(16) T packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = from_f32<T>(x[i]);
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(packed);
    } else {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(packed);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (i < count) to[i] = from_f32<T>(x[i]);
    }
  }
}

// store_four for codes of E, from the log2 of E.
__device__ inline void store_codes(const float log2_e[4], int count, __half* to) {
  const uint32_t codes[2] = {encode_logs(log2_e[0], log2_e[1]), encode_logs(log2_e[2], log2_e[3])};
  if (count >= 4) {
    *reinterpret_cast<uint2*>(to) = {codes[0], codes[1]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const auto code = static_cast<uint16_t>(codes[i / 2] >> 16 * (i % 2));
    if (i < count) to[i] = __ushort_as_half(code);
  }
}

template <class T>
__device__ T* panel_row(const Panel& panel, const WarpTile& tile) {
  return reinterpret_cast<T*>(panel.data) + tile.row * panel.pitch + (tile.column - panel.first);
}

}  // namespace logitless::cuda
