// SPDX-License-Identifier: Apache-2.0
// A row's state from its partial sums. Segments l, l + 32, ... are added by lane l of 32, then a
// tree over the lanes adds these sums. The order depends only on the vocabulary, however many lanes
// there are.
//   m = max m_b   S = sum s_b exp(m_b - m)   T = sum exp(m_b - m) (t_b + (m_b - m) s_b)
#pragma once

#include "src/cuda/linear/row_segments.cuh"

namespace logitless::cuda {

// What is known of a row before its sums are added.
struct RowToken {
  int64_t i;   // the token's index
  int target;  // a column, or negative if in another shard
  float target_weight, token_weight;
  float target_logit;
};

struct RowTotals {
  // max m_b over the columns except the target's; a segment may have its anchor instead of m_b
  float others = -INFINITY;
  float maximum = 0;  // with the target's column; the sums are relative to it
  float sum = 0, shifted = 0, weighted = 0, logits = 0, squared = 0, mass = 0;
  int argmax = INT32_MAX, above = 0;
};

__device__ inline float maximum_with_target(float others, const RowToken& token) {
  const float z = token.target_logit;
  if (token.target < 0) return others;
  // NaN if any logit is NaN: the row has no maximum.
  return z != z ? nan_value() : fmaxf(others, z);
}

// A segment of -inf adds 0; if its sum is NaN, it stays NaN.
__device__ inline float lift_of(float own, float maximum) {
  return own == -infinity() ? 1.0f : exp_nonpositive(own - maximum);
}

// Calls f(b, sums, shifted) for segments first, first + 32, ..., in order; `shifted` may be null.
// It loads several before it uses them, because a warp mostly waits for memory
// (docs/experiments/2026-11-python-overhead.md, "Few tokens").
template <class F>
__device__ inline void for_segments(const RowSegments& segments, const float* shifted, int first,
                                    F&& f) {
  constexpr int batch = 4;
  const int count = segments.count();
  if (!segments.are_in_place()) {
#pragma unroll 1
    for (int b = first; b < count; b += 32) {
      f(b, segments(b), shifted != nullptr ? shifted[b] : 0.0f);
    }
    return;
  }
#pragma unroll 1
  for (int b = first; b < count; b += 32 * batch) {
    PartialSum own[batch];
    float of_shifted[batch] = {};
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      if (b + 32 * n < count) own[n] = segments.in_place(b + 32 * n);
    }
    if (shifted != nullptr) {
#pragma unroll
      for (int n = 0; n < batch; ++n) {
        if (b + 32 * n < count) of_shifted[n] = shifted[b + 32 * n];
      }
    }
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      if (b + 32 * n < count) f(b + 32 * n, own[n], of_shifted[n]);
    }
  }
}

