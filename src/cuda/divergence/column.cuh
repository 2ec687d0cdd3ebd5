// SPDX-License-Identifier: Apache-2.0
// What a column adds to a divergence and its gradient: docs/semantics.md, "Divergences of two
// heads".
//
// With d = log p - log q the summands below are not negative, and their sum is the divergence
// because p and q each sum to 1. An error of d that a whole row shares cancels to first order:
//   forward_kl  q (e^d - 1 - d) = (p - q) - q d        reverse_kl  p d - (p - q)
//   jsd         -(beta q L + (1 - beta) p l)           skew_kl     (1 - beta) (p - q) - q L
//   l = log(m/p)                                       L = log(m/q)
// dz_j = scale p_j (f_j - sum_k p_k f_k) for all kinds but forward_kl, whose dz_j is p_j - q_j. A
// pass over the rows of both heads is limited by instructions, not by memory, so these functions
// use as few of them as an error of a few 2^-24 of the result allows.
#pragma once

#include "src/cuda/numbers.cuh"
#include "src/row/divergence.h"

namespace logitless::cuda {

// A column of both heads. d is NaN if both logits are -inf (p and q are 0), and in a row of NaN
// (DzRow); results then only need to be finite.
struct TwoHeads {
  float p, q;
  float d;  // log p - log q
};

// (exp(-x) - 1) / -x for x in [0, 1], with a relative error of 4 2^-24.
__device__ inline float expm1_ratio(float x) {
  float y = 0x1.db9c8ap-11f;
  y = fmaf(y, -x, 0x1.005dfap-7f);
  y = fmaf(y, -x, 0x1.5333eap-5f);
  y = fmaf(y, -x, 0x1.55351ep-3f);
  y = fmaf(y, -x, 0x1.fffe94p-2f);
  return fmaf(y, -x, 1.0f);
}
// x if c >= 0, else y; y if c is NaN. In assembly, because the compiler would branch around the
// longer side.
__device__ inline float choose(float c, float x, float y) {
  float chosen;
  asm("slct.f32.f32 %0, %1, %2, %3;" : "=f"(chosen) : "f"(x), "f"(y), "f"(c));
  return chosen;
}

// p - q, without cancellation if they are close.
__device__ inline float difference(const TwoHeads& c) {
  const float x = fabsf(c.d);
  return choose(1 - x, fmaxf(c.p, c.q) * (c.d * expm1_ratio(x)), c.p - c.q);
}

// exp(-|d|) and exp(-|d|) - 1. Beyond |d| = 87 one head is negligible.
struct Ratio {
  float size, e, s;
  __device__ explicit Ratio(float d) : size(fminf(fabsf(d), 87.0f)), e(exp2_fast(-size * log2e)) {
    s = choose(1 - size, -size * expm1_ratio(size), e - 1);
  }
};

// log u. `rest` = u - 1 is more accurate where u is near 1.
__device__ inline float log_of_sum(float u, float rest) {
  const float s = __fdividef(rest, 2 + rest), v = s * s;
  float y = 0x1.208bcap-3f;
  y = fmaf(y, v, 0x1.1e510cp-3f);
  y = fmaf(y, v, 0x1.99dae6p-3f);
  y = fmaf(y, v, 0x1.5554e0p-2f);
  // true for rest in [-1/2, 1]
  return choose(0.75f - fabsf(rest - 0.25f), 2 * fmaf(y * v, s, s), log2_fast(u) * ln2);
}

// A column's terms, from values that are computed once.
template <DivergenceKind kKind>
struct ColumnTerms;

template <>
struct ColumnTerms<DivergenceKind::forward_kl> {
  TwoHeads c;
  float less;  // p - q
  __device__ ColumnTerms(const TwoHeads& c, float) : c(c), less(difference(c)) {}
  // The summand of the divergence, not negative up to rounding.
  __device__ float value() const { return c.q == 0 ? c.p : fmaf(-c.q, c.d, less); }
  // f_j, whose mean over p is subtracted.
  __device__ float slope() const { return 0; }
};

template <>
struct ColumnTerms<DivergenceKind::reverse_kl> {
  TwoHeads c;
  __device__ ColumnTerms(const TwoHeads& c, float) : c(c) {}
  __device__ float value() const { return c.p == 0 ? c.q : fmaf(c.p, c.d, -difference(c)); }
  __device__ float slope() const { return c.p == 0 ? 0.0f : c.d; }
};

template <>
struct ColumnTerms<DivergenceKind::tv> {
  TwoHeads c;
  __device__ ColumnTerms(const TwoHeads& c, float) : c(c) {}
  __device__ float value() const { return 0.5f * fabsf(difference(c)); }
  __device__ float slope() const { return c.d == 0 ? 0.0f : copysignf(0.5f, c.d); }
};

template <>
struct ColumnTerms<DivergenceKind::jsd> {
  TwoHeads c;
  float beta, log_m_over_p, log_m_over_q;
  __device__ ColumnTerms(const TwoHeads& c, float beta) : c(c), beta(beta) {
    const Ratio r(c.d);
    const bool above = c.d > 0;
    const float part = above ? beta : 1 - beta, rest = above ? 1 - beta : beta;
    // log m relative to the greater of p and q, and relative to the lesser.
    const float greater = log_of_sum(fmaf(part, r.e, rest), part * r.s);
    float lesser = greater + r.size;
    if (beta != 0.5f) {  // the two terms may cancel
      const float w = -rest * __fdividef(r.s, r.e);
      lesser = log_of_sum(1 + w, w);
    }
    log_m_over_p = above ? greater : lesser;
    log_m_over_q = above ? lesser : greater;
  }
  __device__ float value() const {
    return fmaf(-beta * c.q, log_m_over_q, -((1 - beta) * c.p) * log_m_over_p);
  }
  __device__ float slope() const { return -log_m_over_p; }
};

template <>
struct ColumnTerms<DivergenceKind::skew_kl> {
  TwoHeads c;
  float beta;
  Ratio r;
  __device__ ColumnTerms(const TwoHeads& c, float beta) : c(c), beta(beta), r(c.d) {}
  __device__ float value() const {
    const bool above = c.d > 0;
    const float w = (1 - beta) * (above ? -__fdividef(r.s, r.e) : r.s);
    const float log_m_over_q = log_of_sum(above ? 1 + w : fmaf(1 - beta, r.e, beta), w);
    const float less = above ? -c.p * r.s : c.q * r.s;  // p - q
    return fmaf(1 - beta, less, -c.q * log_m_over_q);
  }
  __device__ float slope() const {  // 1 - q/m
    const bool above = c.d > 0;
    const float part = above ? beta : 1 - beta, rest = above ? 1 - beta : beta;
    const float size = __fdividef((1 - beta) * r.s, fmaf(part, r.e, rest));
    return above ? -size : size;
  }
};

// dz_j; `mean` is sum_k p_k f_k.
template <DivergenceKind kKind>
__device__ float dz_of(const ColumnTerms<kKind>& column, float mean) {
  if constexpr (kKind == DivergenceKind::forward_kl) {
    return column.less;
  } else {
    float p = column.c.p;
    if constexpr (kKind == DivergenceKind::jsd || kKind == DivergenceKind::skew_kl) {
      p *= 1 - column.beta;
    }
    return p * (column.slope() - mean);
  }
}

}  // namespace logitless::cuda
