// SPDX-License-Identifier: Apache-2.0
// A run may be too large for the reference, so its error is judged on samples: some tokens of the
// outputs other than the loss, and some vocabulary rows of grad_weight, against the reference on
// just those rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cli/op_shape.h"
#include "src/reference/numbers.h"
#include "src/reference/reference.h"

namespace logitless::cli {

// `count` rows of `view`, evenly spread.
inline TensorView sample_rows(TensorView view, int64_t count) {
  const int64_t rows = view.shape[0];
  const int64_t step = count > 1 ? (rows - 1) / (count - 1) : 1;
  view.shape[0] = count;
  view.stride[0] *= step;
  return view;
}

// The worst error / bound of one output.
inline double worst_ratio(const reference::Output& want, const TensorView& view) {
  const std::vector<double> got = reference::read(view);
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(got[i] - want.value[i]);
    const double ratio = error == 0 ? 0 : error / want.bound[i];
    worst = ratio <= worst ? worst : ratio;  // a NaN stays
  }
  return worst;
}

template <class Op>
double worst_of(const Op& op, const reference::BoundModel& model) {
  const reference::Result result = reference::evaluate(op, model);
  if (!result.status.ok()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  const logitless_op unused{};
  for_each_tensor(op, unused, [&](const char* name, Access access, const TensorView& view, auto*) {
    const auto want = result.outputs.find(name);
    if (!view || access == Access::read || want == result.outputs.end()) return;
    const double ratio = worst_ratio(want->second, view);
    worst = ratio <= worst ? worst : ratio;
  });
  return worst;
}

template <class Op>
const TensorView& rows_of(const Op& op) {
  if constexpr (LinearOp<Op>) {
    return op.input;
  } else {
    return op.logits;
  }
}

// Returns the op on the sampled tokens alone: a token's results do not depend on the others, except
// through the mean's divisor.
template <class Op>
Op sample_tokens(Op op, int64_t count) {
  const auto cut = [&](TensorView& view) {
    if (view) view = sample_rows(view, count);
  };
  if constexpr (LinearOp<Op>) {
    cut(op.input);
  } else {
    cut(op.logits);
  }
  if constexpr (LossOp<Op>) {
    op.options.normalizer = static_cast<double>(op.target.shape[0]);
    cut(op.target);
  } else {
    cut(op.probabilities);
  }
  if constexpr (ForwardOp<Op>) {
    op.loss = {};
    cut(op.statistics.lse);
    cut(op.statistics.target_logit);
    cut(op.statistics.row_reference);
    cut(op.statistics.row_log_sum);
  }
  if constexpr (BackwardOnlyOp<Op>) {
    cut(op.row_reference);
    cut(op.row_log_sum);
  }
  if constexpr (LinearOp<Op> && GradientOp<Op>) {
    cut(op.grad_input);
    op.grad_weight = {};
  } else if constexpr (GradientOp<Op>) {
    cut(op.grad_logits);
  }
  return op;
}

// Returns an op on `count` consecutive rows of grad_weight, including the first target's: a shard
// of the vocabulary, with the row states that the run wrote.
template <class Op>
LinearCrossEntropyBackward sample_vocab(const Op& op, const TensorView& row_reference,
                                        const TensorView& row_log_sum, int64_t count) {
  const int64_t vocab = op.weight.shape[0];
  const int64_t first = std::min(*op.target.template as<const int64_t>(), vocab - count);
  const auto cut = [&](TensorView view) {
    view.byte_offset += static_cast<uint64_t>(first * view.stride[0] * size_of(view.dtype));
    view.shape[0] = count;
    return view;
  };
  LinearCrossEntropyBackward shard{.input = op.input,
                                   .weight = cut(op.weight),
                                   .target = op.target,
                                   .row_reference = row_reference,
                                   .row_log_sum = row_log_sum,
                                   .grad_weight = cut(op.grad_weight),
                                   .options = op.options};
  shard.options.vocab_start = first;
  shard.options.vocab_total = vocab;
  return shard;
}

// Error / bound of the worst sampled element of a finished run. `row_reference` and `row_log_sum`
// are the run's own, for all tokens.
template <class Op>
double judge(const Op& op, const TensorView& row_reference, const TensorView& row_log_sum,
             int64_t count, const TensorView& original_logits, const reference::BoundModel& model) {
  Op tokens = sample_tokens(op, std::min(count, rows_of(op).shape[0]));
  if constexpr (!LinearOp<Op>) {
    if (original_logits) tokens.logits = original_logits;
  }
  double worst = worst_of(tokens, model);
  if constexpr (LinearOp<Op> && GradientOp<Op>) {
    if (op.grad_weight) {
      const double ratio = worst_of(
          sample_vocab(op, row_reference, row_log_sum, std::min(count, op.weight.shape[0])), model);
      worst = ratio <= worst ? worst : ratio;
    }
  }
  return worst;
}

}  // namespace logitless::cli
