// SPDX-License-Identifier: Apache-2.0
// exp and tanh on vectors, compiled once per target.
//   exp x = 2^n (1 + r + r^2 q(r)),  n = round(x / ln 2),  r = x - n ln 2 in [-0.35, 0.35]
// q is the minimax polynomial of degree 4 (relative error of exp 3.1e-9); with rounding exp is
// within 1 ULP.
//   tanh |x| = e / (e + 2),  e = exp(2|x|) - 1 = 2^n (r + r^2 q(r)) + (2^n - 1)
// tanh carries the rounding errors of e, of the sum and of the quotient along, and is within 0.7
// ULP.

// Not a plain include guard: the file is included once per target.
#if defined(LOGITLESS_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_CPU_EXP_INL_H_
#undef LOGITLESS_CPU_EXP_INL_H_
#else
#define LOGITLESS_CPU_EXP_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// log(2^-126): below it exp would be subnormal, and is taken as 0.
constexpr float kLeastExponent = -87.3365f;

// Computes r and scale = 2^n for x from -87.3 to 88 (f32). n is taken from the low bits of x / ln 2
// plus a number whose ULP is 1 and which contains the exponent's bias.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void reduce_exponent(D d, V x, V& r, V& scale) {
  using T = hn::TFromD<D>;
  constexpr bool kDouble = sizeof(T) == 8;
  constexpr int kMantissa = kDouble ? 52 : 23;
  const V magic = hn::Set(d, kDouble ? T(0x1.8p52 + 1023) : T(0x1.8p23 + 127));
  const V shifted = hn::MulAdd(x, hn::Set(d, T(1.4426950408889634)), magic);
  const V n = hn::Sub(shifted, magic);
  // n times `high` is exact, as `high` has 15 (32) significant bits.
  const V high = hn::Set(d, kDouble ? T(0x1.62e42fee00000p-1) : T(0x1.62e4p-1));
  const V low = hn::Set(d, kDouble ? T(0x1.a39ef35793c76p-33) : T(0x1.7f7d1cp-20));
  r = hn::NegMulAdd(n, low, hn::NegMulAdd(n, high, x));
  const hn::RebindToUnsigned<D> du;
  scale = hn::BitCast(d, hn::ShiftLeft<kMantissa>(hn::BitCast(du, shifted)));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_tail(D d, V r, V r2) {
  using T = hn::TFromD<D>;
  const V c01 = hn::MulAdd(hn::Set(d, T(0x1.555492p-3)), r, hn::Set(d, T(0x1.fffffcp-2)));
  const V c23 = hn::MulAdd(hn::Set(d, T(0x1.1239e2p-7)), r, hn::Set(d, T(0x1.5558f2p-5)));
  return hn::MulAdd(hn::MulAdd(hn::Set(d, T(0x1.6a2434p-10)), r2, c23), r2, c01);
}

// exp x for x <= 88, -inf included; NaN stays NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_nonpositive(D d, V x) {
  V r, scale;
  reduce_exponent(d, x, r, scale);
  const V r2 = hn::Mul(r, r);
  const V p = hn::Add(hn::MulAdd(r2, exp_tail(d, r, r2), r), hn::Set(d, 1.0f));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, kLeastExponent)), hn::Mul(p, scale));
}

// exp x for any x; inf above 88.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_any(D d, V x) {
  return hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.0f)), hn::Inf(d), exp_nonpositive(d, x));
}

// tanh(y / 2) for y in [0, 40]; NaN stays NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V tanh_of_half(D d, V y) {
  using T = hn::TFromD<D>;
  const V one = hn::Set(d, T(1)), two = hn::Set(d, T(2));
  V r, scale;
  reduce_exponent(d, y, r, scale);
  const V r2 = hn::Mul(r, r);
  const V q = exp_tail(d, r, r2);
  const V s = hn::MulAdd(r2, q, r);                  // exp r - 1
  const V s_low = hn::MulAdd(r2, q, hn::Sub(r, s));  // the rounding error of s
  const V whole = hn::Sub(scale, one);
  const V e = hn::MulAdd(scale, s, whole);
  const V e_low = hn::MulAdd(scale, s_low, hn::MulAdd(scale, s, hn::Sub(whole, e)));
  const V sum = hn::Add(e, two);
  const V sum_low = hn::Add(hn::Sub(hn::Min(e, two), hn::Sub(sum, hn::Max(e, two))), e_low);
  const V inverse = hn::Div(one, sum);
  const V quotient = hn::Mul(e, inverse);
  const V rest = hn::Add(hn::NegMulAdd(quotient, sum, e), hn::NegMulAdd(quotient, sum_low, e_low));
  return hn::MulAdd(rest, inverse, quotient);
}

}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
