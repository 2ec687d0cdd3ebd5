// SPDX-License-Identifier: Apache-2.0
// The numbers that the formulas of loss.h are written in: of a call's map and loss, and of a row's
// dz. They stand apart from it for kernels that are given them and work out no loss.
#pragma once

namespace logitless {

// raw -> z, with the factors each rounded once, those of the softcap in two parts:
//   z = slope raw  or  z = outward tanh(inward |raw| / 2) with raw's sign.
struct MapFactors {
  float slope = 1;                     // scale / temperature
  float inward = 0, inward_low = 0;    // 2 |scale / softcap|
  float limit = 0;                     // above this |raw|, tanh is 1
  float outward = 0, outward_low = 0;  // softcap / temperature with the sign of scale
  float backward = 0;                  // temperature / softcap
  bool capped = false, identity = true;
};

// The constants of a call.
struct LossConstants {
  float smoothing = 0;            // eps
  float smoothing_per_class = 0;  // eps / V
  float class_weight_sum = 0;     // sum_j c_j over the whole vocabulary
  float z_loss = 0;               // lambda
};

// The coefficients of dz of one row, without the call's common factor (see GradientScale).
struct RowGradient {
  float reference = 0;  // p_j = exp((z_j - reference) - log_sum)
  float log_sum = 0;
  float probability = 0;    // factor of p_j
  float smoothing = 0;      // factor of c_j, subtracted
  float onehot = 0;         // subtracted at the target
  float entropy = 0;        // factor of p_j (log p_j + H), subtracted
  float entropy_value = 0;  // H
};

}  // namespace logitless
