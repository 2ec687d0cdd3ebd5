// SPDX-License-Identifier: Apache-2.0
// The gradient of a row (docs/semantics.md) for the CPU and CUDA; the other backends have their
// own code.
//   dz_ij  = probability p_ij - smoothing c_j - onehot [j=t] - entropy p_ij (log p_ij + H)
// This file has the factor common to a call's gradients, the coefficients of dz, and dz itself
// (dz-inl.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "logitless/ops.h"
#include "src/host_device.h"
#include "src/row/coefficients.h"
#include "src/row/state.h"

namespace logitless {

// A common factor of all gradients: dz leaves it out, and it multiplies the f32 sums before they
// are rounded, so that a 16-bit dz neither underflows nor overflows. For sum it is grad_loss, for
// mean grad_loss / normalizer; for none, and if statistics have gradients, it is a power of two
// that bounds max |g_i|. Token and class weights beyond f16's range change it by a power of two.
struct GradientScale {
  float scale = 0, inverse = 0;  // inverse is 0 if scale is 0
  float upstream = 0;            // g_i / scale, if it is the same for all rows
};

// What gradient_scale() needs: the largest finite magnitudes over the tokens that count.
struct GradientSizes {
  int64_t valid = 0;     // the number of tokens that count
  bool per_row = false;  // each row has its own grad_loss, and upstream is the largest
  double upstream = 0;
  bool of_statistics = false;  // some statistic has a gradient, and statistic is the largest
  double statistic = 0;
  double weight = 0;  // |a_i| ((1 - eps) |c_t| + (eps/V) sum_j c_j)
  // dz of f16 is stored times this, so that small values keep their bits: the largest usual dz
  // becomes 64 (f16 ends at 65504).
  float lift = 1;
};

// Returns the least power of two >= x, or 0 for 0. It is clamped to [2^-126, 2^126], where it and
// its inverse are normal numbers of f32; below, a gradient loses no more than any subnormal may.
LOGITLESS_HOST_DEVICE inline double power_of_two_above(double x) {
  if (!(x > 0)) return 0;
  int exponent;
  const double mantissa = std::frexp(x, &exponent);
  exponent = mantissa == 0.5 ? exponent - 1 : exponent;
  return std::ldexp(1.0, exponent < -126 ? -126 : exponent > 126 ? 126 : exponent);
}

// With a single class and no z-loss the loss is 0 for any logit, and the gradient exactly 0.
LOGITLESS_HOST_DEVICE inline float upstream_of_row(const LossOptions& o, int64_t whole, float g) {
  const bool flat = o.input_kind == InputKind::logits && whole == 1 && o.z_loss == 0;
  return flat && std::isfinite(g) ? 0 : g;
}

// `grad_loss` is the single upstream gradient for sum and mean; reduction none does not read it.
LOGITLESS_HOST_DEVICE inline GradientScale gradient_scale(const LossOptions& o, int64_t whole,
                                                          float grad_loss, double normalizer,
                                                          const GradientSizes& sizes) {
  double common = o.reduction == Reduction::none ? 1 : grad_loss;
  if (o.reduction == Reduction::mean) common /= normalizer;
  if (normalizer == 0) {
    common = o.empty_mean == EmptyMean::zero ? 0 : std::numeric_limits<double>::quiet_NaN();
  }
  const double steepest = std::fabs(static_cast<double>(o.logit_scale)) / o.temperature;
  const double magnitude = sizes.weight * steepest;
  // Weights and the map's slope may take dz beyond f16's range, which ends at 65504, or below it;
  // the lift is divided out. z-loss adds up to 2 |lse| times its weight.
  const double most = sizes.lift == 1 ? 8192 : std::fmin(8192.0, 32768 / (1 + 2048.0 * o.z_loss));
  double weights = 1 / static_cast<double>(sizes.lift);
  if (magnitude > most * weights) {
    weights = power_of_two_above(magnitude / most);
  } else if (magnitude > 0 && magnitude < 0.125) {
    weights = power_of_two_above(magnitude * std::fmax(weights, 1 / most));
  }
  const bool apart = sizes.per_row || sizes.of_statistics;
  double scale = static_cast<float>(common) * weights;
  if (apart) {
    double g = sizes.upstream;
    if (!sizes.per_row && sizes.valid > 0 && std::isfinite(common)) g = std::fabs(common);
    // The statistics' gradients are also multiplied by the map's slope, which `magnitude` includes.
    const double slope = std::fmax(1.0, steepest * sizes.lift / 1024);
    scale = power_of_two_above(std::fmax(g * weights, sizes.statistic * slope / sizes.lift));
  }
  if (sizes.valid == 0) scale = 0;  // an empty mean's NaN must not reach empty sums
  const float inverse = scale == 0 ? 0 : static_cast<float>(1 / scale);
  const float upstream =
      apart ? static_cast<float>(common) * inverse : static_cast<float>(1 / weights);
  return {static_cast<float>(scale), inverse, upstream_of_row(o, whole, upstream)};
}

// `g` and the gradients of the statistics are relative to the call's common factor.
LOGITLESS_HOST_DEVICE inline RowGradient row_gradient(const LossConstants& k, const RowState& s,
                                                      float target_weight, float token_weight,
                                                      float g, float grad_lse,
                                                      float grad_target_logit, float grad_entropy) {
  const float ga = g * token_weight;
  const float w = (1 - k.smoothing) * target_weight + k.smoothing_per_class * k.class_weight_sum;
  const float z_term = k.z_loss > 0 ? 2 * k.z_loss * s.lse() : 0;
  return {.reference = s.reference,
          .log_sum = s.log_sum,
          .probability = ga * (w + z_term) + grad_lse,
          .smoothing = ga * k.smoothing_per_class,
          .onehot = ga * (1 - k.smoothing) * target_weight - grad_target_logit,
          .entropy = grad_entropy,
          .entropy_value = s.entropy};
}

LOGITLESS_HOST_DEVICE inline RowGradient scaled(RowGradient g, float factor) {
  g.probability *= factor;
  g.smoothing *= factor;
  g.onehot *= factor;
  g.entropy *= factor;
  return g;
}

// x - y z, in one rounding (Fused) or with a rounded product (Rounded).
struct Fused {
  LOGITLESS_HOST_DEVICE float operator()(float x, float y, float z) const { return fmaf(-y, z, x); }
};
struct Rounded {
  template <class T>
  LOGITLESS_HOST_DEVICE T operator()(T x, T y, T z) const {
    return x - y * z;
  }
};
#include "src/row/dz-inl.h"

// Returns P p - o at the target from p and rest = 1 - p, without cancellation where p is near 1,
// and without adding P where p is small.
LOGITLESS_HOST_DEVICE inline float target_draw(float probability, float onehot, float p,
                                               float rest) {
  return p < 0.5f ? fmaf(probability, p, -onehot) : fmaf(-probability, rest, probability - onehot);
}

// Returns dz of the target in double from p - 1 = expm1(log p):
//   P p - o = o (p - 1) + (P - o) p cancels neither near p = 1 nor where p is tiny.
LOGITLESS_HOST_DEVICE inline double dz_of_target(const RowGradient& g, double p, double p_minus_1,
                                                 double information, double c) {
  const double own = g.onehot * p_minus_1 + (static_cast<double>(g.probability) - g.onehot) * p;
  return dz_of<Rounded, double>(own, g.smoothing != 0, g.smoothing, c, g.entropy != 0 && p != 0,
                                g.entropy * p, information);
}

}  // namespace logitless
