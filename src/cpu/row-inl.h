// SPDX-License-Identifier: Apache-2.0
// The loops of row_kernels.h over one block of a row, compiled once per target. A block is read
// several times while it is in L1: for the map and the maximum, for the further sums that are
// wanted, then for exp and its sum.

#if defined(LOGITLESS_CPU_ROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_CPU_ROW_INL_H_
#undef LOGITLESS_CPU_ROW_INL_H_
#else
#define LOGITLESS_CPU_ROW_INL_H_
#endif

#include <cmath>
#include <limits>

#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "src/cpu/exp-inl.h"
#include "src/cpu/row_kernels.h"
#include "src/row/map.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

enum class Map { identity, scale, softcap };

inline Map kind_of_map(const LogitMap& map) {
  if (map.softcap > 0) return Map::softcap;
  return map.identity() ? Map::identity : Map::scale;
}

// Returns outward tanh(inward size / 2); both factors come with a low part.
template <class D, class V = hn::Vec<D>, class T = hn::TFromD<D>>
HWY_INLINE V cap_vector(D d, V size, T inward, T inward_low, T outward, T outward_low) {
  const V y = hn::MulAdd(size, hn::Set(d, inward), hn::Mul(size, hn::Set(d, inward_low)));
  const V t = tanh_of_half(d, y);
  return hn::MulAdd(t, hn::Set(d, outward), hn::Mul(t, hn::Set(d, outward_low)));
}

// The same for f32. Without fused multiply-add a product's rounding error is unknown, and double is
// used.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V cap_vector_f32(D d, const MapFactors& f, V size) {
#if HWY_NATIVE_FMA
  return cap_vector(d, size, f.inward, f.inward_low, f.outward, f.outward_low);
#else
  const hn::Repartition<double, D> dd;
  const hn::Half<D> half;
  const double inward = static_cast<double>(f.inward) + f.inward_low;
  const double outward = static_cast<double>(f.outward) + f.outward_low;
  const auto lower = cap_vector(dd, hn::PromoteLowerTo(dd, size), inward, 0.0, outward, 0.0);
  const auto upper = cap_vector(dd, hn::PromoteUpperTo(dd, size), inward, 0.0, outward, 0.0);
  return hn::Combine(d, hn::DemoteTo(half, upper), hn::DemoteTo(half, lower));
#endif
}

template <Map kMap, class D, class V = hn::Vec<D>>
HWY_INLINE V map_vector(D d, const MapFactors& f, V raw) {
  if constexpr (kMap == Map::identity) return raw;
  if constexpr (kMap == Map::scale) return hn::Mul(raw, hn::Set(d, f.slope));
  if constexpr (kMap == Map::softcap) {
    const V limit = hn::Set(d, f.limit);
    V size = hn::Abs(raw);
    size = hn::IfThenElse(hn::Gt(size, limit), limit, size);  // Min would drop NaN
    // z has the sign of raw times that of outward.
    return hn::Xor(cap_vector_f32(d, f, size), hn::And(raw, hn::SignBit(d)));
  }
}

// Maps the block in place and returns its maximum, which may miss a NaN.
template <Map kMap, bool kBias>
float map_and_maximum(const MapFactors& f, float* HWY_RESTRICT z, const float* HWY_RESTRICT bias,
                      int64_t count) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t n = hn::Lanes(d);
  const auto map_at = [&](int64_t i) HWY_ATTR {
    V v = hn::LoadU(d, z + i);
    if constexpr (kBias) v = hn::Add(v, hn::LoadU(d, bias + i));
    v = map_vector<kMap>(d, f, v);
    if constexpr (kBias || kMap != Map::identity) hn::StoreU(v, d, z + i);
    return v;
  };
  const V least = hn::Set(d, kMinusInfinity);
  V m0 = least, m1 = least, m2 = least, m3 = least;
  int64_t i = 0;
  for (; i + 4 * n <= count; i += 4 * n) {
    m0 = hn::Max(m0, map_at(i));
    m1 = hn::Max(m1, map_at(i + n));
    m2 = hn::Max(m2, map_at(i + 2 * n));
    m3 = hn::Max(m3, map_at(i + 3 * n));
  }
  for (; i + n <= count; i += n) m0 = hn::Max(m0, map_at(i));
  if (i < count) {
    const size_t rest = count - i;
    V v = hn::LoadN(d, z + i, rest);
    if constexpr (kBias) v = hn::Add(v, hn::LoadN(d, bias + i, rest));
    v = map_vector<kMap>(d, f, v);
    if constexpr (kBias || kMap != Map::identity) hn::StoreN(v, d, z + i, rest);
    m1 = hn::Max(m1, hn::IfThenElse(hn::FirstN(d, rest), v, least));
  }
  return hn::ReduceMax(d, hn::Max(hn::Max(m0, m1), hn::Max(m2, m3)));
}

