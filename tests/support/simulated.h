// SPDX-License-Identifier: Apache-2.0
// An honest f32 implementation of linear cross-entropy in plain loops, and the ways of going wrong
// that the bounds must catch. It is judged like a backend; only its arithmetic is of interest.
//   logits_ij = input_i . weight_j   loss_i = lse_i - logits_it   dlogits = (p - onehot) / N
#pragma once

#include "fixture.h"

namespace logitless::conformance {

enum class Mutation {
  none,
  logits_to_bf16,         // stored in bf16 between the product and the softmax
  lse_from_bf16,          // the row sum alone reads rounded logits
  last_column_dropped,    // of the vocabulary, in the row sum
  last_hidden_dropped,    // of the product
  probabilities_to_bf16,  // before the gradients; honest where the input is bf16
  gradient_sum_in_bf16,   // accumulated in bf16
  last_token_dropped,     // from grad_weight
  target_not_subtracted,  // in one row
};
const char* name_of(Mutation mutation);

// The fields of an op without bias, weights or options but statistics; no ignored token.
// Sums in 16 lanes or fewer, a power of 2.
Fields simulate(const LinearCrossEntropyForwardBackward& op, Mutation mutation, int lanes = 16);

}  // namespace logitless::conformance
