// SPDX-License-Identifier: Apache-2.0
// The row kernels: one entry per kernel and target, dispatched at run time, and the scalar code.
#include "src/cpu/row_kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "src/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/row_kernels.cpp"
#include "hwy/foreach_target.h"
// The order of these includes matters: first the list of targets, then the loop over them, then the
// code that is repeated for each.
#include "hwy/highway.h"
#include "src/cpu/row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

template <Map kMap>
float map_with(const MapFactors& f, float* z, const float* bias, int64_t count) {
  return bias != nullptr ? map_and_maximum<kMap, true>(f, z, bias, count)
                         : map_and_maximum<kMap, false>(f, z, bias, count);
}

// Applies a softcap whose scale is so small that no finite logit has a tanh of 1, so that no finite
// logit can replace an infinite one. With logits times 2^-8 and the scale times 2^8 one can. The
// map is the same, since logits that become subnormal had a tanh below 2^-240.
float cap_faint(LogitMap map, float* logits, const float* bias, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    logits[j] = (bias != nullptr ? logits[j] + bias[j] : logits[j]) * 0x1p-8f;
  }
  map.scale *= 0x1p8f;
  return map_with<Map::softcap>(map_factors(map), logits, nullptr, count);
}

float map_block_on_target(const LogitMap& map, float* logits, const float* bias, int64_t count) {
  const MapFactors f = map_factors(map);
  switch (kind_of_map(map)) {
    case Map::identity:
      return map_with<Map::identity>(f, logits, bias, count);
    case Map::scale:
      return map_with<Map::scale>(f, logits, bias, count);
    case Map::softcap:
      if (f.limit == std::numeric_limits<float>::max()) return cap_faint(map, logits, bias, count);
      return map_with<Map::softcap>(f, logits, bias, count);
  }
  return 0;
}

template <bool kEntropy>
void sum_with(const float* z, int64_t count, float shift, BlockState* state, float* exponentials) {
  if (exponentials != nullptr) {
    sum_exponentials<kEntropy, true>(z, count, shift, state, exponentials);
  } else {
    sum_exponentials<kEntropy, false>(z, count, shift, state, nullptr);
  }
}

// Leaves out the target's own column: another product computed the logit that it is compared with,
// so rounding may put it above itself. Not inlined, because g++ 12 crashes on that for SVE.
HWY_NOINLINE float mass_of_others(const float* z, int64_t count, const BlockWants& wants,
                                  float shift) {
  const bool here = wants.target >= 0 && wants.target < count;
  if (!here) return mass_above(z, count, shift, wants.target_logit);
  const int64_t next = wants.target + 1;
  return mass_above(z, wants.target, shift, wants.target_logit) +
         mass_above(z + next, count - next, shift, wants.target_logit);
}

RareBlock rare_sums(const float* z, int64_t count, const BlockWants& wants, float shift) {
  RareBlock rare{};
  if (wants.sums.has(SumKind::logits)) rare.logits = weighted_sum<false>(z, nullptr, count);
  if (wants.sums.has(SumKind::above)) {
    rare.above = count_above(z, count, wants.target_logit);
    const bool here = wants.target >= 0 && wants.target < count;
    if (here && z[wants.target] > wants.target_logit) --rare.above;
  }
  if (wants.sums.has(SumKind::mass)) rare.mass = mass_of_others(z, count, wants, shift);
  if (wants.sums.has(SumKind::squares)) rare.squares = sum_of_squares(z, count, shift);
  return rare;
}

void forward_block_on_target(const LogitMap& map, float* logits, const float* bias,
                             const float* class_weight, int64_t count, const BlockWants& wants,
                             BlockState* state, float* exponentials, RareBlock* rare) {
  *state = {};
  state->maximum = map_block_on_target(map, logits, bias, count);
  if (wants.sums.has(SumKind::argmax))
    state->argmax = first_index_of(logits, count, state->maximum);
  if (wants.sums.has(SumKind::weighted)) {
    state->weighted = class_weight != nullptr ? weighted_sum<true>(logits, class_weight, count)
                                              : weighted_sum<false>(logits, class_weight, count);
  }
  const bool infinite = state->maximum == -kMinusInfinity;
  for (int64_t j = 0; infinite && j < count; ++j) {
    if (std::isnan(logits[j])) state->maximum = logits[j];
  }
  // The shift is always finite, so that a block of -inf sums to 0, and a NaN that the maximum
  // missed stays NaN. Further sums come first: the exponentials may overwrite the logits.
  const float shift = state->maximum == kMinusInfinity ? 0 : state->maximum;
  if (rare != nullptr) *rare = rare_sums(logits, count, wants, shift);
  if (wants.sums.has(SumKind::shifted)) {
    sum_with<true>(logits, count, shift, state, exponentials);
  } else {
    sum_with<false>(logits, count, shift, state, exponentials);
  }
  if (std::isnan(state->sum) && !infinite) state->maximum = state->sum;
}

