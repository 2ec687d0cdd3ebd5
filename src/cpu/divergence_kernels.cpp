// SPDX-License-Identifier: Apache-2.0
// With s = expm1(-|d|) <= 0 and e = exp(-|d|), where d = log p - log q, no exponential overflows:
//   p - q            p <= q: q s                           p > q: -p s
//   log m/q          p <= q: log1p((1 - beta) s)           p > q: log1p(-(1 - beta) s/e)
//   log m/p          p <= q: log1p(-beta s/e)              p > q: log1p(beta s)
// Where such a log1p would cancel: log(beta + (1 - beta) e) and log((1 - beta) + beta e).
#include "src/cpu/divergence_kernels.h"

#include <cmath>

#include "src/cpu/targets.h"
#include "src/row/divergence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/divergence_kernels.cpp"
#include "hwy/foreach_target.h"
// The order of these includes matters: first the list of targets, then the loop over them, then the
// code that is repeated for each.
#include "hwy/highway.h"
#include "src/cpu/row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

using Float = hn::ScalableTag<float>;
using Vector = hn::Vec<Float>;
using Mask = hn::Mask<Float>;

// s = exp(y) - 1 and e = exp(y) for y <= 0; NaN stays NaN.
HWY_INLINE void exponentials_of(Float d, Vector y, Vector& s, Vector& e) {
  const Vector least = hn::Set(d, -87.0f), one = hn::Set(d, 1.0f);
  y = hn::IfThenElse(hn::Lt(y, least), least, y);
  Vector r, scale;
  reduce_exponent(d, y, r, scale);
  const Vector r2 = hn::Mul(r, r);
  const Vector small = hn::MulAdd(r2, exp_tail(d, r, r2), r);
  s = hn::MulAdd(scale, small, hn::Sub(scale, one));
  e = hn::Mul(scale, hn::Add(small, one));
}

// Returns log(1 + x) - x for x in [sqrt(1/2) - 1, sqrt(2) - 1], with a relative error of 1 ULP
// (Cephes' polynomial).
HWY_INLINE Vector log_tail(Float d, Vector x) {
  constexpr float c[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                         -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  Vector y = hn::Set(d, 7.0376836292e-2f);
  for (const float next : c) y = hn::MulAdd(y, x, hn::Set(d, next));
  const Vector x2 = hn::Mul(x, x);
  return hn::NegMulAdd(hn::Set(d, 0.5f), x2, hn::Mul(hn::Mul(y, x), x2));
}

// Returns log u, where u = 1 + w, from whichever of u and w is more accurate.
HWY_INLINE Vector log_of(Float d, Vector u, Vector w) {
  const hn::RebindToSigned<Float> di;
  const Vector least = hn::Set(d, 1.1754944e-38f);
  const auto bits = hn::BitCast(di, hn::IfThenElse(hn::Lt(u, least), least, u));
  // u = 2^k x with x between sqrt(1/2) and sqrt(2).
  const auto offset = hn::Sub(bits, hn::Set(di, 0x3f3504f3));
  const auto power = hn::ShiftRight<23>(offset);
  const Vector x = hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(power)));
  const Mask near = hn::And(hn::Gt(w, hn::Set(d, -0.29f)), hn::Lt(w, hn::Set(d, 0.41f)));
  const Vector k = hn::IfThenZeroElse(near, hn::ConvertTo(d, power));
  const Vector f = hn::IfThenElse(near, w, hn::Sub(x, hn::Set(d, 1.0f)));
  const Vector tail = hn::NegMulAdd(k, hn::Set(d, 2.12194440e-4f), log_tail(d, f));
  return hn::MulAdd(k, hn::Set(d, 0.693359375f), hn::Add(f, tail));
}

// SVE's vectors cannot be members of a struct, so numbers are spread where they are used; inlined,
// that is once per loop.
HWY_INLINE Vector log_p_of(Float d, const DivergenceRow& row, Vector z) {
  return hn::Sub(hn::Sub(z, hn::Set(d, row.reference)), hn::Set(d, row.log_sum));
}
HWY_INLINE Vector log_q_of(Float d, const DivergenceRow& row, Vector t) {
  return hn::Sub(hn::Sub(t, hn::Set(d, row.teacher_reference)), hn::Set(d, row.teacher_log_sum));
}
HWY_INLINE Vector distance_of(Float d, const DivergenceRow& row, Vector z, Vector t) {
  return hn::Sub(hn::Sub(z, t), hn::Set(d, row.apart));
}

