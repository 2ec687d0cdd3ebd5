// SPDX-License-Identifier: Apache-2.0
// The coefficients of a row's formulas: of a call's map and loss, and of a row's dz. In their own
// file for kernels that receive coefficients without computing them.
#pragma once

namespace logitless {

// Map raw to z. `inward` and `outward` have a low part as well, with what rounding lost:
//   z = slope raw  or  z = outward tanh(inward |raw| / 2) with raw's sign.
struct MapFactors {
  float slope = 1;                     // scale / temperature
  float inward = 0, inward_low = 0;    // 2 |scale / softcap|
  float limit = 0;                     // tanh is 1 if |raw| exceeds this
  float outward = 0, outward_low = 0;  // softcap / temperature with the sign of scale
  float backward = 0;                  // 1 / |outward|
  bool capped = false, identity = true;
};

struct LossConstants {
  float smoothing = 0;            // eps
  float smoothing_per_class = 0;  // eps / V
  float class_weight_sum = 0;     // sum_j c_j over the whole vocabulary
  float z_loss = 0;               // lambda
};

// The coefficients of one row's dz, relative to the call's common factor (GradientScale).
struct RowGradient {
  float reference = 0;  // p_j = exp((z_j - reference) - log_sum)
  float log_sum = 0;
  float probability = 0;    // times p_j
  float smoothing = 0;      // times c_j, subtracted
  float onehot = 0;         // subtracted at the target
  float entropy = 0;        // times p_j (log p_j + H), subtracted
  float entropy_value = 0;  // H
};

}  // namespace logitless