// Calls f(constant): 0 without smoothing, 1 if all classes have weight 1, 2 with class weights.
template <class F>
void with_smoothing(float smoothing, const float* class_weight, const F& f) {
  if (smoothing == 0) return f(std::integral_constant<int, 0>{});
  if (class_weight == nullptr) return f(std::integral_constant<int, 1>{});
  f(std::integral_constant<int, 2>{});
}

template <bool kSoftcap, bool kEntropy>
void gradient_with(const MapFactors& f, const RowGradient& g, const float* z, const float* weight,
                   int64_t count, float* draw) {
  with_smoothing(g.smoothing, weight, [&](auto smoothing) {
    gradient_loop<kSoftcap, smoothing(), kEntropy>(f, g, z, weight, count, draw);
  });
}

void gradient_block_on_target(const LogitMap& map, const RowGradient& g, const float* z,
                              const float* class_weight, int64_t count, float* draw) {
  const bool entropy = g.entropy != 0;
  const auto kernel = map.softcap > 0
                          ? (entropy ? gradient_with<true, true> : gradient_with<true, false>)
                          : (entropy ? gradient_with<false, true> : gradient_with<false, false>);
  kernel(map_factors(map), g, z, class_weight, count, draw);
}

void scale_block_on_target(const LogitMap& map, const RowGradient& g, const float* exponentials,
                           float maximum, const float* class_weight, int64_t count, float* draw) {
  const double slope = static_cast<double>(map.scale) / map.temperature;
  const double shift = static_cast<double>(maximum) - g.reference - g.log_sum;
  const float probability = static_cast<float>(g.probability * slope * std::exp(shift));
  const float smoothing = static_cast<float>(g.smoothing * slope);
  with_smoothing(smoothing, class_weight, [&](auto kind) {
    scale_loop<kind()>(probability, smoothing, exponentials, class_weight, count, draw);
  });
}

void exponentials_gradient_on_target(const LogitMap& map, const RowGradient& g,
                                     const float* exponentials, float reference,
                                     const float* class_weight, int64_t count, float* draw) {
  const MapFactors f = map_factors(map);
  const double shift = static_cast<double>(reference) - g.reference - g.log_sum;
  with_smoothing(g.smoothing, class_weight, [&](auto smoothing) {
    const auto loop = g.entropy != 0 ? exponentials_loop<smoothing(), true>
                                     : exponentials_loop<smoothing(), false>;
    loop(f, g, shift, exponentials, class_weight, count, draw);
  });
}

int64_t find_at_least_on_target(const float* z, int64_t from, int64_t count, float least) {
  const hn::ScalableTag<float> d;
  const int64_t n = hn::Lanes(d);
  const auto lowest = hn::Set(d, least);
  for (; from + n <= count; from += n) {
    const intptr_t place = hn::FindFirstTrue(d, hn::Ge(hn::LoadU(d, z + from), lowest));
    if (place >= 0) return from + place;
  }
  while (from < count && !(z[from] >= least)) ++from;
  return from;
}

// destination_j = of(source_j), in vectors with the element count of an f32 vector.
template <class From, class To, class F>
HWY_INLINE void convert(const From* HWY_RESTRICT source, int64_t count,
                        To* HWY_RESTRICT destination, const F& of) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<From, decltype(d)> from;
  const hn::Rebind<To, decltype(d)> to;
  const int64_t n = hn::Lanes(d);
  int64_t i = 0;
  for (; i + n <= count; i += n) hn::StoreU(of(hn::LoadU(from, source + i)), to, destination + i);
  if (i < count) {
    const size_t rest = count - i;
    hn::StoreN(of(hn::LoadN(from, source + i, rest)), to, destination + i, rest);
  }
}

