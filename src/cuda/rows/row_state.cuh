// SPDX-License-Identifier: Apache-2.0
// A row's state from its columns, in an order that depends only on the plan: per thread in four
// chains, then over the lanes, the warps, the tiles and the blocks.
#pragma once

#include "src/cuda/logit_map.cuh"
#include "src/cuda/rows/row_tile.cuh"
#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

// Sums of some columns, relative to their own maximum m.
struct CommonPartial {
  float maximum = -INFINITY;  // ignores NaN
  float sum = 0;              // sum exp(z - m); NaN if a logit is
  float shifted = 0;          // sum exp(z - m) (z - m)
  float weighted = 0;         // sum c z
  float logits = 0;           // sum z
  float squared = 0;          // sum exp(z - m)^2
  int above = 0;              // the number of columns above the target
  int argmax = -1;            // the lowest column of the maximum, within the row
};
// Only kernels of Columns::more use `mass`, and exchange it separately.
struct RowPartial : CommonPartial {
  float mass = 0;  // sum exp(z - m) of the columns that `above` counts
};

// What kernels compute of a column. `plain`: only the maximum, the sum and a multiple of p;
// `options`: all options; `more`, which needs more registers: also the rank, mass_above, the sums
// of squares and of logits, and maps per row.
enum class Columns { plain, options, more };

constexpr int most_warps = 8;
struct WarpResults {
  float maximum[most_warps], sum[most_warps], shifted[most_warps], weighted[most_warps];
  float logits[most_warps], squared[most_warps];
  int above[most_warps], argmax[most_warps];
};

constexpr int no_index = 0x7FFFFFFF;
constexpr float log2_e = 0x1.715476p0f, log2_e_low = 0x1.4ae0cp-26f;
// exp(x) for any x, with two roundings before a single instruction. Its relative error is below
// 2^-24 (2.3 |x| + 4), which docs/semantics.md allows where |x| is at most |log p| + log s. Below
// 2^-126 it is 0.
__device__ inline float exp_of_row(float x) { return exp2_fast(x * log2_e); }

// The reference of the sums: the maximum, or 0 if that is infinite. A row of -inf then sums to 0,
// one with +inf to +inf, and either to NaN if a logit is NaN.
__device__ inline float shift_of(float maximum) {
  return fabsf(maximum) == infinity() ? 0.0f : maximum;
}

// Sums over the lanes; unused lanes must be neutral. Every lane gets the sums.
template <Columns kColumns>
__device__ inline RowPartial combine_lanes(const RowPartial& own, SumSet wants) {
  RowPartial all;
  all.maximum = warp_max(own.maximum);
  // Makes the sums relative to the common maximum. A lane whose maximum is -inf can only contribute
  // NaN.
  float by = own.maximum - all.maximum;
  if (own.maximum == all.maximum || own.maximum == -infinity()) by = 0;
  by = fmaxf(by, -100.0f);  // exp is 0 there, and 0 times `by` must be 0
  const float factor = exp_nonpositive(by);
  all.sum = warp_sum(own.sum * factor);
  if (wants.has(SumKind::shifted)) all.shifted = warp_sum((own.shifted + own.sum * by) * factor);
  if (wants.has(SumKind::weighted)) all.weighted = warp_sum(own.weighted);
  if (wants.has(SumKind::logits)) all.logits = warp_sum(own.logits);
  if (wants.has(SumKind::squares)) all.squared = warp_sum(own.squared * factor * factor);
  if (wants.has(SumKind::above)) all.above = warp_sum(own.above);
  if constexpr (kColumns == Columns::more) all.mass = warp_sum(own.mass * factor);
  if (wants.has(SumKind::argmax)) {
    const bool best = own.maximum == all.maximum && own.argmax >= 0;
    all.argmax = warp_min(best ? own.argmax : no_index);
  }
  return all;
}

// The maximum of this thread's columns, and argmax, for every map and option.
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
  float sum[4] = {}, shifted[4] = {}, weighted[4] = {}, logits[4] = {}, squared[4] = {};
  float mass[4] = {};
  int above = 0;
};
// The target of the columns' row, as a column of the tile.
struct TargetColumn {
  int column = -1;
  float logit = 0;
};
__device__ inline float sum_of(const float (&x)[4]) { return (x[0] + x[1]) + (x[2] + x[3]); }

// Adds the terms of one 32-bit unit of columns to chain c.
template <class T, Columns kColumns>
__device__ void add_unit(const float* raw, int column, int n, float shift, const MapFactors& map,
                         const TensorView& class_weight, int64_t first, SumSet wants,
                         const TargetColumn& target, int c, ThreadSums* s) {
  float e[2] = {0, 0}, t[2] = {0, 0}, w[2] = {0, 0}, z_sum[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < per_unit<T>; ++h) {
    if constexpr (kColumns == Columns::plain) {
      e[h] = exp_of_row(raw[h] - shift);  // -inf follows the last column, so this adds 0 there
    } else {
      const int j = column + h;
      const float z = map_raw(map, raw[h]);
      const float x = z - shift;
      e[h] = j < n ? exp_of_row(x) : 0.0f;
      // 0 log 0 is 0, so x must be finite where exp is 0.
      if (wants.has(SumKind::shifted)) t[h] = e[h] * (x < least_exponent ? least_exponent : x);
      if (wants.has(SumKind::shifted) && j >= n) t[h] = 0;
      if (wants.has(SumKind::weighted) && j < n) {
        const float by = present(class_weight) ? load(class_weight, first + j) : 1.0f;
        w[h] = by == 0 ? 0.0f : by * z;
      }
      if (kColumns != Columns::more || j >= n) continue;
      z_sum[h] = z;
      if (wants.has(SumKind::above) && z > target.logit && j != target.column) {
        ++s->above;
        s->mass[c] += e[h];
      }
    }
  }
  constexpr bool pair = per_unit<T> == 2;
  s->sum[c] += pair ? e[0] + e[1] : e[0];
  if constexpr (kColumns != Columns::plain) {
    s->shifted[c] += pair ? t[0] + t[1] : t[0];
    s->weighted[c] += pair ? w[0] + w[1] : w[0];
    if (kColumns != Columns::more) return;
    if (wants.has(SumKind::logits)) s->logits[c] += pair ? z_sum[0] + z_sum[1] : z_sum[0];
    if (wants.has(SumKind::squares)) s->squared[c] += e[0] * e[0] + e[1] * e[1];
  }
}