// A warp adds up a row. If kPlain, only sum and maximum.
template <bool kPlain>
__device__ inline RowTotals sum_by_warp(const Partials& partials, const RowSegments& segments,
                                        int64_t base, const RowToken& token, int lane) {
  constexpr int held = 2;  // segments per lane held in registers
  PartialSum own[held];
  const int count = segments.count();
  if (partials.unit_width == 1) {
    segments.of_tiles(lane, own);
  } else {
#pragma unroll
    for (int n = 0; n < held; ++n) {
      if (32 * n + lane < count) own[n] = segments.in_place(32 * n + lane);
    }
  }
  RowTotals all;
#pragma unroll
  for (int n = 0; n < held; ++n) all.others = fmaxf(all.others, own[n].reference);
  const int rest = 32 * held + lane;
  for_segments(segments, nullptr, rest, [&](int, const PartialSum& x, float) {
    all.others = fmaxf(all.others, x.reference);
  });
  all.others = warp_max(all.others);
  all.maximum = maximum_with_target(all.others, token);
  const float* shifted = kPlain || partials.shifted == nullptr ? nullptr : partials.shifted + base;
  const auto add = [&](int b, const PartialSum& x, float of_shifted) {
    const float lift = lift_of(x.reference, all.maximum);
    all.sum = fmaf(x.sum, lift, all.sum);
    if constexpr (kPlain) return;
    if (shifted != nullptr && x.reference != -infinity()) {
      const float distance = fmaxf(x.reference - all.maximum, least_exponent);
      all.shifted = fmaf(lift, fmaf(distance, x.sum, of_shifted), all.shifted);
    }
    if (partials.weighted != nullptr) all.weighted += partials.weighted[base + b];
    if (partials.logits != nullptr) all.logits += partials.logits[base + b];
    if (partials.squared != nullptr) {
      all.squared = fmaf(partials.squared[base + b], lift * lift, all.squared);
    }
    if (partials.above != nullptr) all.above += partials.above[base + b];
    if (partials.argmax != nullptr && x.reference == all.others) {
      all.argmax = min(all.argmax, partials.argmax[base + b]);
    }
  };
#pragma unroll
  for (int n = 0; n < held; ++n) {
    const int b = 32 * n + lane;
    if (b < count) add(b, own[n], shifted != nullptr ? shifted[b] : 0.0f);
  }
  for_segments(segments, shifted, rest, add);
  all.sum = warp_sum(all.sum);
  if constexpr (kPlain) return all;
  if (partials.shifted != nullptr) all.shifted = warp_sum(all.shifted);
  if (partials.weighted != nullptr) all.weighted = warp_sum(all.weighted);
  if (partials.logits != nullptr) all.logits = warp_sum(all.logits);
  if (partials.squared != nullptr) all.squared = warp_sum(all.squared);
  if (partials.above != nullptr) all.above = warp_sum(all.above);
  if (partials.mass_rows != 0) {  // a separate loop, to save registers
#pragma unroll 1
    for (int b = lane; b < count; b += 32) {
      const float lift = lift_of(partials.maximum[base + b], all.maximum);
      all.mass = fmaf(partials.mass()[base + b], lift, all.mass);
    }
    all.mass = warp_sum(all.mass);
  }
  if (partials.argmax != nullptr) all.argmax = warp_min(all.argmax);
  return all;
}

// kLanes lanes of a warp add up units (units.h), each in place of 32 / kLanes lanes. With several
// rows side by side, a warp does most of its work for all of them at once.
template <int kLanes>
__device__ inline RowTotals sum_by_lanes(const RowSegments& segments, const RowToken& token,
                                         int lane) {
  constexpr int each = 32 / kLanes;
  const int whole = segments.first_single(), count = segments.count();
  PartialSum own[each];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int b = first + kLanes * i + lane;
      own[i] = b < whole ? segments.in_place(b) : PartialSum{};
    }
  };
  // Units of single tiles come after the others in a row; a lane usually has at most one.
  const int first_single = whole + ((lane - whole) & (kLanes - 1));
  PartialSum single;
  RowTotals all;
  if (first_single < count) single = segments.single(first_single);
  all.others = single.reference;
  const int last = whole > 0 ? (whole - 1) / 32 * 32 : 0;
#pragma unroll 1
  for (int first = 0; first <= last; first += 32) {
    load(first);
#pragma unroll
    for (int i = 0; i < each; ++i) all.others = fmaxf(all.others, own[i].reference);
  }
#pragma unroll 1
  for (int b = first_single + kLanes; b < count; b += kLanes) {
    all.others = fmaxf(all.others, segments.single(b).reference);
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    all.others = fmaxf(all.others, __shfl_xor_sync(whole_warp, all.others, offset));
  }
  all.maximum = maximum_with_target(all.others, token);
  float sum[each];
#pragma unroll
  for (int i = 0; i < each; ++i) sum[i] = 0;
#pragma unroll 1
  for (int first = 0; first <= last; first += 32) {
    if (last > 0) load(first);  // a single group is still in registers
#pragma unroll
    for (int i = 0; i < each; ++i) {
      sum[i] = fmaf(own[i].sum, lift_of(own[i].reference, all.maximum), sum[i]);
    }
  }
