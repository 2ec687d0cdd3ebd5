// SPDX-License-Identifier: Apache-2.0
// Sums 64 rows of a tile in one pass over its logits: relative to the anchor z_t, as in plain.cuh,
// or, in a lane whose maximum so far is too far from z_t, relative to that maximum. Only the row's
// own values decide this, so no plan and no neighbour changes a bit.
#pragma once

#include "src/cuda/linear/sm90/near_cap.cuh"
#include "src/cuda/linear/sm90/option_rows.cuh"

namespace logitless::cuda::sm90 {

constexpr int no_column = 0xffff;

// A thread's sums of its two rows so far, relative to the anchor, or to `from` unless that is NaN.
struct Sums {
  float maximum[2] = {-infinity(), -infinity()}, sum[2] = {0, 0};
  float shifted[2] = {0, 0}, weighted[2] = {0, 0};  // shifted in log2
  float squared[2] = {0, 0};  // if has_mass, sums of exponentials above the target
  float from[2] = {nan_value(), nan_value()};
  // The low 16 bits: the column of the maximum, if it may be the row's. The other bits: the number
  // of columns above the target.
  int lowest[2] = {no_column, no_column};
};

// sum c_j z_j of 64 columns. If kCareful, a column of weight 0 adds nothing, even if its logit is
// not finite.
template <bool kRare, bool kCareful>
__device__ inline float2 weigh_block(const float (&d)[96], const LeftOut& mask, const Arguments& a,
                                     int column) {
  const float2* weights =
      reinterpret_cast<const float2*>(a.options.class_weight + column) + threadIdx.x % 4;
  float sum[4] = {0, 0, 0, 0};
  if (again(a.options.class_weight == nullptr)) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const int i = n / 4;
      if (kRare && n % 16 == 0 && stops(a)) break;
      if (!is_masked<kRare>(mask, 8 * i + n % 2, n / 2 % 2)) sum[n % 4] += d[n];
    }
  } else {
#pragma unroll
    for (int n = 0; n < 32; n += 4) {
      if (kRare && n % 16 == 0 && stops(a)) break;
      const int i = n / 4;
      const float2 c = __ldg(weights + n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float own = e % 2 != 0 ? c.y : c.x;
        if (!(kCareful && own == 0) && !is_masked<kRare>(mask, 8 * i + e % 2, e / 2)) {
          sum[e] = fmaf(own, d[n + e], sum[e]);
        }
      }
    }
  }
  return {sum[0] + sum[1], sum[2] + sum[3]};
}
template <bool kRare>
__device__ inline void weigh(const float (&d)[96], const LeftOut& mask, const Arguments& a,
                             int column, Sums* sums) {
  float2 sum = weigh_block<kRare, kRare>(d, mask, a, column);
  if (!kRare && __any_sync(whole_warp, !(fabsf(sum.x) + fabsf(sum.y) < infinity()))) {
    sum = weigh_block<kRare, true>(d, mask, a, column);
  }
  sums->weighted[0] += sum.x;
  sums->weighted[1] += sum.y;
}

// Whether exponentials above the target are summed, in place of squares: there is no register left
// for both.
__device__ inline bool has_mass(const Arguments& a) { return again(a.partials.mass_rows != 0); }

template <bool kRare>
__device__ inline void add_mass(const float (&d)[96], const HalfRows& rows, const RowData& data,
                                const LeftOut& mask, const Arguments& a, Sums* sums) {
  if (!has_mass(a)) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float target = of_row(data.anchor, rows.part, h), from = sums->from[h];
    float mass = 0;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      if (kRare && n % 8 == 0 && stops(a)) break;
      const float z = d[4 * (n / 2) + 2 * h + n % 2];
      const bool moved = kRare && from == from;
      const float distance = moved ? (z - from) * log2e : fmaf(z, log2e, -rows.anchor[h]);
      const bool counts = z > target && !is_masked<kRare>(mask, 8 * (n / 2) + n % 2, h);
      mass += counts ? exp2_fast(distance) : 0.0f;
    }
    sums->squared[h] += mass;
  }
}

// Counts those of 64 columns that are above the target, and sums their exponentials.
template <bool kRare>
__device__ inline void add_above(const float (&d)[96], const HalfRows& rows, const RowData& data,
                                 const LeftOut& mask, const Arguments& a, Sums* sums) {
  if (!again(a.partials.above != nullptr)) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float target = of_row(data.anchor, rows.part, h);
    int above = 0;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      if (kRare && n % 8 == 0 && stops(a)) break;
      const float z = d[4 * (n / 2) + 2 * h + n % 2];
      above += z > target && !is_masked<kRare>(mask, 8 * (n / 2) + n % 2, h) ? 1 : 0;
    }
    sums->lowest[h] += above << 16;
  }
  add_mass<kRare>(d, rows, data, mask, a, sums);
}