struct Beta {
  float beta, rest;
};
HWY_INLINE void exponentials_of_column(Float d, Vector distance, Vector& s, Vector& e) {
  exponentials_of(d, hn::Neg(hn::Abs(distance)), s, e);
}
// Returns log(rest + part r), where r is e where `less` and 1 / e elsewhere.
HWY_INLINE Vector log_of_mixture(Float d, float part, float rest, Mask less, Vector s, Vector e) {
  const Vector of = hn::Set(d, part);
  const Vector w = hn::Mul(of, s);
  const Vector more = hn::Neg(hn::Div(w, e));
  const Vector u =
      hn::IfThenElse(less, hn::MulAdd(of, e, hn::Set(d, rest)), hn::Add(hn::Set(d, 1.0f), more));
  return log_of(d, u, hn::IfThenElse(less, w, more));
}
HWY_INLINE Vector log_m_over_p(Float d, Beta b, Mask above, Vector s, Vector e) {
  return log_of_mixture(d, b.beta, b.rest, above, s, e);
}
HWY_INLINE Vector log_m_over_q(Float d, Beta b, Mask above, Vector s, Vector e) {
  return log_of_mixture(d, b.rest, b.beta, hn::Not(above), s, e);
}

// Returns f_j; any value where p is 0.
template <DivergenceKind kKind>
HWY_INLINE Vector slope_of(Float d, Beta b, Mask above, Vector distance) {
  using enum DivergenceKind;
  if constexpr (kKind == reverse_kl) return distance;
  if constexpr (kKind == tv) {
    const Vector half = hn::Set(d, 0.5f);
    const Vector below = hn::IfThenElse(hn::Lt(distance, hn::Zero(d)), hn::Neg(half), distance);
    return hn::IfThenElse(above, half, below);
  }
  if constexpr (kKind == jsd || kKind == skew_kl) {
    Vector s, e;
    exponentials_of_column(d, distance, s, e);
    if constexpr (kKind == jsd) return hn::Neg(log_m_over_p(d, b, above, s, e));
    // 1 - q/m, with m relative to the greater of the two
    const Vector beta = hn::Set(d, b.beta), rest = hn::Set(d, b.rest);
    const Vector m =
        hn::MulAdd(hn::IfThenElse(above, beta, rest), e, hn::IfThenElse(above, rest, beta));
    const Vector size = hn::Div(hn::Mul(rest, s), m);
    return hn::IfThenElse(above, hn::Neg(size), size);
  }
  return hn::Zero(d);
}

// Returns a column's summand of D, where p or q is not 0.
template <DivergenceKind kKind>
HWY_INLINE Vector value_of_column(Float d, Beta b, Vector p, Vector q, Vector distance) {
  using enum DivergenceKind;
  const Vector zero = hn::Zero(d);
  const Mask above = hn::Gt(distance, zero);
  Vector s, e;
  exponentials_of_column(d, distance, s, e);
  const Vector apart = hn::IfThenElse(above, hn::Neg(hn::Mul(p, s)), hn::Mul(q, s));
  if constexpr (kKind == forward_kl) {
    return hn::Sub(apart, hn::IfThenZeroElse(hn::Eq(q, zero), hn::Mul(q, distance)));
  } else if constexpr (kKind == reverse_kl) {
    return hn::Sub(hn::IfThenZeroElse(hn::Eq(p, zero), hn::Mul(p, distance)), apart);
  } else if constexpr (kKind == tv) {
    return hn::Abs(hn::Mul(hn::Set(d, 0.5f), apart));
  } else {
    const Vector of_q = hn::Mul(q, log_m_over_q(d, b, above, s, e));
    const Vector rest = hn::Set(d, b.rest);
    if constexpr (kKind == skew_kl) return hn::MulSub(rest, apart, of_q);
    const Vector of_p = hn::Mul(p, log_m_over_p(d, b, above, s, e));
    return hn::Neg(hn::MulAdd(hn::Set(d, b.beta), of_q, hn::Mul(rest, of_p)));
  }
}

// If both logits are -inf, their difference is undefined and set to 0.
HWY_INLINE void heads_of(Float d, const DivergenceRow& row, Vector z, Vector t, Vector& p,
                         Vector& q, Vector& distance) {
  p = exp_nonpositive(d, log_p_of(d, row, z)), q = exp_nonpositive(d, log_q_of(d, row, t));
  const Mask nothing = hn::Eq(hn::Add(p, q), hn::Zero(d));
  distance = hn::IfThenZeroElse(nothing, distance_of(d, row, z, t));
}

