// SPDX-License-Identifier: Apache-2.0
// The options for which a kernel is compiled, and the map of 64 rows of a tile, 64 columns at a
// time: d[0] to d[31] of a thread are its elements d[4 i + 2 h + c] of row 8 h and column 8 i + 2
// (lane % 4) + c.
#pragma once

#include "src/cuda/linear/sm90/forward.cuh"
#include "src/cuda/linear/sm90/options.cuh"

namespace logitless::cuda::sm90 {

// A kernel is compiled for one of these: a single option, or any options, with or without a
// softcap. `more` adds squares, rank, maps per row and z for top-k, which take registers.
enum class Set { capped, biased, smoothed, scaled, any, any_capped, more, more_capped };
template <Set kSet>
constexpr bool has_more = kSet == Set::more || kSet == Set::more_capped;
template <Set kSet>
constexpr bool is_any = kSet == Set::any || kSet == Set::any_capped || has_more<kSet>;
template <Set kSet>
constexpr bool has_cap = kSet == Set::capped || kSet == Set::any_capped || kSet == Set::more_capped;

// Always false, but the compiler cannot know, and so does not move work across it.
__device__ inline bool stops(const Arguments& a) { return again(a.depth_tiles == 0); }

template <Set kSet>
__device__ inline bool has_bias(const Arguments& a) {
  return is_any<kSet> ? again(a.options.bias != nullptr) : kSet == Set::biased;
}
// Whether raw -> z is a single factor, per row or for all.
template <Set kSet>
constexpr bool slopes_by_row = kSet == Set::scaled;
template <Set kSet>
__device__ inline bool has_scale(const Arguments& a) {
  if constexpr (kSet == Set::scaled) return true;
  return is_any<kSet> && again(!a.options.map.identity);
}
template <Set kSet>
__device__ inline bool is_weighted(const Arguments& a) {
  return is_any<kSet> ? again(a.partials.weighted != nullptr) : kSet == Set::smoothed;
}
template <Set kSet>
__device__ inline bool has_smoothing(const Arguments& a) {
  return is_any<kSet> ? again(a.options.smoothing) : kSet == Set::smoothed;
}

// 64 rows of a tile, and what this thread's two rows are relative to.
struct HalfRows {
  int row, part;  // row: the first; part: 0 in the upper half, 1 in the lower
  int column, column_tile;
  float anchor[2];                             // for E times log2(e), for dz the reference m
  float log2_sum[2], factor[2], smoothing[2];  // for dz only
};
template <Mode kMode>
__device__ inline HalfRows find_rows(const RowData& data, int row, int part, int column,
                                     int column_tile) {
  HalfRows r{row, part, column, column_tile, {}, {}, {}, {}};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float anchor = of_row(data.anchor, part, h);
    if constexpr (kMode == Mode::dz) {
      r.anchor[h] = anchor;
      r.log2_sum[h] = of_row(data.log2_sum, part, h);
      r.factor[h] = of_row(data.factor, part, h);
      r.smoothing[h] = of_row(data.smoothing, part, h);
    } else {
      r.anchor[h] = fabsf(anchor) < most_anchor ? anchor * log2e : 0.0f;
    }
  }
  return r;
}

__device__ inline int columns_left(const Arguments& a, int column) {
  return min(tile_columns, static_cast<int>(a.first_column + a.columns) - column);
}
template <Mode kMode>
__device__ inline bool needs_mask(const RowData& data, const HalfRows& rows, const Arguments& a,
                                  int valid) {
  const int lane = threadIdx.x % 32, target = data.target - rows.column;
  // The warp has a row after the last one.
  const bool fills = kMode != Mode::sums && rows.row - lane / 4 + 16 > valid;
  const bool own = lane % 4 / 2 == rows.part && target >= 0 && target < tile_columns;
  return __any_sync(whole_warp, own || fills || columns_left(a, rows.column) < tile_columns);
}
template <Mode kMode>
__device__ inline LeftOut find_left_out(const RowData& data, const HalfRows& rows,
                                        const Arguments& a, int valid, int block) {
  const int own = 2 * static_cast<int>(threadIdx.x % 4) + 64 * block,
            left = columns_left(a, rows.column);
  LeftOut mask;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int from = threadIdx.x / 4 % 8 * 4 + 2 * rows.part + h;
    mask.target[h] = __shfl_sync(whole_warp, data.target, from) - rows.column - own;
    mask.end[h] = (kMode != Mode::sums && rows.row + 8 * h >= valid ? 0 : left) - own;
  }
  return mask;
}
template <bool kRare>
__device__ inline bool is_masked(const LeftOut& mask, int column, int h) {
  return kRare && (column == mask.target[h] || column >= mask.end[h]);
}

