// SPDX-License-Identifier: Apache-2.0
// Turns an op on a whole vocabulary into ops on its shards, and their outputs into those of the
// whole vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "judge.h"
#include "logitless/combine.h"
#include "logitless/fields.h"

namespace logitless::conformance {

using Sizes = std::vector<int64_t>;  // the columns of each shard

inline TensorView columns_of(const TensorView& view, int64_t first, int64_t count, int axis) {
  TensorView part = view;
  if (!part) return part;
  part.byte_offset += first * view.stride[axis] * size_of(view.dtype);
  part.shape[axis] = count;
  return part;
}

// The op on the columns [first, first + count) of the vocabulary.
template <class Op>
Op shard_of(const Op& whole, int64_t first, int64_t count) {
  Op op = whole;
  op.options.vocab_start = first;
  if constexpr (LinearOp<Op>) {
    op.options.vocab_total = whole.weight.shape[0];
    op.weight = columns_of(whole.weight, first, count, 0);
    op.bias = columns_of(whole.bias, first, count, 0);
    if constexpr (DivergenceOp<Op>) {
      op.teacher.weight = columns_of(whole.teacher.weight, first, count, 0);
      op.teacher.bias = columns_of(whole.teacher.bias, first, count, 0);
      op.teacher.logits = columns_of(whole.teacher.logits, first, count, 1);
    }
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

// A shard whose logits are all -inf has no probability: its log sum may be -inf or NaN.
inline void accept_no_probability(const Fields& got, reference::Result* want) {
  for (const std::string head : {"", "teacher_"}) {
    const auto reference = want->outputs.find(head + "row_reference");
    if (reference == want->outputs.end()) continue;
    const std::vector<double>& m = reference->second.value;
    for (const char* name : {"row_log_sum", "lse"}) {
      const auto output = want->outputs.find(head + name);
      if (output == want->outputs.end() || !got.contains(output->first)) continue;
      const std::vector<double>& value = got.at(output->first).value;
      for (size_t i = 0; i < value.size(); ++i) {
        const bool none = m[i] == -INFINITY && value[i] == -INFINITY;
        if (none) output->second.value[i] = value[i];
      }
    }
  }
}

// Makes a Combine of the shards' Forward outputs, with the outputs of the whole op.
template <class Op>
Problem<Combine> combine_of(const Op& whole, int64_t vocab, const std::vector<Fields>& shards) {
  Problem<Combine> p;
  const int64_t tokens = whole.target.shape[0];
  const auto all_of = [&](const char* name, TensorView* view) {
    std::vector<double> values;
    for (const Fields& shard : shards) {
      const auto found = shard.find(name);
      if (found == shard.end()) return;
      values.insert(values.end(), found->second.value.begin(), found->second.value.end());
    }
    *view = p.pool.add(std::string(name) == "argmax" ? DType::i64 : DType::f32,
                       {std::ssize(shards), tokens}, values);
  };
  all_of("row_reference", &p.op.shard_row_reference);
  all_of("row_log_sum", &p.op.shard_row_log_sum);
  all_of("target_logit", &p.op.shard_target_logit);
  all_of("entropy", &p.op.shard_entropy);
  all_of("argmax", &p.op.shard_argmax);
  all_of("weighted_logit_sum", &p.op.shard_weighted_logit_sum);
  all_of("sum_p_squared", &p.op.shard_sum_p_squared);
  all_of("mean_logit", &p.op.shard_mean_logit);
  all_of("max_logprob", &p.op.shard_max_logprob);
  p.op.options = whole.options;
  p.op.options.vocab_total = vocab;
  const auto copied = [&](const TensorView& view) {
    if (!view) return TensorView{};
    return p.pool.add(view.dtype, {view.shape.begin(), view.shape.begin() + view.rank}, read(view));
  };
  p.op.target = copied(whole.target);
  p.op.weights = {.token = copied(whole.weights.token),
                  .vocab = copied(whole.weights.vocab),
                  .normalizer = copied(whole.weights.normalizer)};
  const auto output = [&](const TensorView& like) {
    if (!like) return TensorView{};
    return p.pool.reserve(like.dtype, {like.shape.begin(), like.shape.begin() + like.rank});
  };
  p.op.loss = output(whole.loss);
  const TokenStatistics& s = whole.statistics;
  p.op.statistics = {.lse = output(s.lse),
                     .target_logit = output(s.target_logit),
                     .entropy = output(s.entropy),
                     .argmax = output(s.argmax),
                     .row_reference = output(s.row_reference),
                     .row_log_sum = output(s.row_log_sum),
                     .weighted_logit_sum = output(s.weighted_logit_sum),
                     .logprob = output(s.logprob),
                     .sum_p_squared = output(s.sum_p_squared),
                     .mean_logit = output(s.mean_logit),
                     .max_logprob = output(s.max_logprob)};
  return p;
}

// The state that a caller gives for a shard without columns.
inline Fields without_columns(Fields like) {
  for (auto& [name, field] : like) {
    const double value = name == "row_reference" || name == "target_logit" ? -INFINITY
                         : name == "argmax"                                ? -1
                                                                           : 0;
    std::fill(field.value.begin(), field.value.end(), value);
  }
  return like;
}

// A split of a vocabulary, with special content in one of its shards.
struct Split {
  enum Content { plain, masked, nan };  // masked: the shard's logits are all -inf

  std::string name;
  Sizes sizes;
  Content content = plain;
  size_t shard = 0;  // the shard that is masked or has a NaN
};
// The interesting splits of a vocabulary into `shards` shards: even, one with a NaN, and, of more
// than one shard, uneven, one shard without columns, one masked.
std::vector<Split> splits_of(int64_t vocab, int64_t shards);

// Whether the case can be computed from shards. Combine has neither rank nor mass_above.
bool can_be_split(const Case& c);

// Compares a shard's gradients, except grad_input, with the columns [first, first + count) of the
// whole vocabulary's.
Comparison compare_columns(const reference::Result& whole, const Fields& shard, int64_t vocab,
                           int64_t first, int64_t count);

// Runs the op of the case on the shards, one after another, and what ranks would exchange: Forward
// and Combine; for a Backward also the target logits, if state is kept, and the sum of grad_input.
// Compares each shard alone, and all together with the whole vocabulary.
Comparison judge_shards(const TestDevice& device, const Case& c, const Split& split,
                        const RunPlan& plan = {});

}  // namespace logitless::conformance
