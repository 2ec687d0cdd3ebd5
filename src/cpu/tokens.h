// SPDX-License-Identifier: Apache-2.0
// The tokens of a call: which count, in which order they are compacted, what the mean divides by,
// and each row's upstream gradient. Shared by every CPU op with a target.
#pragma once

#include "logitless/logitless.h"
#include "src/loss.h"

namespace logitless::cpu {

// Lives in the workspace; arrays are [N] long, the first `valid` entries used.
struct Tokens {
  int64_t total = 0;  // N
  int64_t valid = 0;
  int64_t* row = nullptr;  // [valid]  index of the token, ascending
  int64_t* target =
      nullptr;  // [valid]  column in the views; -1: on another shard of the vocabulary
  float* target_weight = nullptr;  // [valid]  c_t
  float* token_weight = nullptr;   // [valid]  a_i
  float* upstream = nullptr;       // [valid]  g_i / gradient_scale; only where the op has gradients
  LossConstants constants{};
  // The factor left out of every row's gradient and multiplied to the f32 sums before their one
  // rounding: grad_loss / normalizer for sum and mean, max |g_i| for none (and of the statistics'
  // gradients too).
  float gradient_scale = 1;
  float inv_gradient_scale = 1;  // 0 where gradient_scale is 0
  float loss_scale = 1;          // 1 / normalizer for mean, 1 for sum
  bool empty_mean = false;       // reduction mean and a normalizer of exactly 0
};

// Bytes of workspace for N tokens, a multiple of 64.
uint64_t tokens_bytes(int64_t tokens);

// Reads targets, weights and upstream gradients of any loss op. Fails with target_out_of_range
// before anything is written (out_of_range = error). `vocab` is the view's V.
template <class Op>
Status prepare_tokens(const Op& op, int64_t vocab, void* memory, Tokens* tokens);

// loss (none: per token, ignored ones 0; sum, mean: reduced in fixed order) and statistics, from
// the compacted rows. states: [valid].  Also fills what ignored tokens get.
struct TokenOutputs {
  const TensorView& loss;
  const TokenStatistics& statistics;
  const LossOptions& options;
};
void write_tokens(const Tokens& tokens, const RowState* states, const TokenOutputs& outputs);

// Element i of an f32 (or i32/i64) vector view with any stride.
inline float f32_at(const TensorView& v, int64_t i) { return v.as<const float>()[i * v.stride[0]]; }
inline int64_t int_at(const TensorView& v, int64_t i) {
  return v.dtype == DType::i64 ? v.as<const int64_t>()[i * v.stride[0]]
                               : v.as<const int32_t>()[i * v.stride[0]];
}

}  // namespace logitless::cpu
