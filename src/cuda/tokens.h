// SPDX-License-Identifier: Apache-2.0
// The tokens of a call, on the device: which count, in which order they are compacted, what the
// mean divides by, the factor common to all gradients. The host never learns the number of valid
// tokens: every kernel that follows reads it from `scalars`. The same quantities as
// src/cpu/tokens.h.
#pragma once

#include "src/cuda/runtime.h"
#include "src/loss.h"

namespace logitless::cuda {

// In device memory.
struct TokenScalars {
  int32_t valid;    // tokens that count, compacted
  int32_t outside;  // targets outside the vocabulary where that is an error: loss NaN, gradient 0
  int32_t empty_mean;
  float gradient_scale;      // left out of every dz, a factor of the f32 sums before their rounding
  float inv_gradient_scale;  // 0 where gradient_scale is 0
  float upstream;            // g_i / gradient_scale where it is the same for every row
  double normalizer;
  LossConstants constants;
};

// What an op says of its tokens; absent views where it has none.
struct TokenInput {
  TensorView target, token_weight, vocab_weight, normalizer, fault;
  TensorView grad_loss, grad_lse, grad_target_logit, grad_entropy;
  LossOptions options;
  int64_t vocab = 0;  // V of the views
  bool gradients = false;
  bool per_row_upstream = false;  // grad_loss [N]
  bool statistics_gradients = false;
  // What a dz of f16 is stored times, so that small ones keep their bits: the largest of the usual
  // ones comes to 64 of 65504.
  float lift = 1;
  constexpr int64_t whole() const { return options.vocab_total > 0 ? options.vocab_total : vocab; }
  constexpr int64_t start() const { return options.vocab_total > 0 ? options.vocab_start : 0; }
};

// Device arrays in the workspace; the first scalars->valid entries are used.
struct Tokens {
  int64_t total = 0;               // N
  int32_t* row = nullptr;          // [N]  index of the token, ascending
  int32_t* target = nullptr;       // [N]  column in the views; -1: on another shard
  float* target_weight = nullptr;  // [N]  c_t
  float* token_weight = nullptr;   // [N]  a_i
  TokenScalars* scalars = nullptr;
  // Of blocks of tokens_per_block tokens, while they are prepared.
  int32_t* block_valid = nullptr;
  int32_t* block_outside = nullptr;
  double* block_normalizer = nullptr;
  float* block_largest = nullptr;  // of |a| w, of |g|, of the statistics' gradients
};
constexpr int tokens_per_block = 1024;

Tokens place_tokens(Arena* arena, int64_t tokens);

// Enqueues all of it; the target range check too, which sets `fault`.
void prepare_tokens(const TokenInput& input, const Tokens& tokens, Stream* stream);

// From the states of the compacted tokens: loss (reduced in fixed order) and statistics, and what
// the other tokens get: 0, or NaN for a target outside. `losses` [N] is scratch.
struct TokenOutputs {
  TensorView loss;
  TokenStatistics statistics;
};
void write_tokens(const TokenInput& input, const Tokens& tokens, const RowState* states,
                  const TokenOutputs& outputs, float* losses, Stream* stream);
// The loss alone, from `losses` [valid] of the compacted tokens.
void write_losses(const TokenInput& input, const Tokens& tokens, const float* losses,
                  const TensorView& loss, Stream* stream);

// Rows of a gradient [N, columns] whose token does not count: exactly 0.
void clear_other_rows(const TokenInput& input, const TensorView& gradient, Stream* stream);

template <class Op>
TokenInput token_input(const Op& op, int64_t vocab) {
  TokenInput in;
  in.target = op.target;
  in.token_weight = op.weights.token;
  in.vocab_weight = op.weights.vocab;
  in.normalizer = op.weights.normalizer;
  in.fault = op.fault;
  in.options = op.options;
  in.vocab = vocab;
  if constexpr (requires { op.grad_loss; }) {
    in.gradients = true;
    in.grad_loss = op.grad_loss;
    in.per_row_upstream = op.options.reduction == Reduction::none && op.grad_loss;
  }
  if constexpr (requires { op.grad_lse; }) {
    in.grad_lse = op.grad_lse;
    in.grad_target_logit = op.grad_target_logit;
    in.grad_entropy = op.grad_entropy;
    in.statistics_gradients = op.grad_lse || op.grad_target_logit || op.grad_entropy;
  }
  return in;
}

}  // namespace logitless::cuda
