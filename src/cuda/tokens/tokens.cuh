// SPDX-License-Identifier: Apache-2.0
// Device functions that read and write a token's values.
#pragma once

#include "src/cuda/numbers.cuh"
#include "src/cuda/tokens/tokens.h"
#include "src/cuda/views.cuh"
#include "src/row/gradient.h"
#include "src/row/loss.h"
#include "src/row/statistics.h"

namespace logitless::cuda {

// An inactive token counts, but has no gradient.
enum class TokenKind { counts, inactive, ignored, outside };

__device__ inline TokenKind kind_of_target(const TokenInput& in, int64_t target) {
  if (target == in.options.ignore_index) return TokenKind::ignored;
  if (target >= 0 && target < in.whole()) return TokenKind::counts;
  return in.options.out_of_range == OutOfRange::ignore ? TokenKind::ignored : TokenKind::outside;
}

// The target of token i. Without targets every token counts, as if its target were column 0, which
// token_input ensures is not ignore_index.
__device__ inline int64_t target_of(const TokenInput& in, int64_t i) {
  return present(in.target) ? load_int(in.target, i) : 0;
}

// Whether the token, which counts, has no gradient. Without `inactive` [N] all tokens have a
// gradient or none does.
__device__ inline bool is_inactive(const TokenInput& in, const uint8_t* inactive, int64_t i) {
  if (inactive != nullptr) return inactive[i] != 0;
  return in.skips_inactive && present(in.grad_loss) && load(in.grad_loss) == 0;
}
__device__ inline TokenKind kind_of_token(const TokenInput& in, const uint8_t* inactive, int64_t i,
                                          int64_t target) {
  const TokenKind kind = kind_of_target(in, target);
  if (kind != TokenKind::counts) return kind;
  return is_inactive(in, inactive, i) ? TokenKind::inactive : kind;
}

__device__ inline MapFactors with_token(MapFactors map, const TokenMap& m) {
  map.identity = false;
  map.slope = m.slope;
  map.outward = m.outward;
  map.outward_low = m.outward_low;
  map.backward = m.backward;
  return map;
}
__device__ inline MapFactors map_of_token(const MapFactors& map, const Tokens& t, int64_t k) {
  return t.map == nullptr ? map : with_token(map, t.map[t.row[k]]);
}

// The target's column in the views, or -1 if it is in another shard.
__device__ inline int column_of_target(const TokenInput& in, int64_t target) {
  const int64_t column = target - in.start();
  return column >= 0 && column < in.vocab ? static_cast<int>(column) : -1;
}
__device__ inline float target_weight(const TokenInput& in, int64_t target) {
  return present(in.vocab_weight) ? load(in.vocab_weight, target) : 1.0f;
}
__device__ inline float token_weight(const TokenInput& in, int64_t i) {
  return present(in.token_weight) ? load(in.token_weight, i) : 1.0f;
}

// The coefficients of dz of token i, relative to gradient_scale, from its finished state.
__device__ inline RowGradient token_gradient(const TokenInput& in, const TokenScalars& scalars,
                                             int64_t i, float target_weight, float token_weight,
                                             const RowState& state) {
  const float inv = scalars.inv_gradient_scale;
  float g = scalars.upstream;
  if (in.per_row_upstream) {
    g = load(in.grad_loss, i) * inv;
    // A single class, without z-loss, has a gradient of exactly 0.
    if (in.options.input_kind == InputKind::logits && in.whole() == 1 && in.options.z_loss == 0 &&
        isfinite(g)) {
      g = 0;
    }
  }
  const float grad_lse = present(in.grad_lse) ? load(in.grad_lse, i) * inv : 0;
  const float grad_target = present(in.grad_target_logit) ? load(in.grad_target_logit, i) * inv : 0;
  const float grad_entropy = present(in.grad_entropy) ? load(in.grad_entropy, i) * inv : 0;
  return row_gradient(scalars.constants, state, target_weight, token_weight, g, grad_lse,
                      grad_target, grad_entropy);
}
// For compacted token k.
__device__ inline RowGradient token_gradient(const TokenInput& in, const Tokens& t, int64_t k,
                                             const RowState& state) {
  return token_gradient(in, *t.scalars, t.row[k], t.target_weight[k], t.token_weight[k], state);
}

__device__ inline void put(const TensorView& view, int64_t i, float x) {
  if (present(view)) *address<float>(view, i) = x;
}

// Writes the statistics of token i, or 0 and -1 if it does not count.
template <bool kCounts>
__device__ inline void put_statistics(const TokenStatistics& out, int64_t i,
                                      const RowStatistics& s) {
  with_each_statistic([&](auto place) {
    constexpr auto number = kStatistics[place()].number;
    constexpr auto index = kStatistics[place()].index;
    constexpr auto of = kStatistics[place()].view;
    const TensorView& view = out.*of;
    if (!present(view)) return;
    if constexpr (index != nullptr) {
      store_int(view, i, kCounts ? index(s) : -1);
    } else {
      *address<float>(view, i) = kCounts ? number(s) : 0;
    }
  });
}

// Writes the statistics of token i; `target` is its column in the views, or negative.
__device__ inline void put_state(const TokenInput& in, const TokenStatistics& out, int64_t i,
                                 int target, RowStatistics s) {
  s.target_elsewhere = target < 0;
  if (target < 0) s.target_logit = -infinity();
  s.argmax += in.start();
  put_statistics<true>(out, i, s);
}

__device__ inline float token_loss(const TokenScalars& scalars, int target, float target_weight,
                                   float token_weight, const RowState& s) {
  // Negative: the target is in another shard.
  const float weight = target < 0 ? 0 : target_weight;
  return row_loss(scalars.constants, s, weight, token_weight);
}

// Where the loss of token i goes: to `losses` if they are reduced, else to the caller.
__device__ inline float* loss_of(float* losses, const TensorView& loss, int64_t i) {
  return losses != nullptr ? losses + i : address<float>(loss, i);
}

// One block computes the sum or mean of the losses of tokens that count: per thread in token order,
// then over the threads, in an order that depends only on the positions among the valid tokens.
// With kCompacted the losses are in compacted order, else by token.
template <int kThreads, bool kCompacted>
__device__ void reduce_losses(Reduction reduction, EmptyMean empty_mean, const Tokens& t,
                              const float* losses, float* loss) {
  constexpr int many = 16;  // loads in flight
  double sum = 0;
  const int valid = t.scalars->valid;
  for (int first = threadIdx.x; first < valid; first += many * kThreads) {
    float x[many];
#pragma unroll
    for (int i = 0; i < many; ++i) {
      const int k = first + i * kThreads;
      x[i] = k < valid ? __ldcg(losses + (kCompacted ? k : t.row[k])) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < many; ++i) sum += x[i];
  }
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  const TokenScalars& s = *t.scalars;
  if (reduction == Reduction::mean) sum /= s.normalizer;
  if (s.empty_mean) sum = empty_mean == EmptyMean::zero ? 0 : nan("");
  if (s.outside > 0) sum = nan("");
  *loss = static_cast<float>(sum);
}

// c_j of column j of the views.
__device__ inline float class_weight(const TokenInput& in, int64_t j) {
  return present(in.vocab_weight) ? load(in.vocab_weight, in.start() + j) : 1.0f;
}

}  // namespace logitless::cuda
