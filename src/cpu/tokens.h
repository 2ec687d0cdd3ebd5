// SPDX-License-Identifier: Apache-2.0
// The tokens of a call: which count, in which order they are compacted, what the mean divides by,
// and each row's upstream gradient. Shared by every CPU op with a target.
#pragma once

#include <algorithm>

#include "src/call.h"
#include "src/cpu/row_kernels.h"

namespace logitless::cpu {

// Arrays of a workspace begin at multiples of 64 bytes.
constexpr uint64_t padded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Element i of an f32 (or i32/i64) vector view with any stride.
inline float f32_at(const TensorView& v, int64_t i) { return v.as<const float>()[i * v.stride[0]]; }
inline int64_t int_at(const TensorView& v, int64_t i) {
  return v.dtype == DType::i64 ? v.as<const int64_t>()[i * v.stride[0]]
                               : v.as<const int32_t>()[i * v.stride[0]];
}

// Lives in the workspace; arrays are [N] long, the first `valid` entries used. Backward leaves out
// tokens without a gradient once the normalizer has counted them.
struct Tokens {
  int64_t total = 0;               // N
  int64_t valid = 0;               // those that count, and in Backward are active
  int64_t* row = nullptr;          // [valid]  index of the token, ascending
  int64_t* target = nullptr;       // [valid]  column in the views; -1: on another shard
  float* target_weight = nullptr;  // [valid]  c_t
  float* token_weight = nullptr;   // [valid]  a_i
  float* upstream = nullptr;       // [valid]  g_i / gradient_scale; only where the op has gradients
  int64_t* place = nullptr;        // [valid]  index among those that count; only with places()
  LossConstants constants{};
  float gradient_scale = 1;      // see GradientScale
  float inv_gradient_scale = 1;  // 0 where gradient_scale is 0
  float loss_scale = 1;          // 1 / normalizer for mean, 1 for sum
  double normalizer = 1;         // of mean
  TensorView temperature{};      // [N]; absent: the call's number
  bool bad_temperature = false;  // some of a token here is none that a number may be
  bool empty_mean = false;       // reduction mean and a normalizer of exactly 0
};

// The map of compacted token k, all NaN where its temperature may be no number's; `map` is the
// call's.
LogitMap map_of(const LogitMap& map, const Tokens& tokens, int64_t k);

// Backward finds what Forward kept of a token by its place.
inline bool places(const Call& call) { return !call.forward && call.kept; }
// Bytes of workspace for N tokens, a multiple of 64.
uint64_t tokens_bytes(int64_t tokens, bool with_places = false);

// Reads targets, weights, temperatures and upstream gradients of any loss call. Fails with
// target_out_of_range before anything is written (out_of_range = error). `vocab` is the view's V.
// A bad temperature sets the call's `fault`.
Status prepare_tokens(const Call& call, int64_t vocab, void* memory, Tokens* tokens);

// A call may ask more of its rows than the loss.
BlockWants wants_of(const Call& call);

// loss (none: per token, ignored ones 0; sum, mean: reduced in fixed order) and statistics, from
// the compacted rows. states: [valid].  Also fills what ignored tokens get.
struct TokenOutputs {
  const TensorView& loss;
  const TokenStatistics& statistics;
  const LossOptions& options;
  const MoreStatistics* more = nullptr;  // [valid]; null: none is asked for
};
void write_tokens(const Tokens& tokens, const RowState* states, const TokenOutputs& outputs);

// The loss alone, from the compacted tokens' own: losses [valid].
void write_losses(const Tokens& tokens, const float* losses, const TensorView& loss,
                  const LossOptions& options);

// The first compacted index whose token is `row` or a later one.
inline int64_t first_at_or_after(const Tokens& tokens, int64_t row) {
  return std::lower_bound(tokens.row, tokens.row + tokens.valid, row) - tokens.row;
}

// The coefficients of dz of compacted token k, relative to gradient_scale, from its finished state.
inline RowGradient token_gradient(const Call& call, const Tokens& tokens, int64_t k,
                                  const RowState& state) {
  float grad_lse = 0, grad_target_logit = 0, grad_entropy = 0;
  if (!call.forward) {
    const int64_t i = tokens.row[k];
    const float scale = tokens.inv_gradient_scale;
    if (call.grad_lse) grad_lse = f32_at(call.grad_lse, i) * scale;
    if (call.grad_target_logit) grad_target_logit = f32_at(call.grad_target_logit, i) * scale;
    if (call.grad_entropy) grad_entropy = f32_at(call.grad_entropy, i) * scale;
  }
  return row_gradient(tokens.constants, state, tokens.target_weight[k], tokens.token_weight[k],
                      tokens.upstream[k], grad_lse, grad_target_logit, grad_entropy);
}

}  // namespace logitless::cpu
