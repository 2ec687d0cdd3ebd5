// SPDX-License-Identifier: Apache-2.0
// Partial sums of a row of tiles that follow each other are combined here. A unit's tiles are
// combined in this one order, whether in the forward's registers or in the rows' kernel.
#pragma once

#include "src/cuda/linear/units.h"
#include "src/cuda/numbers.cuh"

namespace logitless::cuda {

// The exponent of a probability is 0 at most, and NaN where the logit is one; fminf would make 0 of
// a NaN.
__device__ inline float nonpositive(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// Holds the sum of some columns, relative to the reference, which is their maximum or an anchor
// near it. As it begins it is the sum of no columns.
struct PartialSum {
  float reference = -INFINITY, sum = 0;
};

// Returns `second` bit for bit where `first` is of no column. A NaN counts in the sum alone.
__device__ inline PartialSum combine(const PartialSum& first, const PartialSum& second) {
  const float highest = fmaxf(first.reference, second.reference);
  const float from = highest == -infinity() ? 0.0f : highest;
  return {highest, first.sum * exp2_fast((first.reference - from) * log2e) +
                       second.sum * exp2_fast((second.reference - from) * log2e)};
}

}  // namespace logitless::cuda
