// SPDX-License-Identifier: Apache-2.0
// The formulas of a row are written in these numbers: those of a call's map and loss, and of a
// row's dz. They stand apart for kernels that are given them and work out none.
#pragma once

namespace logitless {

// These factors map raw to z. Each is rounded once, and those of the softcap have two parts:
//   z = slope raw  or  z = outward tanh(inward |raw| / 2) with raw's sign.
struct MapFactors {
  float slope = 1;                     // it is scale / temperature
  float inward = 0, inward_low = 0;    // they are 2 |scale / softcap|
  float limit = 0;                     // above this |raw|, tanh is 1
  float outward = 0, outward_low = 0;  // they are softcap / temperature with the sign of scale
  float backward = 0;                  // it is 1 / |outward|
  bool capped = false, identity = true;
};

// These are the constants of a call.
struct LossConstants {
  float smoothing = 0;            // it is eps
  float smoothing_per_class = 0;  // it is eps / V
  float class_weight_sum = 0;     // it is sum_j c_j over the whole vocabulary
  float z_loss = 0;               // it is lambda
};

// These are the coefficients of dz of one row, without the call's common factor (see
// GradientScale).
struct RowGradient {
  float reference = 0;  // with it p_j = exp((z_j - reference) - log_sum)
  float log_sum = 0;
  float probability = 0;    // it multiplies p_j
  float smoothing = 0;      // it multiplies c_j, and is subtracted
  float onehot = 0;         // it is subtracted at the target
  float entropy = 0;        // it multiplies p_j (log p_j + H), and is subtracted
  float entropy_value = 0;  // it is H
};

}  // namespace logitless