// Calls of(z_j, t_j, &sum, &other) for vectors of columns; the last may be padded with logits of
// -inf.
template <bool kSecond, class Of>
HWY_INLINE void sum_heads(const float* HWY_RESTRICT z, const float* HWY_RESTRICT t, int64_t count,
                          float* first, float* second, const Of& of) {
  const Float d;
  const auto add = [&](int64_t i, Vector& a, Vector& b)
                       HWY_ATTR { of(hn::LoadU(d, z + i), hn::LoadU(d, t + i), a, b); };
  const auto add_rest = [&](int64_t i, Vector& a, Vector& b) HWY_ATTR {
    const Vector none = hn::Set(d, kMinusInfinity);
    of(hn::LoadNOr(none, d, z + i, count - i), hn::LoadNOr(none, d, t + i, count - i), a, b);
  };
  sum_columns<kSecond>(count, first, second, add, add_rest);
}

template <DivergenceKind kKind, bool kMean>
void sum_values(Beta b, const DivergenceRow row, const float* z, const float* t, int64_t count,
                DivergenceSums* sums) {
  const Float d;
  sum_heads<kMean>(z, t, count, &sums->value, &sums->mean,
                   [&](Vector z_at, Vector t_at, Vector& value, Vector& mean) HWY_ATTR {
                     Vector p, q, distance;
                     heads_of(d, row, z_at, t_at, p, q, distance);
                     const Vector zero = hn::Zero(d);
                     const Vector x = value_of_column<kKind>(d, b, p, q, distance);
                     value = hn::Add(value, hn::IfThenZeroElse(hn::Lt(x, zero), x));
                     if constexpr (kMean) {
                       const Mask above = hn::Gt(distance, zero);
                       const Vector f = slope_of<kKind>(d, b, above, distance);
                       const Vector pf = hn::Mul(p, f);
                       mean = hn::Add(mean, hn::IfThenZeroElse(hn::Eq(p, zero), pf));
                     }
                   });
}

template <DivergenceKind kKind>
void sum_means(Beta b, const DivergenceRow row, const float* z, const float* t, int64_t count,
               DivergenceSums* sums) {
  const Float d;
  sum_heads<false>(z, t, count, &sums->mean, nullptr,
                   [&](Vector z_at, Vector t_at, Vector& mean, Vector&) HWY_ATTR {
                     const Vector p = exp_nonpositive(d, log_p_of(d, row, z_at)),
                                  zero = hn::Zero(d);
                     const Vector distance = distance_of(d, row, z_at, t_at);
                     const Vector f = slope_of<kKind>(d, b, hn::Gt(distance, zero), distance);
                     mean = hn::Add(mean, hn::IfThenZeroElse(hn::Eq(p, zero), hn::Mul(p, f)));
                   });
}

DivergenceSums divergence_block_on_target(const DivergenceTerms& terms, const DivergenceRow& row,
                                          const float* z, const float* t, int64_t count,
                                          DivergenceWants wants) {
  const Float d;
  const Beta b{terms.beta, terms.rest};
  const DivergenceRow r = row;
  DivergenceSums sums;
  with_kind(terms.kind, [&](auto kind) {
    if (wants.value && wants.mean) sum_values<kind(), true>(b, r, z, t, count, &sums);
    if (wants.value && !wants.mean) sum_values<kind(), false>(b, r, z, t, count, &sums);
    if (!wants.value && wants.mean) sum_means<kind()>(b, r, z, t, count, &sums);
  });
  if (wants.acceptance) {
    sum_heads<false>(z, t, count, &sums.acceptance, nullptr,
                     [&](Vector z_at, Vector t_at, Vector& sum, Vector&) HWY_ATTR {
                       const Vector p = exp_nonpositive(d, log_p_of(d, r, z_at));
                       const Vector q = exp_nonpositive(d, log_q_of(d, r, t_at));
                       sum = hn::Add(sum, hn::Min(p, q));
                     });
  }
  return sums;
}

