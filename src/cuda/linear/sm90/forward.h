// SPDX-License-Identifier: Apache-2.0
// The linear ops' product with its logits on Hopper: see forward.cuh.
#pragma once

#include "src/cuda/linear/linear.h"

namespace logitless::cuda::sm90 {

inline constexpr int64_t sum_columns = 192;  // of a row's partial sums

// True where this build has code of sm_90a (cmake/cuda.cmake): without it these kernels are empty.
bool has_code();
// Rows of the weight lie so far apart; of one row alone any distance will do.
inline int64_t weight_stride(const LinearCall& call, const LinearPlan& plan) {
  if (call.shape.copies_weight) return plan.hidden_pitch;
  return call.shape.vocab == 1 ? call.shape.hidden : call.weight.stride[0];
}

// Columns [first, first + columns) of the chunk, `first` whole tiles: to the partial sums; and E,
// where the panel has data.
void forward(const LinearWork& work, int64_t first, int64_t columns, const Panel& panel);
// dz of the panel's columns.
void gradients(const LinearWork& work, const Panel& panel);

}  // namespace logitless::cuda::sm90
