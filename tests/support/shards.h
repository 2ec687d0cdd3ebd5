// SPDX-License-Identifier: Apache-2.0
// An op on all of a vocabulary becomes the ops on its shards here.
#pragma once

#include <vector>

#include "logitless/combine.h"
#include "logitless/fields.h"

namespace logitless::conformance {

using Sizes = std::vector<int64_t>;  // each shard has so many columns

inline TensorView columns_of(const TensorView& view, int64_t first, int64_t count, int axis) {
  TensorView part = view;
  if (!part) return part;
  part.byte_offset += first * view.stride[axis] * size_of(view.dtype);
  part.shape[axis] = count;
  return part;
}

// Returns the op on the columns [first, first + count) of the vocabulary.
template <class Op>
Op shard_of(const Op& whole, int64_t first, int64_t count) {
  Op op = whole;
  op.options.vocab_start = first;
  op.options.vocab_total =
      whole.options.vocab_total ? whole.options.vocab_total : (LinearOp<Op> ? 0 : 0);
  if constexpr (LinearOp<Op>) {
    op.options.vocab_total = whole.weight.shape[0];
    op.weight = columns_of(whole.weight, first, count, 0);
    op.bias = columns_of(whole.bias, first, count, 0);
  } else {
    op.options.vocab_total = whole.logits.shape[1];
    op.logits = columns_of(whole.logits, first, count, 1);
  }
  if constexpr (ForwardOp<Op>) {
    if (op.options.vocab_total > count) op.loss = {};
  }
  if constexpr (GradientOp<Op>) {
    if constexpr (LinearOp<Op>) {
      op.grad_weight = columns_of(whole.grad_weight, first, count, 0);
      op.grad_bias = columns_of(whole.grad_bias, first, count, 0);
    } else {
      op.grad_logits = columns_of(whole.grad_logits, first, count, 1);
    }
  }
  return op;
}

}  // namespace logitless::conformance
