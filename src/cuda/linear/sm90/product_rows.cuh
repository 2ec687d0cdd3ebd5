// SPDX-License-Identifier: Apache-2.0
// The arguments of product.cuh's products, and how sums are written: from registers to the caller's
// gradient, scaled and rounded once; or to sums in f32, where they may be added to existing ones.
#pragma once

#include <algorithm>

#include "src/cuda/linear/chunk.cuh"
#include "src/cuda/linear/sm90/tile.cuh"
#include "src/cuda/linear/tiled/cut.h"

namespace logitless::cuda::sm90 {

using tiled::Cut;
using tiled::cut_tiles;

enum class Gradient { input, weight };

struct ProductArguments {
  Chunk chunk;
  Team team;
  const RowFactors* factors;  // for grad_input of E, else null
  void* out;                  // [rows, columns]  rows `stride` elements apart
  int64_t stride;
  float* rest;  // where rows >= `split` are, if elsewhere; else null
  int32_t split;
  // of the chunk for grad_input, of the panel's columns for grad_weight
  int32_t first_row, rows;
  int32_t columns;         // D
  int32_t depth;           // the panel's columns, for grad_input
  int32_t steps_in_front;  // steps of the depth in the panel's first part (grad_input)
  int32_t group;           // row clusters whose tiles run together: Schedule
  int32_t left_rows;       // rows of the left operand that are copied for a tile
  int32_t right_boxes;     // boxes per stage: one, or one per block of 64 columns
  int32_t panel_rows;      // rows of a block of the panel (grad_input)
  bool mapped;             // output rows are indexed by token, else by the chunk
  bool scaled;             // the output is multiplied by the common factor
  bool add;
  bool wide;     // rows begin and end at multiples of four elements
  float* slots;  // [slot_count, a tile]  sums of slices, in the order of the threads
  int32_t slot_count, teams;
  int32_t slot_parts = cluster_rows / 64;  // a part has 64 rows
  Cut cut;            // from the host, valid if every token of the chunk counts
  const float* line;  // [columns]  subtracted, times the row's s or c; or null
  // c of the panel's columns (grad_weight), or null if all are 1
  const float* class_weight;
};

// What a product's kernel and join.cuh's know of it: its tiles, their order and how they are cut.
struct Work {
  int rows, depth;  // of the output; depth in steps of 64
  Schedule schedule;
  Cut cut;
};
template <Gradient kGradient>
LOGITLESS_HOST_DEVICE inline Work work_of(const ProductArguments& a, int valid, bool cuts) {
  constexpr bool is_input = kGradient == Gradient::input;
  Work w;
  w.rows = is_input ? std::max(std::min(valid - a.first_row, a.rows), 0) : a.rows;
  w.depth = ((is_input ? a.depth : valid) + tile_depth - 1) / tile_depth;
  if (a.add && w.depth == 0) w.rows = 0;  // the output stays unchanged, to the bit
  w.schedule = {(w.rows + cluster_rows - 1) / cluster_rows,
                (a.columns + tile_columns - 1) / tile_columns, a.group};
  w.cut = cuts ? cut_tiles(w.schedule.tiles(), w.depth, a.teams, a.slot_count) : a.cut;
  return w;
}
// Products call it in one thread for all: its dozens of divisions take a microsecond or two.
template <Gradient kGradient>
__device__ inline Work find_work(const ProductArguments& a) {
  const int valid = valid_rows(a.chunk);
  return work_of<kGradient>(a, valid, valid != a.chunk.rows);
}

// Where 64 rows are within a slot, as one of its parts: [24, 128 threads] of four sums each.
__device__ inline float4* slot_part(const ProductArguments& a, int slot, int part) {
  return reinterpret_cast<float4*>(a.slots) + (int64_t{slot} * a.slot_parts + part) * (24 * 128) +
         threadIdx.x % 128;
}

// The destination of a row of the tile; nothing is written if `to` is null.
template <class Out>
struct RowSink {
  Out* to;
  float factor;  // v of E; 0: the row has no gradient
  float line;    // the smoothing's s or c
};

template <Gradient kGradient, class Out>
__device__ inline RowSink<Out> find_row(const ProductArguments& a, int row, int rows) {
  RowSink<Out> sink{nullptr, 1.0f, 0.0f};
  if (row >= rows) return sink;
  int64_t i = row;
  if constexpr (kGradient == Gradient::input) {
    if (a.factors != nullptr) sink.factor = a.factors[a.first_row + row].scale;
    if (a.line != nullptr) sink.line = a.factors[a.first_row + row].smoothing;
    if (a.mapped) i = a.chunk.tokens.row[a.chunk.first + a.first_row + row];
  }
  if (kGradient == Gradient::weight && a.line != nullptr) {
    sink.line = a.class_weight != nullptr ? a.class_weight[row] : 1.0f;
  }
  sink.to = static_cast<Out*>(a.out) + i * a.stride;
  if constexpr (kGradient == Gradient::weight && sizeof(Out) == 4) {
    if (a.rest != nullptr && row >= a.split) {
      sink.to = a.rest + int64_t{row - a.split} * a.stride;
    }
  }
  return sink;
}

__device__ inline void add_four(float* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// Only f32 outputs are ever added to.
template <class Out>
__device__ inline void write_one(Out* to, float x, bool add) {
  *to = from_f32<Out>(sizeof(Out) == 4 && add ? to_f32(*to) + x : x);
}

// Two elements of the smoothing's line, from `column` on; the line ends with a whole pair.
__device__ inline float2 line_pair(const ProductArguments& a, int column) {
  return column < a.columns ? __ldg(reinterpret_cast<const float2*>(a.line + column)) : float2{};
}

// Writes d[4 i + 2 h + {0, 1}] of a row, times `scale`; `left` columns from `column` on exist. If
// kLine, it subtracts the smoothing's term, one line of columns for all rows: v E . weight - s
// class_row, or E^T . (v input) - c smoothed_row; line(j) returns two elements of it. The sums stay
// unchanged, since products are in flight.
template <bool kLine, int kSums, class Out, class Line>
__device__ __forceinline__ void write_row(const float (&d)[kSums], int h, const RowSink<Out>& sink,
                                          float scale, int column, int left,
                                          const ProductArguments& a, const Line& line) {
  const int quad = threadIdx.x % 4;
  const auto values = [&](int i) -> float2 {
    // A row without a gradient stays 0 even if its sum, of E, overflows.
    float2 v{sink.factor == 0 ? 0.0f : sink.factor * d[4 * i + 2 * h],
             sink.factor == 0 ? 0.0f : sink.factor * d[4 * i + 2 * h + 1]};
    if (kLine && sink.line != 0) {
      const float2 two = line(8 * i + 2 * quad);
      v = {fmaf(-sink.line, two.x, v.x), fmaf(-sink.line, two.y, v.y)};
    }
    return {scale * v.x, scale * v.y};
  };
  Out* to = sink.to + column;
  if (!a.wide) {
    if (sink.to == nullptr) return;
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const int j = 8 * i + 2 * quad;
      const float2 two = values(i);
      if (j < left) write_one(to + j, two.x, a.add);
      if (j + 1 < left) write_one(to + j + 1, two.y, a.add);
    }
    return;
  }
  // Two lanes exchange half of their elements, so that each stores 4 contiguous ones.
  const bool odd = quad % 2 != 0;
#pragma unroll
  for (int i = 0; i < kSums / 4; i += 2) {
    const int j = odd ? 8 * (i + 1) + 2 * (quad - 1) : 8 * i + 2 * quad;
    const float2 low = values(i), high = values(i + 1);
    if constexpr (sizeof(Out) == 4) {
      const float2 own = odd ? high : low, given = odd ? low : high;
      const float2 other{__shfl_xor_sync(whole_warp, given.x, 1),
                         __shfl_xor_sync(whole_warp, given.y, 1)};
      const float4 four =
          odd ? float4{other.x, other.y, own.x, own.y} : float4{own.x, own.y, other.x, other.y};
      if (sink.to == nullptr || j >= left) continue;
      if (a.add) {
        add_four(to + j, four);
      } else {
        *reinterpret_cast<float4*>(to + j) = four;
      }
    } else {
      const uint32_t first = pack<Out>(low.x, low.y), second = pack<Out>(high.x, high.y);
      const uint32_t own = odd ? second : first;
      const uint32_t other = __shfl_xor_sync(whole_warp, odd ? first : second, 1);
      if (sink.to == nullptr || j >= left) continue;
      *reinterpret_cast<uint2*>(to + j) = odd ? uint2{other, own} : uint2{own, other};
    }
  }
}

// Writes 64 rows of a warpgroup from `column` on; `row` is this thread's first row.
template <Gradient kGradient, class Out, int kSums, class Line>
__device__ __forceinline__ void write_rows(const float (&d)[kSums], const ProductArguments& a,
                                           const Work& work, int row, int column,
                                           const Line& line) {
  const float scale = a.scaled ? a.chunk.tokens.scalars->gradient_scale : 1.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const RowSink<Out> sink = find_row<kGradient, Out>(a, row + 8 * h, work.rows);
    const int left = a.columns - column;
    if (a.line != nullptr) {
      write_row<true>(d, h, sink, scale, column, left, a, line);
    } else {
      write_row<false>(d, h, sink, scale, column, left, a, line);
    }
  }
}

}  // namespace logitless::cuda::sm90