// The element's value in the panel: E times the softcap's slope; for sums_kept E or the distance.
template <Mode kMode, Set kSet, bool kRare>
__device__ inline float kept_of(const Arguments& a, float backward, float z, float e, bool masked) {
  if constexpr (kMode == Mode::sums_kept) {
    if (kRare && fabsf(z) > a.options.near_cap) e = encode_left(a.options.map, z);
  } else if constexpr (has_cap<kSet>) {
    e = capped(backward, z, e);
  }
  return masked ? 0.0f : e;
}

template <bool kRare>
__device__ inline float find_highest(const float (&d)[96], const LeftOut& mask, const Arguments& a,
                                     int h) {
  float most[2] = {-infinity(), -infinity()};
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    if (kRare && n % 8 == 0 && stops(a)) break;
    const float z = d[4 * (n / 2) + 2 * h + n % 2];
    if (!is_masked<kRare>(mask, 8 * (n / 2) + n % 2, h)) most[n % 2] = fmaxf(most[n % 2], z);
  }
  return fmaxf(most[0], most[1]);
}

// Terms that far below (in log2) are 0 anyway. The distance may be infinite, and 0 times infinity
// is NaN.
__device__ inline float bounded(float by) { return by > 1000.0f ? 1000.0f : by; }

// Whether a maximum is close enough, at this distance (log2) above the anchor: errors grow with the
// distance, and far below the anchor exponentials that matter may be 0.
template <Set kSet>
__device__ inline bool is_within(const HalfRows& rows, const Arguments& a, int h, float distance) {
  const bool shifts = is_any<kSet> && a.partials.shifted != nullptr;
  const bool squares = has_more<kSet> && a.partials.squared != nullptr;
  const float least = shifts && rows.anchor[h] == 0 ? -a.most_distance : squares ? -40.0f : -100.0f;
  return distance > least && distance < a.most_distance;
}

// Makes row h continue relative to its maximum `top` so far, if the anchor is too far away.
template <Set kSet>
__device__ inline void move_start(const HalfRows& rows, const Arguments& a, int h, float top,
                                  Sums* sums) {
  if (top == -infinity()) return;
  const float from = sums->from[h];
  const bool moved = from == from;
  const float by = moved ? (top - from) * log2e : fmaf(top, log2e, -rows.anchor[h]);
  if (moved ? by < a.most_distance : is_within<kSet>(rows, a, h, by)) return;
  const float sum = sums->sum[h], down = bounded(by), factor = exp2_fast(-down);
  if (sum != 0) {
    sums->shifted[h] = factor * fmaf(-down, sum, sums->shifted[h]);
    sums->sum[h] = factor * sum;
    if constexpr (has_more<kSet>) sums->squared[h] *= factor * (has_mass(a) ? 1.0f : factor);
  }
  sums->from[h] = top;
}

// Finds the lowest column of a maximum that is at least the target's logit; other maxima's columns
// are not needed.
template <bool kRare>
__device__ inline void find_lowest(const float (&d)[96], const HalfRows& rows, const RowData& data,
                                   const LeftOut& mask, const Arguments& a,
                                   const float (&highest)[2], int block, Sums* sums) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float target = of_row(data.anchor, rows.part, h);
    const bool wants = highest[h] > sums->maximum[h] && highest[h] >= target;
    if (!__any_sync(whole_warp, wants)) continue;
    int lowest = INT32_MAX;
#pragma unroll
    for (int n = 15; n >= 0; --n) {
      const int column = 8 * (n / 2) + n % 2;
      if (n % 8 == 7 && stops(a)) break;
      if (d[4 * (n / 2) + 2 * h + n % 2] == highest[h] && !is_masked<kRare>(mask, column, h)) {
        lowest = column;
      }
    }
    const int own = lowest + 64 * block + 2 * static_cast<int>(threadIdx.x % 4);
    if (wants) sums->lowest[h] = (sums->lowest[h] & ~no_column) | (own & no_column);
  }
}

// Below this, 2^x is 0 here, and 0 times a distance of -inf would be NaN.
constexpr float least_log2 = -126;

enum class Terms { sum, shifted, squared };  // each includes those before it