// Returns the sums of add(i, &s, &t) for each vector of columns from i on, and of add_rest for the
// last columns. Chains of additions are short: 8 per partial sum, then the partial sums.
template <bool kSecond, class Add, class AddRest>
HWY_INLINE void sum_columns(int64_t count, float* first, float* second, const Add& add,
                            const AddRest& add_rest) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t n = hn::Lanes(d);
  const V zero = hn::Zero(d);
  V sum = zero, other = zero;
  int64_t i = 0;
  while (i + 4 * n <= count) {
    V s0 = zero, s1 = zero, s2 = zero, s3 = zero, t0 = zero, t1 = zero, t2 = zero, t3 = zero;
    for (int step = 0; step < 8 && i + 4 * n <= count; ++step, i += 4 * n) {
      add(i, s0, t0);
      add(i + n, s1, t1);
      add(i + 2 * n, s2, t2);
      add(i + 3 * n, s3, t3);
    }
    sum = hn::Add(sum, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
    if constexpr (kSecond) other = hn::Add(other, hn::Add(hn::Add(t0, t1), hn::Add(t2, t3)));
  }
  V s0 = zero, t0 = zero;
  for (; i + n <= count; i += n) add(i, s0, t0);
  if (i < count) add_rest(i, s0, t0);
  *first = hn::ReduceSum(d, hn::Add(sum, s0));
  if constexpr (kSecond) *second = hn::ReduceSum(d, hn::Add(other, t0));
}

// Sums exp(z_j - m) and, for the entropy, exp(z_j - m) (z_j - m). kStore also writes the
// exponentials to `e`, which may be z.
template <bool kEntropy, bool kStore>
void sum_exponentials(const float* z, int64_t count, float maximum, BlockState* state, float* e) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V m = hn::Set(d, maximum), least = hn::Set(d, kLeastExponent);
  const auto add = [&](V z_at, V& s, V& t) HWY_ATTR {
    const V x = hn::Sub(z_at, m);
    const V y = exp_nonpositive(d, x);
    s = hn::Add(s, y);
    // 0 log 0 is 0, so x must be finite where exp is 0.
    if constexpr (kEntropy) t = hn::MulAdd(y, hn::Max(x, least), t);
    return y;
  };
  const auto add_at = [&](int64_t i, V& s, V& t) HWY_ATTR {
    // Prefetches the row's next block while the memory units are idle.
    if constexpr (kStore) hwy::Prefetch(z + i + count);
    const V y = add(hn::LoadU(d, z + i), s, t);
    if constexpr (kStore) hn::StoreU(y, d, e + i);
  };
  const auto add_rest = [&](int64_t i, V& s, V& t) HWY_ATTR {
    const size_t rest = count - i;
    const V y = add(hn::LoadNOr(hn::Set(d, kMinusInfinity), d, z + i, rest), s, t);
    if constexpr (kStore) hn::StoreN(y, d, e + i, rest);
  };
  sum_columns<kEntropy>(count, &state->sum, &state->shifted, add_at, add_rest);
}

template <bool kWeights>
float weighted_sum(const float* HWY_RESTRICT z, const float* HWY_RESTRICT weight, int64_t count) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V zero = hn::Zero(d);
  const auto add = [&](V z_at, V c, V& s) HWY_ATTR {
    if constexpr (kWeights) {
      s = hn::Add(s, hn::IfThenZeroElse(hn::Eq(c, zero), hn::Mul(c, z_at)));
    } else {
      s = hn::Add(s, z_at);
    }
  };
  const auto add_at = [&](int64_t i, V& s, V&) HWY_ATTR {
    V c = zero;
    if constexpr (kWeights) c = hn::LoadU(d, weight + i);
    add(hn::LoadU(d, z + i), c, s);
  };
  const auto add_rest = [&](int64_t i, V& s, V&) HWY_ATTR {
    const size_t rest = count - i;
    V c = zero;
    if constexpr (kWeights) c = hn::LoadN(d, weight + i, rest);
    add(hn::LoadN(d, z + i, rest), c, s);
  };
  float sum;
  sum_columns<false>(count, &sum, nullptr, add_at, add_rest);
  return sum;
}

