// SPDX-License-Identifier: Apache-2.0
// A plain f32 implementation of linear cross-entropy in loops, with optional mistakes that the
// bounds must catch. It is compared like a backend; only its arithmetic matters.
//   logits_ij = input_i . weight_j   loss_i = lse_i - logits_it   dlogits = p - onehot
#pragma once

#include "fixture.h"

namespace logitless::conformance {

enum class Mutation {
  none,
  logits_to_bf16,       // logits are stored in bf16 between the product and the softmax
  lse_from_bf16,        // only the sum of exponentials reads rounded logits
  last_column_dropped,  // the sum of exponentials lacks the last column
  last_hidden_dropped,  // the product lacks the last hidden element
  // Probabilities are rounded before the gradients, which the contract allows for bf16 inputs.
  probabilities_to_bf16,
  gradient_sum_in_bf16,   // the gradient's sum is accumulated in bf16
  last_token_dropped,     // in grad_weight
  target_not_subtracted,  // in one row
};
const char* name_of(Mutation mutation);

// Takes ops with reduction none and no other option, without bias, class weights, token weights and
// ignored tokens; of the statistics it makes lse alone. Sums have `lanes` lanes, a power of 2 up to
// 16.
Fields simulate(const LinearCrossEntropyForwardBackward& op, Mutation mutation, int lanes = 16);

}  // namespace logitless::conformance