// bf16 is the upper half of an f32.
void load_bf16(const uint16_t* source, int64_t count, float* destination) {
  convert(source, count, destination, [](auto bits) HWY_ATTR {
    const hn::ScalableTag<float> d;
    const hn::RebindToUnsigned<decltype(d)> du;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
  });
}

#if HWY_ARCH_X86 && (HWY_TARGET == HWY_AVX3_ZEN4 || HWY_TARGET == HWY_AVX3_SPR)
// A single instruction, but one that flushes subnormals.
template <class DU, class V = hn::Vec<DU>>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, DU>> round_to_bf16(DU /*du*/, V bits) {
  const hn::RebindToFloat<DU> d;
  const hn::Rebind<hwy::bfloat16_t, DU> half;
  const hn::Rebind<uint16_t, DU> to;
  return hn::BitCast(to, hn::DemoteTo(half, hn::BitCast(d, bits)));
}
#else
// To nearest, ties to even, by the carry of 0x7fff plus the lowest kept bit. A NaN is made quiet,
// because it might round to inf.
template <class DU, class V = hn::Vec<DU>>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, DU>> round_to_bf16(DU du, V bits) {
  const hn::RebindToFloat<DU> d;
  const V lowest = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const V rounded = hn::Add(bits, hn::Add(lowest, hn::Set(du, 0x7fffu)));
  const auto nan = hn::RebindMask(du, hn::IsNaN(hn::BitCast(d, bits)));
  const hn::Rebind<uint16_t, DU> to;
  const V kept = hn::IfThenElse(nan, hn::Or(bits, hn::Set(du, 0x400000u)), rounded);
  return hn::TruncateTo(to, hn::ShiftRight<16>(kept));
}
#endif

void store_bf16(const float* source, int64_t count, uint16_t* destination) {
  convert(source, count, destination, [](auto v) HWY_ATTR {
    const hn::RebindToUnsigned<hn::ScalableTag<float>> du;
    return round_to_bf16(du, hn::BitCast(du, v));
  });
}

void store_exponentials_on_target(const float* z, float reference, int64_t count,
                                  uint16_t* exponentials) {
  convert(z, count, exponentials, [&](auto z_at) HWY_ATTR {
    const hn::ScalableTag<float> d;
    const hn::RebindToUnsigned<decltype(d)> du;
    const auto e = exp_any(d, hn::Sub(z_at, hn::Set(d, reference)));
    return round_to_bf16(du, hn::BitCast(du, e));
  });
}

// Conversions between f16 and f32. x86 below AVX2 has no instruction for them, and Highway's
// substitute treats inf as a finite number.
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64
template <class DH, class D, class VH = hn::Vec<DH>>
HWY_INLINE hn::Vec<D> f32_of_f16(DH, D d, VH bits) {
  const hn::Rebind<hwy::float16_t, D> half;
  return hn::PromoteTo(d, hn::BitCast(half, bits));
}
template <class DH, class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<DH> f16_of_f32(DH dh, D, V v) {
  const hn::Rebind<hwy::float16_t, D> half;
  return hn::BitCast(dh, hn::DemoteTo(half, v));
}
#else
template <class DH, class D, class VH = hn::Vec<DH>>
HWY_INLINE hn::Vec<D> f32_of_f16(DH, D d, VH bits) {
  const hn::RebindToUnsigned<D> du;
  const auto wide = hn::PromoteTo(du, bits);
  const auto size = hn::ShiftLeft<13>(hn::And(wide, hn::Set(du, 0x7fffu)));
  // A product changes the exponent's bias and normalizes subnormals.
  const auto scaled = hn::BitCast(du, hn::Mul(hn::BitCast(d, size), hn::Set(d, 0x1p112f)));
  const auto special = hn::Ge(size, hn::Set(du, 0x7c00u << 13));
  const auto sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(du, 0x8000u)));
  const auto value = hn::IfThenElse(special, hn::Or(size, hn::Set(du, 0x7f800000u)), scaled);
  return hn::BitCast(d, hn::Or(value, sign));
}
template <class DH, class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<DH> f16_of_f32(DH dh, D d, V v) {
  const hn::RebindToUnsigned<D> du;
  const auto all = hn::BitCast(du, v);
  const auto size = hn::And(all, hn::Set(du, 0x7fffffffu));
  const auto lowest = hn::And(hn::ShiftRight<13>(size), hn::Set(du, 1u));
  const auto rounded = hn::Add(size, hn::Add(lowest, hn::Set(du, 0xfffu)));
  const auto normal = hn::ShiftRight<13>(hn::Sub(rounded, hn::Set(du, 112u << 23)));
  // Near 1/2 the last bit of an f32 has the weight of an f16 subnormal's last bit.
  const auto shifted = hn::Add(hn::BitCast(d, size), hn::Set(d, 0.5f));
  const auto subnormal = hn::Sub(hn::BitCast(du, shifted), hn::Set(du, 0x3f000000u));
  auto value = hn::IfThenElse(hn::Lt(size, hn::Set(du, 113u << 23)), subnormal, normal);
  value = hn::IfThenElse(hn::Ge(size, hn::Set(du, 0x477ff000u)), hn::Set(du, 0x7c00u), value);
  value = hn::IfThenElse(hn::Gt(size, hn::Set(du, 0x7f800000u)), hn::Set(du, 0x7e00u), value);
  const auto sign = hn::ShiftRight<16>(hn::Sub(all, size));
  return hn::TruncateTo(dh, hn::Or(value, sign));
}
#endif

