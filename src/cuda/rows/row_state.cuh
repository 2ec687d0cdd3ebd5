// SPDX-License-Identifier: Apache-2.0
// From the columns of a row to its state, in an order that depends on the plan alone: per thread in
// four chains, over the lanes, the warps, the tiles, the blocks.
#pragma once

#include "src/cuda/rows/row_tile.cuh"

namespace logitless::cuda {

// Holds sums of some columns, relative to their own maximum m.
struct RowPartial {
  float maximum = -INFINITY;  // a NaN does not count
  float sum = 0;              // sum exp(z - m); NaN where a logit is
  float shifted = 0;          // sum exp(z - m) (z - m)
  float weighted = 0;         // sum c z
  int argmax = -1;            // lowest column; of the row, not of the tile
};

struct RowWants {
  bool weighted_sum = false, entropy = false, argmax = false;
};

constexpr int most_warps = 8;
struct WarpResults {
  float maximum[most_warps], sum[most_warps], shifted[most_warps], weighted[most_warps];
  int argmax[most_warps];
};

constexpr int no_index = 0x7FFFFFFF;
constexpr float log2_e = 0x1.715476p0f, log2_e_low = 0x1.4ae0cp-26f;
// exp(x) for any x with two roundings before the one instruction: a relative error below
// 2^-24 (2.3 |x| + 4), which docs/semantics.md grants: |x| is at most |log p| + log s. Below 2^-126
// it is 0.
__device__ inline float exp_of_row(float x) { return exp2_fast(x * log2_e); }

// Returns what the sums are relative to: 0 where the maximum is infinite. Then a row of -inf sums
// to 0, one with +inf to +inf, and either to NaN where a logit is NaN.
__device__ inline float shift_of(float maximum) {
  return fabsf(maximum) == infinity() ? 0.0f : maximum;
}

// Sums over the lanes, those of the lanes beyond being neutral; every lane gets them.
__device__ inline RowPartial combine_lanes(const RowPartial& own, const RowWants& wants) {
  RowPartial all;
  all.maximum = warp_max(own.maximum);
  // Relative to the common maximum. Where the own one is -inf there is nothing but NaN to keep.
  float by = own.maximum - all.maximum;
  if (own.maximum == all.maximum || own.maximum == -infinity()) by = 0;
  by = fmaxf(by, -100.0f);  // exp is 0, and 0 times it
  const float factor = exp_nonpositive(by);
  all.sum = warp_sum(own.sum * factor);
  if (wants.entropy) all.shifted = warp_sum((own.shifted + own.sum * by) * factor);
  if (wants.weighted_sum) all.weighted = warp_sum(own.weighted);
  if (wants.argmax) {
    const bool best = own.maximum == all.maximum && own.argmax >= 0;
    all.argmax = warp_min(best ? own.argmax : no_index);
  }
  return all;
}

// Maximum, and argmax, of this thread's columns; all of the map and its options.
template <class T>
__device__ float thread_max_mapped(const Tile<T>& tile, const MapFactors& map, int* argmax) {
  float best = -infinity();
  int index = no_index;
  const T* x = tile.elements();
  for (int j = static_cast<int>(threadIdx.x); j < tile.n; j += static_cast<int>(blockDim.x)) {
    const float z = map_raw(map, to_f32(x[j]));
    if (z > best || index == no_index) index = j;
    best = fmaxf(best, z);
  }
  *argmax = index;
  return best;
}

struct ThreadSums {
  float sum[4] = {}, shifted[4] = {}, weighted[4] = {};
};
__device__ inline float sum_of(const float (&x)[4]) { return (x[0] + x[1]) + (x[2] + x[3]); }

// The terms of one unit of columns, added to chain c.
template <class T, bool kPlain>
__device__ void add_unit(const float* raw, int column, int n, float shift, const MapFactors& map,
                         const TensorView& class_weight, int64_t first, const RowWants& wants,
                         int c, ThreadSums* s) {
  float e[2] = {0, 0}, t[2] = {0, 0}, w[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < per_unit<T>; ++h) {
    if constexpr (kPlain) {
      e[h] = exp_of_row(raw[h] - shift);  // what follows the last column is -inf
    } else {
      const int j = column + h;
      const float z = map_raw(map, raw[h]);
      const float x = z - shift;
      e[h] = j < n ? exp_of_row(x) : 0.0f;
      // 0 log 0 = 0: where exp is 0, x is finite.
      if (wants.entropy) t[h] = e[h] * (x < least_exponent ? least_exponent : x);
      if (wants.entropy && j >= n) t[h] = 0;
      if (wants.weighted_sum && j < n) {
        const float by = present(class_weight) ? load(class_weight, first + j) : 1.0f;
        w[h] = by == 0 ? 0.0f : by * z;
      }
    }
  }
  constexpr bool pair = per_unit<T> == 2;
  s->sum[c] += pair ? e[0] + e[1] : e[0];
  if constexpr (!kPlain) {
    s->shifted[c] += pair ? t[0] + t[1] : t[0];
    s->weighted[c] += pair ? w[0] + w[1] : w[0];
  }
}

// Unit u of the thread's goes to chain u % 4.
template <class T, bool kPlain>
__device__ ThreadSums thread_sums(const Tile<T>& tile, bool odd, float shift, const MapFactors& map,
                                  const TensorView& class_weight, int64_t first,
                                  const RowWants& wants) {
  ThreadSums s;
  const int units = (tile.n + per_unit<T> - 1) / per_unit<T>;
  const int threads = static_cast<int>(blockDim.x);
  const auto add = [&](int u, int c) {
    float raw[2];
    load_unit<T>(tile, u, odd, raw);
    add_unit<T, kPlain>(raw, u * per_unit<T>, tile.n, shift, map, class_weight, first, wants, c,
                        &s);
  };
  int u = static_cast<int>(threadIdx.x);
  // Loads of four units in flight.
  for (; kPlain && u + 3 * threads < units; u += 4 * threads) {
#pragma unroll
    for (int c = 0; c < 4; ++c) add(u + c * threads, c);
  }
#pragma unroll 1
  for (; u < units; u += 4 * threads) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (u + c * threads < units) add(u + c * threads, c);
    }
  }
  return s;
}