// The thread's n-th unit goes to chain n % 4.
template <class T, Columns kColumns>
__device__ ThreadSums thread_sums(const Tile<T>& tile, bool odd, float shift, const MapFactors& map,
                                  const TensorView& class_weight, int64_t first, SumSet wants,
                                  const TargetColumn& target) {
  ThreadSums s;
  const int units = (tile.n + per_unit<T> - 1) / per_unit<T>;
  const int threads = static_cast<int>(blockDim.x);
  const auto add = [&](int u, int c) {
    float raw[2];
    load_unit<T>(tile, u, odd, raw);
    add_unit<T, kColumns>(raw, u * per_unit<T>, tile.n, shift, map, class_weight, first, wants,
                          target, c, &s);
  };
  int u = static_cast<int>(threadIdx.x);
  // Loads of four units are in flight at once.
  for (; (kColumns == Columns::plain) && u + 3 * threads < units; u += 4 * threads) {
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

// The partial sums of a whole tile, which every thread gets; uses two barriers.
template <class T, Columns kColumns>
__device__ RowPartial tile_partial(const Tile<T>& tile, const MapFactors& map,
                                   const TensorView& class_weight, int64_t first, int column,
                                   SumSet wants, const TargetColumn& target, WarpResults* warps) {
  [[maybe_unused]] __shared__ float mass[most_warps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const bool leads = lane < static_cast<int>(blockDim.x) / 32;
  RowPartial all;
  int index = no_index;
  float own;
  if constexpr (kColumns == Columns::plain) {
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
  const ThreadSums s = (kColumns == Columns::plain) && !odd
                           ? thread_sums<T, kColumns>(tile, false, shift, map, class_weight,
                                                      first + column, wants, target)
                           : thread_sums<T, kColumns>(tile, odd, shift, map, class_weight,
                                                      first + column, wants, target);
  const float sum = warp_sum(sum_of(s.sum));
  if (lane == 0) warps->sum[warp] = sum;
  if constexpr (kColumns != Columns::plain) {
    const float shifted = warp_sum(sum_of(s.shifted)), weighted = warp_sum(sum_of(s.weighted));
    index = warp_min(own == all.maximum ? index : no_index);
    if (lane == 0) {
      warps->shifted[warp] = shifted;
      warps->weighted[warp] = weighted;
      warps->argmax[warp] = index;
    }
  }
  if constexpr (kColumns == Columns::more) {
    const float logits = warp_sum(sum_of(s.logits)), squared = warp_sum(sum_of(s.squared));
    const float of_mass = warp_sum(sum_of(s.mass));
    const int above = warp_sum(s.above);
    if (lane == 0) {
      mass[warp] = of_mass;
      warps->logits[warp] = logits;
      warps->squared[warp] = squared;
      warps->above[warp] = above;
    }
  }
  __syncthreads();
  all.sum = warp_sum(leads ? warps->sum[lane] : 0.0f);
  if constexpr (kColumns != Columns::plain) {
    all.shifted = warp_sum(leads ? warps->shifted[lane] : 0.0f);
    all.weighted = warp_sum(leads ? warps->weighted[lane] : 0.0f);
    index = warp_min(leads ? warps->argmax[lane] : no_index);
    all.argmax = index == no_index ? -1 : column + index;
  }
  if constexpr (kColumns == Columns::more) {
    all.logits = warp_sum(leads ? warps->logits[lane] : 0.0f);
    all.squared = warp_sum(leads ? warps->squared[lane] : 0.0f);
    all.above = warp_sum(leads ? warps->above[lane] : 0);
    all.mass = warp_sum(leads ? mass[lane] : 0.0f);
  }
  return all;
}

// Combines two partial sums, the first of earlier columns; called by every lane of the warp.
template <Columns kColumns>
__device__ inline RowPartial combine_two(const RowPartial& first, const RowPartial& second,
                                         SumSet wants) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return combine_lanes<kColumns>(lane == 0 ? first : lane == 1 ? second : RowPartial{}, wants);
}

template <Columns kColumns>
__device__ inline RowStatistics finish_row(const RowPartial& row, SumSet wants) {
  RowStatistics state;
  state.reference = row.sum == row.sum ? row.maximum : row.sum;
  state.log_sum = fabsf(row.maximum) == infinity() ? nan_value() : logf(row.sum);
  if (wants.has(SumKind::shifted)) state.entropy = state.log_sum - row.shifted / row.sum;
  state.weighted_logit_sum = row.weighted;
  state.mean_logit = row.logits;  // the sum; the caller divides it by V
  if (wants.has(SumKind::squares)) state.sum_p_squared = row.squared / row.sum / row.sum;
  if (wants.has(SumKind::above)) state.rank = row.above;
  if constexpr (kColumns == Columns::more) {
    state.mass_above = state.log_sum == state.log_sum ? row.mass / row.sum : nan_value();
  }
  state.argmax = row.argmax;
  return state;
}

}  // namespace logitless::cuda