inline float sum_of_squares(const float* HWY_RESTRICT z, int64_t count, float maximum) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V m = hn::Set(d, maximum);
  const auto add = [&](V z_at, V& s) HWY_ATTR {
    const V y = exp_nonpositive(d, hn::Sub(z_at, m));
    s = hn::MulAdd(y, y, s);
  };
  const auto add_at = [&](int64_t i, V& s, V&) HWY_ATTR { add(hn::LoadU(d, z + i), s); };
  const auto add_rest = [&](int64_t i, V& s, V&) HWY_ATTR {
    add(hn::LoadNOr(hn::Set(d, kMinusInfinity), d, z + i, count - i), s);
  };
  float sum;
  sum_columns<false>(count, &sum, nullptr, add_at, add_rest);
  return sum;
}

inline float mass_above(const float* HWY_RESTRICT z, int64_t count, float maximum, float least) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V m = hn::Set(d, maximum), bound = hn::Set(d, least);
  const auto add = [&](V z_at, V& s) HWY_ATTR {
    const V y = exp_nonpositive(d, hn::Sub(z_at, m));
    s = hn::Add(s, hn::IfThenElseZero(hn::Gt(z_at, bound), y));
  };
  const auto add_at = [&](int64_t i, V& s, V&) HWY_ATTR { add(hn::LoadU(d, z + i), s); };
  const auto add_rest = [&](int64_t i, V& s, V&) HWY_ATTR {
    add(hn::LoadNOr(hn::Set(d, kMinusInfinity), d, z + i, count - i), s);
  };
  float sum;
  sum_columns<false>(count, &sum, nullptr, add_at, add_rest);
  return sum;
}

inline int32_t count_above(const float* HWY_RESTRICT z, int64_t count, float least) {
  const hn::ScalableTag<float> d;
  const int64_t n = hn::Lanes(d);
  const auto bound = hn::Set(d, least);
  int64_t above = 0, i = 0;
  for (; i + n <= count; i += n) above += hn::CountTrue(d, hn::Gt(hn::LoadU(d, z + i), bound));
  for (; i < count; ++i) above += z[i] > least ? 1 : 0;
  return static_cast<int32_t>(above);
}

// Returns the lowest index whose logit is `maximum`, or 0 if there is none, as in a block with NaN.
inline int32_t first_index_of(const float* HWY_RESTRICT z, int64_t count, float maximum) {
  const hn::ScalableTag<float> d;
  const int64_t n = hn::Lanes(d);
  const auto m = hn::Set(d, maximum);
  int64_t i = 0;
  for (; i + n <= count; i += n) {
    const intptr_t found = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, z + i), m));
    if (found >= 0) return static_cast<int32_t>(i + found);
  }
  for (; i < count; ++i) {
    if (z[i] == maximum) return static_cast<int32_t>(i);
  }
  return 0;
}

// x - y z, in a single rounding if the target has fused multiply-add.
struct MinusVectors {
  template <class V>
  HWY_INLINE V operator()(V x, V y, V z) const {
    return hn::NegMulAdd(y, z, x);
  }
};
#include "src/row/dz-inl.h"

// draw_j = of(x_j, c_j), with c_j = 1 without weights.
template <bool kWeights, class F>
HWY_INLINE void for_columns(const float* x, const float* weight, int64_t count, float* draw,
                            const F& of) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t n = hn::Lanes(d);
  const V one = hn::Set(d, 1.0f);
  const auto weight_at = [&](int64_t i) HWY_ATTR {
    if constexpr (kWeights) return hn::LoadU(d, weight + i);
    return one;
  };
  int64_t i = 0;
  for (; i + 2 * n <= count; i += 2 * n) {
    const V a = of(hn::LoadU(d, x + i), weight_at(i));
    const V b = of(hn::LoadU(d, x + i + n), weight_at(i + n));
    hn::StoreU(a, d, draw + i);
    hn::StoreU(b, d, draw + i + n);
  }
  for (; i + n <= count; i += n) hn::StoreU(of(hn::LoadU(d, x + i), weight_at(i)), d, draw + i);
  if (i < count) {
    const size_t rest = count - i;
    V last = one;
    if constexpr (kWeights) last = hn::LoadN(d, weight + i, rest);
    hn::StoreN(of(hn::LoadN(d, x + i, rest), last), d, draw + i, rest);
  }
}

