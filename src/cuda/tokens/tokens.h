// SPDX-License-Identifier: Apache-2.0
// Prepares the tokens of a call on the device: which count, their compacted order, the divisor of
// the mean, and the factor common to all gradients. The host does not know the number of valid
// tokens; later kernels read it from `scalars`. src/cpu/tokens.h has the same quantities.
#pragma once

#include "src/call.h"
#include "src/cuda/runtime/runtime.h"
#include "src/cuda/tokens/arrays.h"

namespace logitless::cuda {

// An op's inputs per token; views that the op does not have are absent.
struct TokenInput {
  TensorView target, token_weight, vocab_weight, normalizer, temperature, fault;
  TensorView grad_loss, grad_lse, grad_target_logit, grad_entropy;
  LossOptions options;
  int64_t vocab = 0;  // V of the views
  bool gradients = false;
  bool per_row_upstream = false;  // grad_loss is [N]
  bool statistics_gradients = false;
  bool skips_inactive = false;  // Backward leaves out tokens whose upstream gradients are all 0
  bool makes_maps = false;      // each token has a TokenMap
  const float* chosen_sizes = nullptr;  // [N]  sum of |gradient| of a token's chosen columns
  // dz of f16 is stored times this, so that small values keep their bits: 64, or what a
  // divergence's bound of dz allows.
  float lift = 1;
  // dz may be 1 + beyond times as large as the token's weight suggests.
  float beyond = 0;
  // Whether some tokens may have a gradient while others have none.
  constexpr bool screens_gradients() const {
    return skips_inactive && (per_row_upstream || token_weight || statistics_gradients);
  }
  constexpr int64_t whole() const { return options.vocab_total > 0 ? options.vocab_total : vocab; }
  constexpr int64_t start() const { return options.vocab_total > 0 ? options.vocab_start : 0; }
};

inline int64_t token_blocks(int64_t tokens) {
  return tokens > one_launch_tokens ? blocks_for(tokens, tokens_per_block) : 1;
}
// Which arrays of Tokens are needed: `inactive` and `maps` depend on the input, `places` on the
// caller.
struct TokenArrays {
  bool inactive = false, maps = false, places = false;
};
Tokens place_tokens(Arena* arena, int64_t tokens, const TokenArrays& arrays);
// Moves tokens to the positions of their rows in kept E. A token whose row is not among the first
// scalars->valid takes the position of a token without a gradient. `from` and `to` share all arrays
// except the compacted ones.
void arrange_tokens(const Tokens& from, const Tokens& to, Stream* stream);

// The caller's outputs per token: the loss (per token, or reduced in a fixed order) and the
// statistics.
struct TokenOutputs {
  TensorView loss;
  TokenStatistics statistics;
};
// Top-k lists, [N, k], or the shards' lists, [P, N k].
struct TopLists {
  TensorView logits, ids;
  explicit operator bool() const { return static_cast<bool>(logits); }
};
// top.cu: writes empty lists for all tokens, or merges the shards' lists.
void clear_lists(const TopLists& lists, Stream* stream);
void combine_lists(const TokenInput& in, const TopLists& shards, const TopLists& to,
                   Stream* stream);

inline TokenOutputs token_outputs(const Call& call) {
  if (!call.forward) return {};
  return {call.loss, call.statistics()};
}

// Finds which tokens have no gradient, and computes each token's map, if these arrays exist.
// prepare_tokens calls it first; a second head has its own maps.
void screen_tokens(const TokenInput& input, const Tokens& tokens, Stream* stream);

// Enqueues the preparation; counting takes one launch up to one_launch_tokens, else 2 or 3. Checks
// the targets' range, which may set `fault`, and writes the outputs of tokens that do not count: 0,
// or NaN for a target out of range.
void prepare_tokens(const TokenInput& input, const Tokens& tokens, const TokenOutputs& outputs,
                    Stream* stream);

// Reduces `losses` [N] to the loss; does nothing if the loss is absent or per token. If `early`,
// the previous kernel allows an early launch (early.cuh).
void write_loss(const TokenInput& input, const Tokens& tokens, const float* losses,
                const TensorView& loss, Stream* stream, bool early = false);

// Sets the gradient rows [N, columns] of tokens that are not compacted to exactly 0.
void clear_other_rows(const Tokens& tokens, const TensorView& gradient, Stream* stream);

inline TokenInput token_input(const Call& call) {
  TokenInput in;
  in.target = call.target;
  in.token_weight = call.token_weight;
  in.vocab_weight = call.vocab_weight;
  in.normalizer = call.normalizer;
  in.temperature = call.temperature;
  in.makes_maps = static_cast<bool>(call.temperature);
  in.fault = call.fault;
  in.options = call.options;
  in.vocab = call.vocab();
  in.gradients = call.gradients;
  in.grad_loss = call.grad_loss;
  in.per_row_upstream = call.options.reduction == Reduction::none && call.grad_loss;
  in.grad_lse = call.grad_lse;
  in.grad_target_logit = call.grad_target_logit;
  in.grad_entropy = call.grad_entropy;
  in.statistics_gradients =
      call.grad_lse || call.grad_target_logit || call.grad_entropy || call.grad_logits_at;
  in.skips_inactive = call.gradients && !call.forward;
  if (!call.target) in.options.ignore_index = -1;
  return in;
}

}  // namespace logitless::cuda
