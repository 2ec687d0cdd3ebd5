// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "src/cuda/divergence/arrays.h"

namespace logitless::cuda {

// lse - lse', from each head's reference and log_sum. Not finite if either row has no state.
__device__ inline float apart_of(const DivergenceState& s) {
  return (s.reference - s.teacher_reference) + (s.log_sum - s.teacher_log_sum);
}

}  // namespace logitless::cuda
