// SPDX-License-Identifier: Apache-2.0
// What kernels read of a token.
#pragma once

#include "src/cuda/numbers.cuh"
#include "src/cuda/tokens.h"

namespace logitless::cuda {

enum class TokenKind { counts, ignored, outside };

__device__ inline TokenKind kind_of_target(const TokenInput& in, int64_t target) {
  if (target == in.options.ignore_index) return TokenKind::ignored;
  if (target >= 0 && target < in.whole()) return TokenKind::counts;
  return in.options.out_of_range == OutOfRange::ignore ? TokenKind::ignored : TokenKind::outside;
}

// The coefficients of dz of compacted token k, relative to gradient_scale, from its finished state.
__device__ inline RowGradient token_gradient(const TokenInput& in, const Tokens& t, int64_t k,
                                             const RowState& state) {
  const int64_t i = t.row[k];
  const TokenScalars& scalars = *t.scalars;
  const float inv = scalars.inv_gradient_scale;
  float g = scalars.upstream;
  if (in.per_row_upstream) {
    g = load(in.grad_loss, i) * inv;
    // One class alone, without z-loss, has a gradient of exactly 0.
    if (in.options.input_kind == InputKind::logits && in.whole() == 1 && in.options.z_loss == 0 &&
        isfinite(g)) {
      g = 0;
    }
  }
  const float grad_lse = present(in.grad_lse) ? load(in.grad_lse, i) * inv : 0;
  const float grad_target = present(in.grad_target_logit) ? load(in.grad_target_logit, i) * inv : 0;
  const float grad_entropy = present(in.grad_entropy) ? load(in.grad_entropy, i) * inv : 0;
  return row_gradient(scalars.constants, state, t.target_weight[k], t.token_weight[k], g, grad_lse,
                      grad_target, grad_entropy);
}

// c_j of column j of the views.
__device__ inline float class_weight(const TokenInput& in, int64_t j) {
  return present(in.vocab_weight) ? load(in.vocab_weight, in.start() + j) : 1.0f;
}

// P p - o at the target, of p and 1 - p: without cancellation where p is near 1, and without adding
// P where p is small.
__device__ inline float target_draw(float probability, float onehot, float p, float rest) {
  return p < 0.5f ? fmaf(probability, p, -onehot) : fmaf(-probability, rest, probability - onehot);
}

}  // namespace logitless::cuda
