// SPDX-License-Identifier: Apache-2.0
// Values common to a call's tokens: the normalizer, the factor of all gradients; and a token's map.
#pragma once

#include <cfloat>

#include "src/cuda/tokens/tokens.cuh"
#include "src/row/gradient.h"

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

// Computes all scalars from the sums over all tokens.
__device__ inline TokenScalars scalars_of(const TokenInput& in, const TokenBlock& all) {
  TokenScalars s{};
  s.one = 1;
  s.valid = all.valid;
  s.outside = all.outside;
  s.counted = all.counted;
  s.normalizer = normalizer_of(in, all.normalizer);
  s.empty_mean = s.normalizer == 0;
  s.constants = constants_of(in, all.class_weight_sum);
  if (!in.gradients) return s;
  LossOptions options = in.options;
  // The lowest temperature has the steepest map.
  if (present(in.temperature)) options.temperature = all.coolest;
  const GradientSizes sizes{.valid = all.valid,
                            .per_row = in.per_row_upstream,
                            .upstream = all.upstream,
                            .of_statistics = in.statistics_gradients,
                            .statistic = all.statistics,
                            .weight = all.weights * (1 + double{in.beyond}),
                            .lift = in.lift};
  const bool common = options.reduction != Reduction::none && present(in.grad_loss);
  const float grad_loss = common ? load(in.grad_loss) : 1;
  const GradientScale scale = gradient_scale(options, in.whole(), grad_loss, s.normalizer, sizes);
  s.gradient_scale = scale.scale;
  s.inv_gradient_scale = scale.inverse;
  s.upstream = scale.upstream;
  return s;
}

// The rule of docs/semantics.md, "Arguments", for a temperature and the factors made from it.
__device__ inline bool is_usable(const LossOptions& o, float temperature) {
  const auto is_normal = [](double x) { return x >= FLT_MIN && x <= FLT_MAX; };
  const auto serves = [&](double x) { return x == 0 || is_normal(fabs(x)); };
  const double t = temperature, cap = o.softcap;
  if (!is_normal(t) || !serves(o.logit_scale / t)) return false;
  return cap == 0 || (serves(cap / t) && serves(t / cap));
}

// Like map_factors of src/row/map.h, for a token's temperature; sets `fault` if it is invalid.
__device__ inline TokenMap map_of_temperature(const TokenInput& in, float temperature) {
  const LossOptions& o = in.options;
  if (!is_usable(o, temperature)) {
    if (present(in.fault)) atomicOr(address<int>(in.fault), 4);
    const float none = nan_value();
    return {none, none, none, none, none, none, none, 0};
  }
  const double t = temperature, outward = copysign(o.softcap / t, double{o.logit_scale});
  TokenMap m{};
  m.slope = static_cast<float>(o.logit_scale / t);
  m.outward = static_cast<float>(outward);
  m.outward_low = static_cast<float>(outward - m.outward);
  m.backward = o.softcap > 0 ? static_cast<float>(1 / fabs(double{m.outward})) : 0.0f;
  m.inverse = static_cast<float>(1 / t);
  m.inverse_low = static_cast<float>(1 / t - m.inverse);
  m.temperature = temperature;
  return m;
}

}  // namespace logitless::cuda
