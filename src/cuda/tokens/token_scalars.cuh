// SPDX-License-Identifier: Apache-2.0
// A call's tokens come to these numbers: the normalizer, and the factors common to all gradients.
#pragma once

#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

__device__ inline double normalizer_of(const TokenInput& in, double counted) {
  if (in.options.reduction != Reduction::mean) return 1;
  if (present(in.normalizer)) {
    return in.normalizer.dtype == DType::i64 ? static_cast<double>(load_int(in.normalizer, 0))
                                             : static_cast<double>(load(in.normalizer));
  }
  return in.options.normalizer != 0 ? in.options.normalizer : counted;
}

__device__ inline LossConstants constants_of(const TokenInput& in, double class_weight_sum) {
  LossConstants c;
  c.smoothing = in.options.label_smoothing;
  c.z_loss = in.options.z_loss;
  if (c.smoothing > 0) {
    c.smoothing_per_class = static_cast<float>(static_cast<double>(in.options.label_smoothing) /
                                               static_cast<double>(in.whole()));
    c.class_weight_sum = static_cast<float>(class_weight_sum);
  }
  return c;
}

// Returns the least power of two >= x, or 0 for 0. It and its inverse are normal numbers of f32: it
// ends at 2^126, a quarter of the least that f32 has no number for, and at 2^-126, below which a
// gradient loses no more than any subnormal may.
__device__ inline double power_of_two_above(double x) {
  if (!(x > 0)) return 0;
  int exponent;
  const double mantissa = frexp(x, &exponent);
  exponent = mantissa == 0.5 ? exponent - 1 : exponent;
  return ldexp(1.0, min(max(exponent, -126), 126));
}

// Makes all scalars from the sums over all tokens. The gradients' factors are gradient_scale of
// src/row/gradient.h and what stands above it, spelled out, because ptxas makes other code of
// calls.
__device__ inline TokenScalars scalars_of(const TokenInput& in, const TokenBlock& all) {
  const LossOptions& o = in.options;
  TokenScalars s{};
  s.one = 1;
  s.valid = all.valid;
  s.outside = all.outside;
  s.counted = all.counted;
  s.normalizer = normalizer_of(in, all.normalizer);
  s.empty_mean = s.normalizer == 0;
  s.constants = constants_of(in, all.class_weight_sum);
  if (!in.gradients) return s;
  double common = 1;
  if (o.reduction != Reduction::none) {
    common = present(in.grad_loss) ? load(in.grad_loss) : 1;
    if (o.reduction == Reduction::mean) common /= s.normalizer;
    if (s.empty_mean) common = o.empty_mean == EmptyMean::zero ? 0 : nan("");
  }
  const float temperature = present(in.temperature) ? all.coolest : o.temperature;
  const double steepest = fabs(static_cast<double>(o.logit_scale)) / temperature;
  const double magnitude = all.weights * steepest;
  // Weights and the map's slope take a dz this far beyond what f16 holds, which ends at 65504, or
  // below it; the lift is divided out. z-loss makes a dz larger by up to 2 |lse| times its weight.
  const double most = in.lift == 1 ? 8192 : fmin(8192.0, 32768 / (1 + 2048.0 * o.z_loss));
  double weights = 1 / static_cast<double>(in.lift);
  if (magnitude > most * weights) {
    weights = power_of_two_above(magnitude / most);
  } else if (magnitude > 0 && magnitude < 0.125) {
    weights = power_of_two_above(magnitude * fmax(weights, 1 / most));
  }
  const bool apart = in.per_row_upstream || in.statistics_gradients;
  double scale = static_cast<float>(common) * weights;
  if (apart) {
    double g = all.upstream;
    if (!in.per_row_upstream && s.valid > 0 && isfinite(common)) g = fabs(common);
    // The map's slope comes on top of the statistics' gradients, as it is part of `magnitude`.
    const double slope = fmax(1.0, steepest * in.lift / 1024);
    scale = power_of_two_above(fmax(g * weights, all.statistics * slope / in.lift));
  }
  if (s.valid == 0) scale = 0;  // NaN of an empty mean must not reach sums over no token
  s.gradient_scale = static_cast<float>(scale);
  s.inv_gradient_scale = scale == 0 ? 0 : static_cast<float>(1 / scale);
  float upstream =
      apart ? static_cast<float>(common) * s.inv_gradient_scale : static_cast<float>(1 / weights);
  const bool flat = o.input_kind == InputKind::logits && in.whole() == 1 && o.z_loss == 0;
  if (flat && isfinite(upstream)) upstream = 0;
  s.upstream = upstream;
  return s;
}

}  // namespace logitless::cuda
