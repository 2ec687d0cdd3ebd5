// SPDX-License-Identifier: Apache-2.0
// An honest f32 implementation of linear cross-entropy in plain loops, with the mistakes that the
// bounds must catch. It is judged like a backend; only its arithmetic matters.
//   logits_ij = input_i . weight_j   loss_i = lse_i - logits_it   dlogits = (p - onehot) / N
#pragma once

#include "fixture.h"

namespace logitless::conformance {

enum class Mutation {
  none,
  logits_to_bf16,       // logits are stored in bf16 between the product and the softmax
  lse_from_bf16,        // only the row sum reads rounded logits
  last_column_dropped,  // the row sum lacks the vocabulary's last column
  last_hidden_dropped,  // the product lacks the last of the hidden axis
  // Probabilities are rounded before the gradients, which is honest if the input is bf16.
  probabilities_to_bf16,
  gradient_sum_in_bf16,   // the sum is accumulated in bf16
  last_token_dropped,     // in grad_weight
  target_not_subtracted,  // in one row
};
const char* name_of(Mutation mutation);

// The fields of an op without bias, weights and options other than statistics, and without ignored
// tokens. Sums run in 16 lanes or fewer, a power of 2.
Fields simulate(const LinearCrossEntropyForwardBackward& op, Mutation mutation, int lanes = 16);

}  // namespace logitless::conformance