// The partial of a whole tile; every thread gets it. Two barriers.
template <class T, bool kPlain>
__device__ RowPartial tile_partial(const Tile<T>& tile, const MapFactors& map,
                                   const TensorView& class_weight, int64_t first, int column,
                                   const RowWants& wants, WarpResults* warps) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const bool leads = lane < static_cast<int>(blockDim.x) / 32;
  RowPartial all;
  int index = no_index;
  float own;
  if constexpr (kPlain) {
    own = thread_max<T>(tile);
  } else {
    own = thread_max_mapped<T>(tile, map, &index);
  }
  const float of_warp = warp_max(own);
  if (lane == 0) warps->maximum[warp] = of_warp;
  __syncthreads();
  all.maximum = warp_max(leads ? warps->maximum[lane] : -infinity());

  const float shift = shift_of(all.maximum);
  const bool odd = sizeof(T) == 2 && tile.phase % 4 != 0;
  const ThreadSums s =
      kPlain && !odd
          ? thread_sums<T, kPlain>(tile, false, shift, map, class_weight, first + column, wants)
          : thread_sums<T, kPlain>(tile, odd, shift, map, class_weight, first + column, wants);
  const float sum = warp_sum(sum_of(s.sum));
  if (lane == 0) warps->sum[warp] = sum;
  if constexpr (!kPlain) {
    const float shifted = warp_sum(sum_of(s.shifted)), weighted = warp_sum(sum_of(s.weighted));
    index = warp_min(own == all.maximum ? index : no_index);
    if (lane == 0) {
      warps->shifted[warp] = shifted;
      warps->weighted[warp] = weighted;
      warps->argmax[warp] = index;
    }
  }
  __syncthreads();
  all.sum = warp_sum(leads ? warps->sum[lane] : 0.0f);
  if constexpr (!kPlain) {
    all.shifted = warp_sum(leads ? warps->shifted[lane] : 0.0f);
    all.weighted = warp_sum(leads ? warps->weighted[lane] : 0.0f);
    index = warp_min(leads ? warps->argmax[lane] : no_index);
    all.argmax = index == no_index ? -1 : column + index;
  }
  return all;
}

// Two partials, the first of the earlier columns; every lane of the warp calls it.
__device__ inline RowPartial combine_two(const RowPartial& first, const RowPartial& second,
                                         const RowWants& wants) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return combine_lanes(lane == 0 ? first : lane == 1 ? second : RowPartial{}, wants);
}

__device__ inline RowState finish_row(const RowPartial& row, const RowWants& wants) {
  RowState state;
  state.reference = row.sum == row.sum ? row.maximum : row.sum;
  state.log_sum = fabsf(row.maximum) == infinity() ? nan_value() : logf(row.sum);
  if (wants.entropy) state.entropy = state.log_sum - row.shifted / row.sum;
  state.weighted_logit_sum = row.weighted;
  state.argmax = row.argmax;
  return state;
}

}  // namespace logitless::cuda
