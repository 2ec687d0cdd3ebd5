// SPDX-License-Identifier: Apache-2.0
// Combines a row's partial sums of consecutive tiles, always in the order of the tiles, whether in
// the forward's registers or in finish_rows.
#pragma once

#include "src/cuda/linear/units.h"
#include "src/cuda/numbers.cuh"

namespace logitless::cuda {

// The exponent of a probability, at most 0. fminf would turn NaN into 0.
__device__ inline float nonpositive(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// The sum over some columns, relative to the reference: their maximum, or an anchor instead. By
// default over no columns.
struct PartialSum {
  float reference = -INFINITY, sum = 0;
};

// Returns `second` unchanged if `first` has no columns. Only the sum carries NaN.
__device__ inline PartialSum combine(const PartialSum& first, const PartialSum& second) {
  const float highest = fmaxf(first.reference, second.reference);
  const float from = highest == -infinity() ? 0.0f : highest;
  return {highest, first.sum * exp2_fast((first.reference - from) * log2e) +
                       second.sum * exp2_fast((second.reference - from) * log2e)};
}

}  // namespace logitless::cuda
