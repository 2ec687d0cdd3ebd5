// SPDX-License-Identifier: Apache-2.0
// The host launches the linear ops' product with its logits on Hopper through these; forward.cuh
// says what it does.
#pragma once

#include "src/cuda/linear/linear.h"

namespace logitless::cuda::sm90 {

inline constexpr int64_t sum_columns = 192;  // a row's partial sum covers so many: a tile

// Returns whether this build has code of sm_90a (cmake/cuda.cmake); without it these kernels are
// empty.
bool has_code();
// Returns how far apart the rows of the weight lie; for a single row any distance will do.
inline int64_t weight_stride(const LinearCall& call, const LinearPlan& plan) {
  if (call.shape.copies_weight) return plan.hidden_pitch;
  return call.shape.vocab == 1 ? call.shape.hidden : call.weight.stride[0];
}

// Makes the partial sums of columns [first, first + columns) of the chunk, `first` whole tiles; and
// E, where the panel has data.
void forward(const LinearWork& work, int64_t first, int64_t columns, const Panel& panel);
// Makes dz of the panel's columns.
void gradients(const LinearWork& work, const Panel& panel);

}  // namespace logitless::cuda::sm90
