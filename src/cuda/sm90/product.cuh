// SPDX-License-Identifier: Apache-2.0
// The gradients' products for Hopper, on the tile of tile.cuh:
//   grad_input  [tokens, D] = panel [tokens, columns] . weight [columns, D]
//   grad_weight [columns, D] = panel [tokens, columns]^T . input [tokens, D]
// Neither operand is transposed in memory: the tensor cores read either axis. How many tokens count
// is read on the device, so that ignored ones take no time. Straight from the registers to the
// caller's gradient, scaled and rounded once, or to sums in f32, or added to them.
#pragma once

#include "src/cuda/sm90/tile.cuh"

namespace logitless::cuda::sm90 {

enum class Gradient { input, weight };

struct ProductArguments {
  Chunk chunk;
  Team team;
  const RowFactors* factors;  // grad_input of E; else null
  void* out;                  // [rows, columns], rows `stride` elements apart
  int64_t stride;
  float* rest;  // rows from `split` on, where they lie apart; else null
  int32_t split;
  int32_t first_row, rows;  // of the chunk (input); of the panel's columns (weight)
  int32_t columns;          // D
  int32_t depth;            // columns of the panel (input)
  int32_t steps_in_front;   // of the depth, whose part of the panel lies apart (input)
  int32_t group;            // clusters of rows that run together
  int32_t left_rows;        // of a tile, that are brought
  int32_t right_boxes;      // of a stage: 1, or one a block of 64 where blocks do not fit
  int32_t panel_rows;       // of a block of the panel (input)
  bool mapped;              // rows of the output are the tokens' own, else the chunk's
  bool scaled;              // by the common factor
  bool add;
  bool wide;     // rows begin at four whole elements and end at them
  float* slots;  // [slot_count, 512, 192]  sums of slices, in the order of the threads
  int32_t slot_count, teams;
  int32_t slot_parts = cluster_rows / 64;  // of 64 rows
  Cut cut;                    // where every token of the chunk counts: found on the host
  const float* line;          // [columns]  subtracted times s of the row, or c; null: nothing is
  const float* class_weight;  // c of the panel's columns (weight); null: 1
};

// What both kernels know of the product: its tiles, in which order, cut how.
struct Work {
  int rows, depth;  // of the output; of the depth axis, in steps of 64
  Schedule schedule;
  Cut cut;
};
template <Gradient kGradient>
LOGITLESS_BOTH inline Work work_of(const ProductArguments& a, int valid, bool cuts) {
  constexpr bool is_input = kGradient == Gradient::input;
  Work w;
  w.rows = is_input ? std::max(std::min(valid - a.first_row, a.rows), 0) : a.rows;
  w.depth = ((is_input ? a.depth : valid) + tile_depth - 1) / tile_depth;
  if (a.add && w.depth == 0) w.rows = 0;  // what is there stays, its subnormals and signs too
  w.schedule = {(w.rows + cluster_rows - 1) / cluster_rows,
                (a.columns + tile_columns - 1) / tile_columns, a.group};
  w.cut = cuts ? cut_tiles(w.schedule.tiles(), w.depth, a.teams, a.slot_count) : a.cut;
  return w;
}
// Dozens of divisions, one after the other, take a microsecond or two.
template <Gradient kGradient>
__device__ inline Work find_work(const ProductArguments& a) {
  const int valid = valid_rows(a.chunk);
  return work_of<kGradient>(a, valid, valid != a.chunk.rows);
}

// 64 rows in a slot, one of its parts: [24, 128 threads] of four sums each.
__device__ inline float4* slot_part(const ProductArguments& a, int slot, int part) {
  return reinterpret_cast<float4*>(a.slots) + (int64_t{slot} * a.slot_parts + part) * (24 * 128) +
         threadIdx.x % 128;
}

// Where a row of the tile goes: nowhere, if null.
template <class Out>
struct RowSink {
  Out* to;
  float factor;  // v of E; 0: a row without a gradient
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

// The smoothing's own term, one line of columns for all rows: v E . weight - s class_row, or E^T .
// (v input) - c smoothed_row.
template <int kSums, class Out>
__device__ inline void subtract_line(float (&d)[kSums], int h, const ProductArguments& a,
                                     int column, int left, RowSink<Out>* sink) {
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    const int j = 8 * i + 2 * static_cast<int>(threadIdx.x % 4);
    float &x = d[4 * i + 2 * h], &y = d[4 * i + 2 * h + 1];
    x = sink->factor == 0 ? 0.0f : sink->factor * x;
    y = sink->factor == 0 ? 0.0f : sink->factor * y;
    if (sink->line != 0 && j < left) {  // the line ends by pairs
      const float2 two = __ldg(reinterpret_cast<const float2*>(a.line + column + j));
      x = fmaf(-sink->line, two.x, x), y = fmaf(-sink->line, two.y, y);
    }
  }
  sink->factor = 1;
}

__device__ inline void add_four(float* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

__device__ inline void write_one(float* to, float x, bool add) { *to = add ? *to + x : x; }

// d[4 i + 2 h + {0, 1}] of a row, times `scale`; `left` columns from `column` on exist.
template <int kSums, class Out>
__device__ inline void write_row(const float (&d)[kSums], int h, const RowSink<Out>& sink,
                                 float scale, int column, int left, const ProductArguments& a) {
  const int quad = threadIdx.x % 4;
  const auto value = [&](int i) {
    // A row without a gradient stays one where another's sum overflows.
    return scale * (sink.factor == 0 ? 0.0f : sink.factor * d[i + 2 * h]);
  };
  Out* to = sink.to + column;
  // Two lanes trade half of what they have: each then stores 4 neighbours.
  const bool odd = quad % 2 != 0;
  if constexpr (sizeof(Out) == 4) {
    if (!a.wide) {
      if (sink.to == nullptr) return;
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const int j = 8 * i + 2 * quad;
        if (j < left) write_one(to + j, value(4 * i), a.add);
        if (j + 1 < left) write_one(to + j + 1, value(4 * i + 1), a.add);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kSums / 4; i += 2) {
      const float2 low{value(4 * i), value(4 * i + 1)}, high{value(4 * i + 4), value(4 * i + 5)};
      const float2 own = odd ? high : low, given = odd ? low : high;
      const float2 other{__shfl_xor_sync(whole_warp, given.x, 1),
                         __shfl_xor_sync(whole_warp, given.y, 1)};
      const int j = odd ? 8 * (i + 1) + 2 * (quad - 1) : 8 * i + 2 * quad;
      const float4 four =
          odd ? float4{other.x, other.y, own.x, own.y} : float4{own.x, own.y, other.x, other.y};
      if (sink.to == nullptr || j >= left) continue;
      if (a.add) {
        add_four(to + j, four);
      } else {
        *reinterpret_cast<float4*>(to + j) = four;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSums / 4; i += 2) {
      const uint32_t low = pack<Out>(value(4 * i), value(4 * i + 1));
      const uint32_t high = pack<Out>(value(4 * i + 4), value(4 * i + 5));
      const uint32_t own = odd ? high : low;
      const uint32_t other = __shfl_xor_sync(whole_warp, odd ? low : high, 1);
      const int j = odd ? 8 * (i + 1) + 2 * (quad - 1) : 8 * i + 2 * quad;
      const uint2 four = odd ? uint2{other, own} : uint2{own, other};
      if (sink.to == nullptr || j >= left) continue;
      if (a.wide) {
        *reinterpret_cast<uint2*>(to + j) = four;
      } else {
        const Out* each = reinterpret_cast<const Out*>(&four);
        for (int c = 0; c < min(4, left - j); ++c) to[j + c] = each[c];
      }
    }
  }
}

// 64 rows of a warpgroup, of which this thread's first one is `row`, from `column` on.
template <Gradient kGradient, class Out, int kSums>
__device__ inline void write_rows(float (&d)[kSums], const ProductArguments& a, const Work& work,
                                  int row, int column) {
  const float scale = a.scaled ? a.chunk.tokens.scalars->gradient_scale : 1.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    RowSink<Out> sink = find_row<kGradient, Out>(a, row + 8 * h, work.rows);
    if (a.line != nullptr) subtract_line(d, h, a, column, a.columns - column, &sink);
    write_row(d, h, sink, scale, column, a.columns - column, a);
  }
}

// What a launch of one product needs, or of a part of the clusters. grad_input's left one may lie
// in two places.
struct Operands {
  CUtensorMap left, behind, right;
};

// Both operands of every item, for the multiplying warpgroups: a lane a box, so that none keeps
// more than one address: lane 0 the left operand's, 1 to 3 the right one's, of which this block
// brings 32 of the 64 of the depth axis for both.
template <Gradient kGradient>
__device__ inline void copy_operands(const Operands& operands, const ProductArguments& a,
                                     const Work& work, int cluster, const Pipeline& pipeline) {
  constexpr bool is_input = kGradient == Gradient::input;
  const Cut& cut = work.cut;
  const int rank = a.team.rank();
  const int lane = static_cast<int>(threadIdx.x), box = lane - 1;
  if (lane > a.right_boxes) return;
  const int half = rank * (tile_depth / 2);
  const uint32_t offset = left_bytes + rank * half_right_bytes + box * right_block_bytes;
  Ring ring;
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

template <class T, Gradient kGradient, class Out>
__device__ inline void multiply_items(const ProductArguments& a, const Work& work, int cluster,
                                      const Pipeline& pipeline, int warpgroup) {
  constexpr Along left_along = kGradient == Gradient::input ? Along::depth : Along::rows;
  const Cut& cut = work.cut;
  const int rank = a.team.rank();
  Ring ring;
  if (kGradient == Gradient::input && !has_some(warpgroup, a.rows)) {
    for (int item = cluster; item < cut.items(); item += a.teams) {
      skip_tile(cut.end(item) - cut.begin(item), pipeline, &ring, a.team);
    }
    return;
  }
  float upper[96], lower[96];
  for (int item = cluster; item < cut.items(); item += a.teams) {
    if (work.depth == 0) {
#pragma unroll
      for (int i = 0; i < 96; ++i) upper[i] = lower[i] = 0;
    }
    multiply_tile<T, left_along, Along::rows>(upper, lower, cut.end(item) - cut.begin(item),
                                              pipeline, &ring, warpgroup, a.team);
    if (item >= cut.whole()) {
      const int slot = item - cut.whole(), part = rank * 4 + (warpgroup - 1) * 2;
      float4 *above = slot_part(a, slot, part), *below = slot_part(a, slot, part + 1);
#pragma unroll
      for (int i = 0; i < 24; ++i) {
        above[i * 128] = {upper[4 * i], upper[4 * i + 1], upper[4 * i + 2], upper[4 * i + 3]};
        below[i * 128] = {lower[4 * i], lower[4 * i + 1], lower[4 * i + 2], lower[4 * i + 3]};
      }
      continue;
    }
    int row_cluster, column_tile;
    work.schedule.find(item, &row_cluster, &column_tile);
    const int row = row_cluster * cluster_rows + rank * tile_rows + thread_row(warpgroup);
    write_rows<kGradient, Out>(upper, a, work, row, column_tile * tile_columns);
    write_rows<kGradient, Out>(lower, a, work, row + 64, column_tile * tile_columns);
  }
}

template <class T, Gradient kGradient, class Out>
__device__ inline void run_product(const Operands& operands, const ProductArguments& a,
                                   Work* shared_work, int cluster, const Pipeline& pipeline) {
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
    multiply_items<T, kGradient, Out>(a, *shared_work, cluster, pipeline, warpgroup);
  }
}

template <class T, Gradient kGradient, class Out>
__global__ void __launch_bounds__(block_threads, 1)
    product_kernel(const __grid_constant__ Operands operands,
                   const __grid_constant__ ProductArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  // Read where it is used: the registers are the sums'.
  __shared__ Work work;
  const Pipeline pipeline = open_pipeline(dynamic);
  run_product<T, kGradient, Out>(operands, a, &work, a.team.number(), pipeline);
  cluster_sync();  // no block ends while another may signal it
#endif
}

// Both products of a chunk of tokens side by side: the first clusters take grad_input, whose few
// tiles are deep, the others grad_weight, whose many tiles are short and each added to memory. What
// one leaves of the chip's memory the other takes.
template <class T, class Out>
__global__ void __launch_bounds__(block_threads, 1)
    both_kernel(const __grid_constant__ Operands of_input,
                const __grid_constant__ ProductArguments input,
                const __grid_constant__ Operands of_weight,
                const __grid_constant__ ProductArguments weight) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  __shared__ Work work;
  const Pipeline pipeline = open_pipeline(dynamic);
  const int cluster = static_cast<int>(blockIdx.x / 2);
  if (cluster < input.teams) {
    run_product<T, Gradient::input, Out>(of_input, input, &work, cluster, pipeline);
  } else {
    run_product<T, Gradient::weight, float>(of_weight, weight, &work, cluster - input.teams,
                                            pipeline);
  }
  cluster_sync();
#endif
}

}  // namespace logitless::cuda::sm90
