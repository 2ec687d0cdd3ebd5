// SPDX-License-Identifier: Apache-2.0
// The gradients' products on Hopper: see product.cuh. Of calls that the forward kernel serves
// (forward.h).
#pragma once

#include "src/cuda/linear/linear.h"

namespace logitless::cuda::sm90 {

// True where a product can write this gradient itself: f32 or the inputs' dtype, rows along memory.
bool writes(const TensorView& gradient, DType inputs);

// Columns whose E, or dz, lies in two places, `behind` after `panel`; or in one.
struct Kept {
  Panel panel, behind = {};
  int64_t columns() const { return panel.columns + behind.columns; }
};

// Rows [row, row + rows) of the chunk: panel rows . weight rows, to sums [rows, hidden_pitch] in
// f32, or added to them; of E times v, less the smoothing's term of what is kept of E.
void input_sums(const LinearWork& work, const Kept& kept, int64_t row, int64_t rows, float* sums,
                bool of_e, bool add);
// All rows of the chunk from E or dz of the whole vocabulary, to the caller's grad_input.
void grad_input(const LinearWork& work, const Kept& kept, bool of_e);

// The panel's rows of grad_weight: panel columns . `rows` (input times v, or input itself), to the
// caller's grad_weight, or to its sums in f32 where the plan has them. `add`: f32 alone.
void grad_weight(const LinearWork& work, const Panel& panel, const char* rows, bool of_e, bool add);
// grad_input and grad_weight of one of several chunks in one launch, side by side.
void both_gradients(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                    bool add);

}  // namespace logitless::cuda::sm90