#pragma unroll 1
  for (int b = first_single; b < count; b += kLanes) {
    if (b > first_single) single = segments.single(b);
    const float lift = lift_of(single.reference, all.maximum);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (b / kLanes % each == i) sum[i] = fmaf(single.sum, lift, sum[i]);
    }
  }
  // The tree over 32 lanes, computed by fewer lanes.
#pragma unroll
  for (int n = each / 2; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i] += sum[i + n];
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum[0] += __shfl_xor_sync(whole_warp, sum[0], offset);
  }
  all.sum = sum[0];
  return all;
}

// Changes a row's sums from an anchor to a reference near its maximum: the total is t 2^k with t in
// [1, 2), and k ln 2 moves to the reference. The rounding error of the new reference is added to
// log t, so that the loss, most of which is log 2^k, stays as accurate as its own rounding.
__device__ inline void come_near(float total, RowState* state) {
  constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;  // k ln2_high is exact
  if (!(total > 0 && total < infinity()) || (total >= 1 && total < 2)) return;
  const int k = static_cast<int>(__float_as_uint(total) >> 23) - 127;
  const float t = total * __uint_as_float(static_cast<uint32_t>(127 - k) << 23);
  const float up = static_cast<float>(k) * ln2_high, m = state->reference + up;
  const float added = m - state->reference, lost = (state->reference - (m - added)) + (up - added);
  state->reference = m;
  state->log_sum = logf(t) + fmaf(static_cast<float>(k), ln2_low, lost);
}

// `rest` is 1 - p_t.
template <bool kPlain>
__device__ inline RowStatistics state_of_totals(const Partials& partials, RowTotals r,
                                                const RowToken& token, bool vocab_is_whole,
                                                float* rest) {
  const bool here = token.target >= 0;
  const float z = token.target_logit;
  // The sum has a NaN that the maxima missed.
  if (r.sum != r.sum && r.maximum != infinity()) r.maximum = nan_value();
  const float distance = z - r.maximum;
  const float at_target = here ? exp_nonpositive(distance) : 0.0f;
  const float total = r.sum + at_target;
  RowStatistics state;
  state.reference = r.maximum;
  state.log_sum = here && z == r.maximum ? log1pf(r.sum) : logf(total);
  if (partials.anchored) come_near(total, &state);
  if (r.maximum != r.maximum || r.maximum == infinity()) state.log_sum = nan_value();
  // If every column is -inf, no probability is defined, unless a shard's other columns may have
  // some.
  if (r.maximum == -infinity() && (here || vocab_is_whole)) state.log_sum = nan_value();
  state.target_logit = z;
  *rest = r.sum / total;
  if constexpr (kPlain) return state;
  const float c = here ? token.target_weight : 0.0f;
  if (partials.weighted != nullptr && c != 0) r.weighted = fmaf(c, z, r.weighted);
  state.weighted_logit_sum = r.weighted;
  state.mean_logit = r.weighted;  // the sum; the caller divides it by V
  if (partials.logits != nullptr) state.mean_logit = here ? r.logits + z : r.logits;
  if (partials.squared != nullptr) {
    const float p = at_target / total;
    state.sum_p_squared = fmaf(p, p, r.squared / total / total);
    if (state.log_sum != state.log_sum) state.sum_p_squared = nan_value();
  }
  if (partials.above != nullptr) state.rank = r.above;
  state.mass_above = state.log_sum == state.log_sum ? r.mass / total : nan_value();
  if (here && at_target > 0) {
    r.shifted = fmaf(at_target, fmaxf(distance, least_exponent), r.shifted);
  }
  state.entropy = partials.shifted != nullptr ? state.log_sum - r.shifted / total : 0;
  if (here && (z > r.others || (z == r.others && token.target < r.argmax))) {
    r.argmax = token.target;
  }
  state.argmax = partials.argmax != nullptr ? (r.argmax == INT32_MAX ? 0 : r.argmax) : -1;
  return state;
}

}  // namespace logitless::cuda
