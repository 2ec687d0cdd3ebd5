// SPDX-License-Identifier: Apache-2.0
// What a column adds to a divergence and its gradient, for host and device: docs/semantics.md,
// "Divergences of two heads".
//
// With d = log p - log q the summands are not negative, and their sum is the divergence because p
// and q each sum to 1. Errors of d that a row has in common then cancel in the first order:
//   forward_kl  q (e^d - 1 - d) = (p - q) - q d        reverse_kl  p d - (p - q)
//   jsd         -(beta q L + (1 - beta) p l)           skew_kl     (1 - beta) (p - q) - q L
//   l = log(m/p) = log1p(beta expm1(-d))               L = log(m/q) = log1p((1 - beta) expm1(d))
// dz_j = scale p_j (f_j - sum_k p_k f_k) for all kinds but forward_kl, whose dz_j is p_j - q_j.
#pragma once

#include <cmath>
#include <type_traits>

#include "logitless/ops.h"
#include "src/host_device.h"

namespace logitless {

// Returns the kind whose formulas serve at this beta.
LOGITLESS_HOST_DEVICE constexpr DivergenceKind effective_kind(const DivergenceOptions& o) {
  const bool mixes = o.kind == DivergenceKind::jsd || o.kind == DivergenceKind::skew_kl;
  if (mixes && o.beta == 0) return DivergenceKind::forward_kl;
  return o.kind == DivergenceKind::jsd && o.beta == 1 ? DivergenceKind::reverse_kl : o.kind;
}

// Calls f(kind) with the kind as a constant.
template <class F>
void with_kind(DivergenceKind kind, F&& f) {
  using enum DivergenceKind;
  switch (kind) {
    case forward_kl:
      return f(std::integral_constant<DivergenceKind, forward_kl>());
    case reverse_kl:
      return f(std::integral_constant<DivergenceKind, reverse_kl>());
    case jsd:
      return f(std::integral_constant<DivergenceKind, jsd>());
    case skew_kl:
      return f(std::integral_constant<DivergenceKind, skew_kl>());
    case tv:
      return f(std::integral_constant<DivergenceKind, tv>());
  }
}

// Beyond it a probability is nothing beside the other, and expm1 stays finite.
inline constexpr float most_log_ratio = 80;

// A column of both heads. Where both are 0 it is left out: is_there is false and d is 0.
struct TwoHeads {
  float p, q;
  float log_p, log_q;
  float d;  // log p - log q
  bool is_there;
};

// z and t are the heads' logits; `apart` is lse_z - lse_t, formed of the rows' two numbers each.
LOGITLESS_HOST_DEVICE inline TwoHeads two_heads(float z, float t, float log_p, float log_q, float p,
                                                float q, float apart) {
  const bool is_there = !(p == 0 && q == 0);
  return {p, q, log_p, log_q, is_there ? (z - t) - apart : 0.0f, is_there};
}

// Returns p - q without cancellation.
LOGITLESS_HOST_DEVICE inline float difference(const TwoHeads& c) {
  return c.d <= 0 ? c.q * expm1f(c.d) : -c.p * expm1f(-c.d);
}

template <DivergenceKind kKind>
struct Divergence {
  // Returns the summand of D, which is not negative.
  LOGITLESS_HOST_DEVICE static float value(const TwoHeads& c, float beta) {
    using enum DivergenceKind;
    if (!c.is_there) return 0;
    float x;
    if constexpr (kKind == forward_kl) {
      x = difference(c) - (c.q == 0 ? 0.0f : c.q * c.d);
    } else if constexpr (kKind == reverse_kl) {
      x = (c.p == 0 ? 0.0f : c.p * c.d) - difference(c);
    } else if constexpr (kKind == jsd) {
      x = -(beta * c.q * log_m_over_q(c, beta) + (1 - beta) * c.p * log_m_over_p(c, beta));
    } else if constexpr (kKind == skew_kl) {
      x = (1 - beta) * difference(c) - c.q * log_m_over_q(c, beta);
    } else {
      x = 0.5f * difference(c);
      return x < 0 ? -x : x;
    }
    return x < 0 ? 0.0f : x;  // NaN stays
  }
  // Returns f_j, whose mean over p is subtracted.
  LOGITLESS_HOST_DEVICE static float slope(const TwoHeads& c, float beta) {
    using enum DivergenceKind;
    if constexpr (kKind == reverse_kl) {
      return c.p == 0 ? 0.0f : c.d;
    } else if constexpr (kKind == jsd) {
      return -log_m_over_p(c, beta);
    } else if constexpr (kKind == skew_kl) {
      const float e = (1 - beta) * expm1f(bounded(c.d));
      return e / (1 + e);
    } else if constexpr (kKind == tv) {
      return c.d > 0 ? 0.5f : c.d < 0 ? -0.5f : c.d;
    } else {
      return 0;
    }
  }
  // Returns dz_j; `mean` is sum_k p_k f_k.
  LOGITLESS_HOST_DEVICE static float dz(const TwoHeads& c, float beta, float mean) {
    using enum DivergenceKind;
    if constexpr (kKind == forward_kl) {
      return c.is_there ? difference(c) : 0.0f;
    } else {
      constexpr bool mixes = kKind == jsd || kKind == skew_kl;
      const float x = c.p * (slope(c, beta) - mean);
      return mixes ? (1 - beta) * x : x;
    }
  }

 private:
  LOGITLESS_HOST_DEVICE static float bounded(float d) {
    return d > most_log_ratio ? most_log_ratio : d < -most_log_ratio ? -most_log_ratio : d;
  }
  LOGITLESS_HOST_DEVICE static float log_m_over_p(const TwoHeads& c, float beta) {
    return log1pf(beta * expm1f(-bounded(c.d)));
  }
  LOGITLESS_HOST_DEVICE static float log_m_over_q(const TwoHeads& c, float beta) {
    return log1pf((1 - beta) * expm1f(bounded(c.d)));
  }
};

}  // namespace logitless