template <DivergenceKind kKind, bool kSoftcap, bool kLabel>
void gradient_of_columns(const DivergenceTerms& terms, const DivergenceRow& row,
                         const MapFactors& f, DivergenceScale scale, const float* HWY_RESTRICT z,
                         const float* HWY_RESTRICT t, int64_t count, float* HWY_RESTRICT draw) {
  using enum DivergenceKind;
  const Float d;
  const Beta b{terms.beta, terms.rest};
  const DivergenceRow r = row;  // a copy, which no store to `draw` can change
  const Vector mean = hn::Set(d, r.mean);
  constexpr bool mixes = kKind == jsd || kKind == skew_kl;
  const float slope = f.slope * scale.steep;
  const Vector steep = hn::Set(d, mixes ? terms.rest * slope : slope);
  const Vector label = hn::Set(d, terms.label_weight * slope), last = hn::Set(d, scale.last);
  const Vector zero = hn::Zero(d);
  const Cap cap = kSoftcap ? cap_of(f) : Cap{};
  const auto of = [&](Vector z_at, Vector t_at) HWY_ATTR {
    const Vector distance = distance_of(d, r, z_at, t_at), log_p = log_p_of(d, r, z_at);
    const Mask above = hn::Gt(distance, zero);
    Vector dz, p = zero;
    if constexpr (kKind != forward_kl || kLabel) p = exp_nonpositive(d, log_p);
    if constexpr (kKind == forward_kl) {
      Vector s, e;
      exponentials_of_column(d, distance, s, e);
      const Vector greater = exp_nonpositive(d, hn::IfThenElse(above, log_p, log_q_of(d, r, t_at)));
      const Vector size =
          hn::IfThenZeroElse(hn::Eq(greater, zero), hn::Mul(hn::Mul(greater, steep), s));
      dz = hn::Sub(hn::IfThenElse(above, hn::Neg(size), size), mean);
    } else {
      const Vector g = hn::IfThenZeroElse(hn::Eq(p, zero), slope_of<kKind>(d, b, above, distance));
      dz = hn::Mul(hn::Mul(p, steep), hn::Sub(g, mean));
    }
    if constexpr (kLabel) dz = hn::MulAdd(label, p, dz);
    if constexpr (kSoftcap) dz = hn::Mul(dz, cap_slope(d, cap, z_at));
    return hn::Mul(dz, last);
  };
  const int64_t n = hn::Lanes(d);
  int64_t i = 0;
  for (; i + n <= count; i += n)
    hn::StoreU(of(hn::LoadU(d, z + i), hn::LoadU(d, t + i)), d, draw + i);
  if (i < count) {
    const size_t rest = count - i;
    hn::StoreN(of(hn::LoadN(d, z + i, rest), hn::LoadN(d, t + i, rest)), d, draw + i, rest);
  }
}

void divergence_gradient_on_target(const DivergenceTerms& terms, const DivergenceRow& row,
                                   const LogitMap& map, DivergenceScale scale, const float* z,
                                   const float* t, int64_t count, float* draw) {
  const MapFactors f = map_factors(map);
  with_kind(terms.kind, [&](auto kind) {
    const bool label = terms.label_weight != 0;
    const auto loop = map.softcap > 0 ? (label ? gradient_of_columns<kind(), true, true>
                                               : gradient_of_columns<kind(), true, false>)
                                      : (label ? gradient_of_columns<kind(), false, true>
                                               : gradient_of_columns<kind(), false, false>);
    loop(terms, row, f, scale, z, t, count, draw);
  });
}

}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitless::cpu {

HWY_EXPORT(divergence_block_on_target);
HWY_EXPORT(divergence_gradient_on_target);

DivergenceSums divergence_block(const DivergenceTerms& terms, const DivergenceRow& row,
                                const float* z, const float* t, int64_t count,
                                DivergenceWants wants) {
  return HWY_DYNAMIC_DISPATCH(divergence_block_on_target)(terms, row, z, t, count, wants);
}

void divergence_gradient(const DivergenceTerms& terms, const DivergenceRow& row,
                         const LogitMap& map, DivergenceScale scale, const float* z, const float* t,
                         int64_t count, int64_t target, float* draw) {
  HWY_DYNAMIC_DISPATCH(divergence_gradient_on_target)
  (terms, row, map, scale, z, t, count, draw);
  if (terms.label_weight == 0 || target < 0 || target >= count) return;
  // Computes the target's column again without the label, then adds the label's term with p - 1 in
  // a form that does not cancel.
  DivergenceTerms alone = terms;
  alone.label_weight = 0;
  HWY_DYNAMIC_DISPATCH(divergence_gradient_on_target)
  (alone, row, map, scale, z + target, t + target, 1, draw + target);
  const double log_p = (z[target] - row.reference) - row.log_sum;
  const double slope = slope_at(map, z[target]) * scale.steep;
  draw[target] += static_cast<float>(terms.label_weight * std::expm1(log_p) * slope * scale.last);
}

}  // namespace logitless::cpu
#endif  // HWY_ONCE
