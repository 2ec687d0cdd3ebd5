// SPDX-License-Identifier: Apache-2.0
// The host launches the gradients' products on Hopper through these (product.cuh says what they
// do), for calls that the forward kernel serves (forward.h).
#pragma once

#include "src/cuda/linear/linear.h"

namespace logitless::cuda::sm90 {

// Returns whether a product can write this gradient itself: f32 or the inputs' dtype, rows along
// memory.
bool writes(const TensorView& gradient, DType inputs);

// E, or dz, of these columns lies in two places, `behind` after `panel`, or in one.
struct Kept {
  Panel panel, behind = {};
  int64_t columns() const { return panel.columns + behind.columns; }
};

// Makes rows [row, row + rows) of the chunk, panel rows . weight rows, in `sums` [rows,
// hidden_pitch] in f32, or adds them to it; if they are of E, each times v, less the smoothing's
// term of what is kept of E.
void input_sums(const LinearWork& work, const Kept& kept, int64_t row, int64_t rows, float* sums,
                bool of_e, bool add);
// Makes the caller's grad_input, all rows of the chunk, from E or dz of the whole vocabulary.
void grad_input(const LinearWork& work, const Kept& kept, bool of_e);

// Makes the panel's rows of grad_weight, panel columns . `rows` (input times v, or input itself),
// in the caller's grad_weight, or in its sums in f32 where the plan has them. Only f32 can be added
// to (`add`).
void grad_weight(const LinearWork& work, const Panel& panel, const char* rows, bool of_e, bool add);
// Makes grad_input and grad_weight of one of several chunks in one launch, side by side.
void both_gradients(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                    bool add);

}  // namespace logitless::cuda::sm90