void load_f16(const uint16_t* source, int64_t count, float* destination) {
  convert(source, count, destination, [](auto bits) HWY_ATTR {
    const hn::ScalableTag<float> d;
    return f32_of_f16(hn::Rebind<uint16_t, decltype(d)>(), d, bits);
  });
}

void store_f16(const float* source, int64_t count, uint16_t* destination) {
  convert(source, count, destination, [](auto v) HWY_ATTR {
    const hn::ScalableTag<float> d;
    return f16_of_f32(hn::Rebind<uint16_t, decltype(d)>(), d, v);
  });
}

}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitless::cpu {

HWY_EXPORT(map_block_on_target);
HWY_EXPORT(forward_block_on_target);
HWY_EXPORT(gradient_block_on_target);
HWY_EXPORT(scale_block_on_target);
HWY_EXPORT(store_exponentials_on_target);
HWY_EXPORT(exponentials_gradient_on_target);
HWY_EXPORT(find_at_least_on_target);
HWY_EXPORT(load_bf16);
HWY_EXPORT(store_bf16);
HWY_EXPORT(load_f16);
HWY_EXPORT(store_f16);

void map_block(const LogitMap& map, float* logits, const float* bias, int64_t count) {
  if (map.identity() && bias == nullptr) return;
  HWY_DYNAMIC_DISPATCH(map_block_on_target)(map, logits, bias, count);
}

void forward_block(const LogitMap& map, float* logits, const float* bias, const float* class_weight,
                   int64_t count, const BlockWants& wants, BlockState* state, float* exponentials,
                   RareBlock* rare) {
  HWY_DYNAMIC_DISPATCH(forward_block_on_target)
  (map, logits, bias, class_weight, count, wants, state, exponentials, rare);
}

void scale_block(const LogitMap& map, const RowGradient& g, const float* exponentials,
                 float maximum, const float* class_weight, int64_t count, float* draw) {
  HWY_DYNAMIC_DISPATCH(scale_block_on_target)
  (map, g, exponentials, maximum, class_weight, count, draw);
}

void store_exponentials(const float* z, float reference, int64_t count, uint16_t* exponentials) {
  HWY_DYNAMIC_DISPATCH(store_exponentials_on_target)(z, reference, count, exponentials);
}

void exponentials_gradient(const LogitMap& map, const RowGradient& g, const float* exponentials,
                           float reference, const float* class_weight, int64_t count, float* draw) {
  HWY_DYNAMIC_DISPATCH(exponentials_gradient_on_target)
  (map, g, exponentials, reference, class_weight, count, draw);
}

void gradient_block(const LogitMap& map, const RowGradient& g, const float* z,
                    const float* class_weight, int64_t count, float* draw) {
  HWY_DYNAMIC_DISPATCH(gradient_block_on_target)(map, g, z, class_weight, count, draw);
}

int64_t find_at_least(const float* z, int64_t from, int64_t count, float least) {
  return HWY_DYNAMIC_DISPATCH(find_at_least_on_target)(z, from, count, least);
}

double slope_at(const LogitMap& map, float z) {
  double slope = static_cast<double>(map.scale) / map.temperature;
  if (map.softcap > 0) {
    const double t = static_cast<double>(z) * map.temperature / map.softcap;
    slope *= (1 - t) * (1 + t);
  }
  return slope;
}

float target_gradient(const LogitMap& map, const RowGradient& g, float z, float class_weight) {
  const double log_p = (z - g.reference) - g.log_sum;
  const double dz =
      dz_of_target(g, std::exp(log_p), std::expm1(log_p), log_p + g.entropy_value, class_weight);
  return static_cast<float>(dz * slope_at(map, z));
}

void load_as_f32(const void* source, DType dtype, int64_t count, float* destination) {
  if (dtype == DType::bf16) {
    HWY_DYNAMIC_DISPATCH(load_bf16)(static_cast<const uint16_t*>(source), count, destination);
  } else if (dtype == DType::f16) {
    HWY_DYNAMIC_DISPATCH(load_f16)
    (static_cast<const uint16_t*>(source), count, destination);
  } else if (source != destination && count > 0) {
    std::memcpy(destination, source, count * sizeof(float));
  }
}

void store_from_f32(const float* source, int64_t count, DType dtype, void* destination) {
  if (dtype == DType::bf16) {
    HWY_DYNAMIC_DISPATCH(store_bf16)(source, count, static_cast<uint16_t*>(destination));
  } else if (dtype == DType::f16) {
    HWY_DYNAMIC_DISPATCH(store_f16)(source, count, static_cast<uint16_t*>(destination));
  } else if (source != destination && count > 0) {
    std::memcpy(destination, source, count * sizeof(float));
  }
}

RowAccumulator RowAccumulator::begin() {
  RowAccumulator row{};
  row.maximum = -std::numeric_limits<float>::infinity();
  row.argmax = -1;
  return row;
}

void RowAccumulator::add(const BlockState& block, int64_t first_column, SumSet wants,
                         const RareBlock* rare) {
  const float least = -std::numeric_limits<float>::infinity();
  Meeting meeting{.exponentials = block.maximum != least && !std::isnan(maximum),
                  .second_leads = block.maximum > maximum,
                  .first_column = first_column};
  if (meeting.exponentials) {
    double old_shift = 0, new_shift = 0;
    if (block.maximum <= maximum) {
      new_shift = static_cast<double>(block.maximum) - maximum;
    } else {
      old_shift = maximum == least ? 0 : static_cast<double>(maximum) - block.maximum;
      maximum = block.maximum;
    }
    const double old_factor = old_shift == 0 ? 1 : std::exp(old_shift);
    const double new_factor = new_shift == 0 ? 1 : std::exp(new_shift);
    meeting.first = {old_shift, old_factor, sum};
    meeting.second = {new_shift, new_factor, block.sum};
    sum = old_factor * sum + new_factor * block.sum;
  }
  UsualSums<Wide>::merge(block, wants, meeting);
  if (rare != nullptr) RareSums<Wide>::merge(*rare, wants, meeting);
}

RowState RowAccumulator::finish(SumSet wants) const {
  RowState state{
      .reference = maximum, .weighted_logit_sum = static_cast<float>(weighted), .argmax = argmax};
  const bool nothing = maximum == -std::numeric_limits<float>::infinity();
  const double log_sum = nothing ? std::numeric_limits<double>::quiet_NaN() : std::log(sum);
  state.log_sum = static_cast<float>(log_sum);
  if (wants.has(SumKind::shifted)) state.entropy = static_cast<float>(log_sum - shifted / sum);
  return state;
}

RareStatistics RowAccumulator::finish_rare(int64_t whole) const {
  return {.sum_p_squared = static_cast<float>(squares / (sum * sum)),
          .mean_logit = static_cast<float>(logits / static_cast<double>(whole)),
          .rank = above,
          .mass_above = static_cast<float>(mass / sum)};
}

}  // namespace logitless::cpu
#endif  // HWY_ONCE