// The map of this thread's row h, if rows have their own maps; after the last row, another row's.
__device__ inline const TokenMap& map_of_row(const Arguments& a, const HalfRows& rows, int valid,
                                             int h) {
  const Chunk& chunk = a.chunk;
  return a.options.row_map[chunk.tokens.row[chunk.first + min(rows.row + 8 * h, valid - 1)]];
}
template <Set kSet>
__device__ inline bool has_row_maps(const Arguments& a) {
  return has_more<kSet> && again(a.options.row_map != nullptr);
}
// map_block without the parts that rows have of their own; returns true if it applied them too.
template <Set kSet>
__device__ inline bool map_block_alike(float (&d)[96], const Arguments& a, const HalfRows& rows,
                                       int valid, int column) {
  const TileOptions& o = a.options;
  if (has_bias<kSet>(a)) {
    const float2* bias = reinterpret_cast<const float2*>(o.bias + column) + threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = 4 * n;
      const float2 b = __ldg(bias + 4 * n);
      d[i] += b.x, d[i + 1] += b.y, d[i + 2] += b.x, d[i + 3] += b.y;
    }
  }
  if constexpr (has_cap<kSet>) {
    float most[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < 32; ++n) most[n % 4] = fmaxf(most[n % 4], fabsf(d[n]));
    const float all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    if (__any_sync(whole_warp, all > o.small)) {
      // Rare and long code, so a few elements at a time share one copy of it.
      constexpr int at_once = has_more<kSet> ? 2 : 4;
#pragma unroll 1
      for (int turn = 0; turn < 32 / at_once; ++turn) {
        float done[at_once];
        const bool has_maps = has_row_maps<kSet>(a);
        const TokenMap* map = nullptr;
        if (has_maps) map = &map_of_row(a, rows, valid, turn % 2);
        const float outward = has_maps ? map->outward : o.map.outward;
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
          const float x = d[n];
          float z = select_above(fabsf(x), o.small, map_large(o, x), map_small(o, x));
          if (has_maps) z = divided(z, *map);
          done[n] = map_larger(o, outward, x, z);
        }
#pragma unroll
        for (int n = 0; n < 32; ++n)
          d[n] = n < 32 - at_once ? d[n + at_once] : done[n - 32 + at_once];
      }
      return true;
    }
#pragma unroll
    for (int n = 0; n < 32; ++n) d[n] = map_small(o, d[n]);
  } else if (!slopes_by_row<kSet> && has_scale<kSet>(a)) {
#pragma unroll
    for (int n = 0; n < 32; ++n) d[n] *= o.map.slope;
  }
  return false;
}

// The factor for the softcap's slope of row h.
template <Set kSet>
__device__ inline float backward_of(const Arguments& a, const HalfRows& rows, int valid, int h) {
  if (has_row_maps<kSet>(a)) return map_of_row(a, rows, valid, h).backward;
  return a.options.map.backward;
}

// Maps raw -> z of 64 columns from `column` on, in place. Returns whether any may be near the cap.
template <Set kSet>
__device__ inline bool map_block(float (&d)[96], const Arguments& a, const HalfRows& rows,
                                 const RowData& data, int valid, int column) {
  const bool large = map_block_alike<kSet>(d, a, rows, valid, column);
  if constexpr (slopes_by_row<kSet>) {
    if (has_scale<kSet>(a)) {
      const float slope[2] = {of_row(data.slope, rows.part, 0), of_row(data.slope, rows.part, 1)};
#pragma unroll
      for (int n = 0; n < 32; ++n) d[n] *= slope[n / 2 % 2];
    }
  } else if (!large && has_row_maps<kSet>(a)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const TokenMap& map = map_of_row(a, rows, valid, h);
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        float& z = d[4 * (n / 2) + 2 * h + n % 2];
        z = has_cap<kSet> ? divided(z, map) : z * map.slope;
      }
    }
  }
  return large;
}

// E and dz are stored through boxes of a warp's own 16 rows and 64 columns, two in turn.
constexpr int box_lines = 16, warp_box_bytes = box_lines * 128;

// Where a lane's eight elements of four 8 x 8 blocks of its warp's box [16, 64] start, swizzled;
// those of columns 16 `two` on are at ^ 32 two.
__device__ inline uint32_t lane_of_box(const uint8_t* box) {
  const uint32_t lane = threadIdx.x % 32;
  return shared_address(box) + lane % box_lines * 128 + (lane / 16 ^ lane % 8) * 16;
}
// The address of a warp's box, from its first lane's lane_of_box().
__device__ inline const void* box_at(uint32_t lane) {
  return reinterpret_cast<const void*>(__cvta_shared_to_generic(lane));
}
__device__ inline void write_box(uint32_t lane, int two, const uint32_t (&x)[4]) {
  store_matrices(lane ^ 32 * two, x);
}

}  // namespace logitless::cuda::sm90