template <class T, Mode kMode, Set kSet, bool kRare, Terms kTerms>
__device__ inline void sum_block(const float (&d)[96], const HalfRows& rows, const LeftOut& mask,
                                 const Arguments& a, int valid, uint32_t box, Sums* sums) {
  constexpr bool stores = kMode != Mode::sums;
  float backward[2] = {0, 0};
  if constexpr (stores && has_cap<kSet>) {
#pragma unroll
    for (int h = 0; h < 2; ++h) backward[h] = backward_of<kSet>(a, rows, valid, h);
  }
#pragma unroll
  for (int two = 0; two < 4; ++two) {
    if (kRare && stops(a)) break;
    uint32_t packed[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int i = 2 * two + n / 2, h = n % 2;
      const float from = sums->from[h];
      float kept[2], e[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const bool masked = is_masked<kRare>(mask, 8 * i + c, h);
        const float z = masked ? -infinity() : d[4 * i + 2 * h + c];
        float distance = fmaf(z, log2e, -rows.anchor[h]);
        e[c] = exp2_fast(distance);
        if constexpr (keeps_codes<T, kMode>) {
          kept[c] = distance;
        } else if constexpr (stores) {
          kept[c] = kept_of<kMode, kSet, kRare>(a, backward[h], z, e[c], masked);
        }
        if (kRare && from == from) {
          // Not fma(z, log2(e), -m log2(e)): it rounds -m log2(e) first, and if |m| is large that
          // error enters the exponent.
          distance = (z - from) * log2e;
          e[c] = exp2_fast(distance);
        }
        if constexpr (kTerms != Terms::sum) {
          sums->shifted[h] = fmaf(e[c], fmaxf(distance, least_log2), sums->shifted[h]);
        }
        if constexpr (kTerms == Terms::squared) {
          sums->squared[h] = fmaf(e[c], e[c], sums->squared[h]);
        }
      }
      sums->sum[h] += e[0] + e[1];
      if constexpr (keeps_codes<T, kMode>) {
        packed[n] = encode_logs(kept[0], kept[1]);
      } else if constexpr (stores) {
        packed[n] = pack<T>(kept[0], kept[1]);
      }
    }
    if constexpr (stores) write_box(box, two, packed);
  }
}

template <class T, Mode kMode, Set kSet, bool kRare>
__device__ inline void sum_64(const float (&d)[96], const HalfRows& rows, const LeftOut& mask,
                              const Arguments& a, int valid, uint32_t box, Sums* sums) {
  const auto sum = [&]<Terms kTerms>() {
    sum_block<T, kMode, kSet, kRare, kTerms>(d, rows, mask, a, valid, box, sums);
  };
  if constexpr (has_more<kSet>) {
    if (again(a.partials.squared != nullptr)) return sum.template operator()<Terms::squared>();
  }
  if constexpr (is_any<kSet>) {
    if (again(a.partials.shifted != nullptr)) return sum.template operator()<Terms::shifted>();
  }
  sum.template operator()<Terms::sum>();
}

template <Set kSet, bool kRare>
__device__ inline void add_highest(const float (&d)[96], const HalfRows& rows, const RowData& data,
                                   const LeftOut& mask, const Arguments& a,
                                   const float (&highest)[2], int block, Sums* sums) {
  if (is_any<kSet> && again(a.partials.argmax != nullptr)) {
    find_lowest<kRare>(d, rows, data, mask, a, highest, block, sums);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) sums->maximum[h] = fmaxf(sums->maximum[h], highest[h]);
}

// Whether a row of the warp may be too far from its anchor, judged by the maximum of these columns.
template <Set kSet>
__device__ inline bool is_far(const HalfRows& rows, const Arguments& a, const float (&highest)[2],
                              const Sums& sums) {
  bool far = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float top = fmaxf(sums.maximum[h], highest[h]);
    const float distance = fmaf(top, log2e, -rows.anchor[h]);
    far |= sums.from[h] == sums.from[h] ||
           !(is_within<kSet>(rows, a, h, distance) || top == -infinity());
  }
  return __any_sync(whole_warp, far);
}

