// SPDX-License-Identifier: Apache-2.0
// Combines partial sums of a row of consecutive tiles: always in this one order, whether in the
// forward's registers or in the rows' kernel.
#pragma once

#include "src/cuda/linear/units.h"
#include "src/cuda/numbers.cuh"

namespace logitless::cuda {

// The exponent of a probability, at most 0. fminf would turn a NaN into 0.
__device__ inline float nonpositive(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// The sum of some columns, relative to the reference, their maximum or an anchor near it. By
// default, of no columns.
struct PartialSum {
  float reference = -INFINITY, sum = 0;
};

// Returns `second` bit for bit if `first` has no column. Only the sum carries a NaN.
__device__ inline PartialSum combine(const PartialSum& first, const PartialSum& second) {
  const float highest = fmaxf(first.reference, second.reference);
  const float from = highest == -infinity() ? 0.0f : highest;
  return {highest, first.sum * exp2_fast((first.reference - from) * log2e) +
                       second.sum * exp2_fast((second.reference - from) * log2e)};
}

}  // namespace logitless::cuda
