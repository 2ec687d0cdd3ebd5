// SPDX-License-Identifier: Apache-2.0
// What follows from the states of both heads' rows.
#pragma once

#include "src/cuda/divergence/arrays.h"

namespace logitless::cuda {

// Returns lse - lse', of the rows' two numbers each. It is NaN where either row has no state.
__device__ inline float apart_of(const DivergenceState& s) {
  return (s.reference - s.teacher_reference) + (s.log_sum - s.teacher_log_sum);
}

}  // namespace logitless::cuda