// Sums 64 columns from `column` on, number `block` of the tile. The fast copy of the code runs
// first; if it does not serve these columns, the careful copy does.
template <class T, Mode kMode, Set kSet>
__device__ inline void add_columns(const float (&d)[96], const HalfRows& rows, const RowData& data,
                                   const Arguments& a, int valid, int column, int block,
                                   uint32_t box, bool rare, Sums* sums) {
  float highest[2];
  if (!rare) {
#pragma unroll
    for (int h = 0; h < 2; ++h) highest[h] = find_highest<false>(d, LeftOut{}, a, h);
    rare = is_far<kSet>(rows, a, highest, *sums);
    if (!rare) {
      add_highest<kSet, false>(d, rows, data, LeftOut{}, a, highest, block, sums);
      if (is_weighted<kSet>(a)) weigh<false>(d, LeftOut{}, a, column, sums);
      if (has_more<kSet>) add_above<false>(d, rows, data, LeftOut{}, a, sums);
      return sum_64<T, kMode, kSet, false>(d, rows, LeftOut{}, a, valid, box, sums);
    }
  }
  const LeftOut mask = find_left_out<kMode>(data, rows, a, valid, block);
#pragma unroll
  for (int h = 0; h < 2; ++h) highest[h] = find_highest<true>(d, mask, a, h);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    move_start<kSet>(rows, a, h, fmaxf(sums->maximum[h], highest[h]), sums);
  }
  add_highest<kSet, true>(d, rows, data, mask, a, highest, block, sums);
  if (is_weighted<kSet>(a)) weigh<true>(d, mask, a, column, sums);
  if (has_more<kSet>) add_above<true>(d, rows, data, mask, a, sums);
  sum_64<T, kMode, kSet, true>(d, rows, mask, a, valid, box, sums);
}

// Both rows at once, because exchanges within a quad have a long latency.
template <class T, class F>
__device__ inline void quad_reduce(T (&x)[2], F&& f) {
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    const T other[2] = {__shfl_xor_sync(whole_warp, x[0], offset),
                        __shfl_xor_sync(whole_warp, x[1], offset)};
    x[0] = f(x[0], other[0]), x[1] = f(x[1], other[1]);
  }
}

// Writes the sums of 64 rows to memory, relative to the rows' maxima.
template <Set kSet>
__device__ inline void write_half(const HalfRows& rows, const Arguments& a, int valid,
                                  const Sums& sums) {
  const auto add = [](float x, float y) { return x + y; };
  const bool shifts = is_any<kSet> && a.partials.shifted != nullptr;
  const bool names = is_any<kSet> && a.partials.argmax != nullptr;
  float maximum[2] = {sums.maximum[0], sums.maximum[1]};
  quad_reduce(maximum, [](float x, float y) { return fmaxf(x, y); });
  float sum[2], shifted[2], weighted[2] = {sums.weighted[0], sums.weighted[1]};
  float squared[2];
  int above[2] = {sums.lowest[0] >> 16, sums.lowest[1] >> 16};
  const bool squares = has_more<kSet> && a.partials.squared != nullptr;
  const bool counts = has_more<kSet> && a.partials.above != nullptr;
  const bool weighs = has_more<kSet> && a.partials.mass_rows != 0;
  int lowest[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float from = sums.from[h], own = sums.sum[h];
    const float by = bounded(from == from ? (maximum[h] - from) * log2e
                                          : fmaf(maximum[h], log2e, -rows.anchor[h]));
    const float factor = own == 0 ? 0.0f : exp2_fast(-by);
    const float lifted = factor * fmaf(-by, own, sums.shifted[h]) * ln2;
    sum[h] = own == 0 ? 0.0f : own * factor;
    shifted[h] = own == 0 ? 0.0f : lifted;
    squared[h] = own == 0 ? 0.0f : sums.squared[h] * factor * (weighs ? 1.0f : factor);
    lowest[h] = sums.maximum[h] == maximum[h] ? sums.lowest[h] & no_column : no_column;
  }
  quad_reduce(sum, add);
  if (is_weighted<kSet>(a)) quad_reduce(weighted, add);
  if (shifts) quad_reduce(shifted, add);
  if (squares || weighs) quad_reduce(squared, add);
  if (counts) quad_reduce(above, [](int x, int y) { return x + y; });
  if (names) quad_reduce(lowest, [](int x, int y) { return min(x, y); });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = rows.row + 8 * h;
    if (threadIdx.x % 4 != 0 || row >= valid) continue;
    const int64_t to = int64_t{row} * a.partials.segments + rows.column_tile;
    a.partials.maximum[to] = maximum[h];
    a.partials.sum[to] = sum[h];
    if (is_weighted<kSet>(a)) a.partials.weighted[to] = weighted[h];
    if (shifts) a.partials.shifted[to] = shifted[h];
    if (squares) a.partials.squared[to] = squared[h];
    if (counts) a.partials.above[to] = above[h];
    if (weighs) a.partials.mass()[to] = squared[h];
    if (names) a.partials.argmax[to] = rows.column + (lowest[h] == no_column ? 0 : lowest[h]);
  }
}

}  // namespace logitless::cuda::sm90