// The cap of z in two parts, and its inverse.
struct Cap {
  float size = 0, low = 0, inverse = 0;
};
inline Cap cap_of(const MapFactors& f) {
  const float low = std::copysign(1.0f, f.outward) * f.outward_low;
  const double whole = std::fabs(double{f.outward}) + low;
  return {std::fabs(f.outward), low, static_cast<float>(1 / whole)};
}
// Returns 1 - t^2 for t = z / cap, from 1 - |t|, the distance of z from the cap. It is exact where
// t is near 1, while t itself has been rounded three times.
template <class D, class V>
HWY_INLINE V cap_slope(D d, const Cap& cap, V z) {
  const V distance = hn::Sub(hn::Set(d, cap.size), hn::Abs(z));
  const V rest = hn::Mul(hn::Add(distance, hn::Set(d, cap.low)), hn::Set(d, cap.inverse));
  return hn::NegMulAdd(rest, rest, hn::Add(rest, rest));
}

// kSmoothing: 0 without smoothing, 1 if all classes have weight 1, 2 with class weights.
template <bool kSoftcap, int kSmoothing, bool kEntropy>
void gradient_loop(const MapFactors& f, const RowGradient& g, const float* z, const float* weight,
                   int64_t count, float* draw) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V reference = hn::Set(d, g.reference), log_sum = hn::Set(d, g.log_sum);
  const V probability = hn::Set(d, g.probability * f.slope);
  const V smoothing = hn::Set(d, g.smoothing * f.slope), entropy = hn::Set(d, g.entropy * f.slope);
  const V entropy_value = hn::Set(d, g.entropy_value), least = hn::Set(d, kLeastExponent);
  const Cap cap = kSoftcap ? cap_of(f) : Cap{};  // dividing for every vector would be slow
  const auto gradient = [&](V z_at, V c) HWY_ATTR {
    const V log_p = hn::Sub(hn::Sub(z_at, reference), log_sum);
    const V p = exp_any(d, log_p);
    const V information = hn::Add(hn::Max(log_p, least), entropy_value);
    const V dz = dz_of<MinusVectors>(hn::Mul(probability, p), kSmoothing > 0, smoothing, c,
                                     kEntropy, hn::Mul(entropy, p), information);
    if constexpr (!kSoftcap) return dz;
    return hn::Mul(dz, cap_slope(d, cap, z_at));
  };
  for_columns<kSmoothing == 2>(z, weight, count, draw, gradient);
}

// draw_j from p_j = e_j exp(shift). A small factor of p_j is multiplied last: times exp(shift) it
// could be subnormal.
template <int kSmoothing, bool kEntropy>
void exponentials_loop(const MapFactors& f, const RowGradient& g, double shift,
                       const float* exponentials, const float* weight, int64_t count, float* draw) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V factor = hn::Set(d, static_cast<float>(std::exp(shift)));
  const V constant = hn::Set(d, static_cast<float>(shift) + g.entropy_value);
  const V own = hn::Set(d, g.probability * f.slope), s = hn::Set(d, g.smoothing * f.slope);
  const V h = hn::Set(d, g.entropy * f.slope),
          least = hn::Set(d, std::numeric_limits<float>::min());
  const auto gradient = [&](V e, V c) HWY_ATTR {
    const V p = hn::Mul(e, factor);
    V information = constant;
    // 0 log 0 is 0, so the logarithm must be finite.
    if constexpr (kEntropy) information = hn::Add(hn::Log(d, hn::Max(e, least)), constant);
    return dz_of<MinusVectors>(hn::Mul(own, p), kSmoothing > 0, s, c, kEntropy, hn::Mul(h, p),
                               information);
  };
  for_columns<kSmoothing == 2>(exponentials, weight, count, draw, gradient);
}

// draw_j = probability e_j - smoothing c_j.
template <int kSmoothing>
void scale_loop(float probability, float smoothing, const float* e, const float* weight,
                int64_t count, float* draw) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V factor = hn::Set(d, probability), s = hn::Set(d, smoothing), none = hn::Zero(d);
  const auto scale = [&](V e_at, V c) HWY_ATTR {
    return dz_of<MinusVectors>(hn::Mul(e_at, factor), kSmoothing > 0, s, c, false, none, none);
  };
  for_columns<kSmoothing == 2>(e, weight, count, draw, scale);
}

}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
