// SPDX-License-Identifier: Apache-2.0
// The tokens of a call, for every CPU op but Softmax: which count, their compacted order, the
// divisor of the mean, and each row's upstream gradient.
#pragma once

#include <algorithm>

#include "src/call.h"
#include "src/cpu/row_kernels.h"

namespace logitless::cpu {

// Arrays in the workspace start at multiples of 64 bytes.
constexpr uint64_t padded(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// Access to vectors with any stride.
inline float f32_at(const TensorView& v, int64_t i) { return v.as<const float>()[i * v.stride[0]]; }
inline void write_f32(const TensorView& v, int64_t i, float value) {
  v.as<float>()[i * v.stride[0]] = value;
}
inline int64_t int_at(const TensorView& v, int64_t i) {
  return v.dtype == DType::i64 ? v.as<const int64_t>()[i * v.stride[0]]
                               : v.as<const int32_t>()[i * v.stride[0]];
}

// A head's temperatures per token.
struct Temperatures {
  TensorView view{};    // [N]  absent: options.temperature
  bool is_bad = false;  // some token's temperature is invalid
};

// Arrays in the workspace, [N] long, whose first `valid` entries are used. Backward leaves out
// tokens without a gradient after counting them in the normalizer.
struct Tokens {
  int64_t total = 0;       // N
  int64_t valid = 0;       // tokens that count, and in Backward are active
  int64_t* row = nullptr;  // [valid]  their indices, ascending
  // [valid] a column of the views; -1 if it is in another shard or there is no target
  int64_t* target = nullptr;
  float* target_weight = nullptr;  // [valid]  c_t
  float* token_weight = nullptr;   // [valid]  a_i
  // [valid]  g_i / gradient_scale, only in ops with gradients
  float* upstream = nullptr;
  int64_t* place = nullptr;  // [valid]  index among tokens that count; only with places()
  LossConstants constants{};
  float gradient_scale = 1;      // GradientScale::scale
  float inv_gradient_scale = 1;  // 0 if gradient_scale is 0
  double normalizer = 1;         // the divisor of the mean
  Temperatures temperature{}, teacher_temperature{};
  bool empty_mean = false;  // the reduction is mean and the normalizer exactly 0
};

// Returns a token's map, which gives NaN if its temperature is invalid. `map` is the call's.
LogitMap map_of(const LogitMap& map, const Temperatures& temperature, int64_t row);
inline LogitMap map_of(const LogitMap& map, const Tokens& tokens, int64_t k) {
  return tokens.temperature.view ? map_of(map, tokens.temperature, tokens.row[k]) : map;
}

// Whether Backward finds a token's kept state by Tokens::place.
inline bool places(const Call& call) { return !call.forward && call.kept; }
// Bytes of workspace for N tokens, a multiple of 64.
uint64_t tokens_bytes(int64_t tokens, bool with_places = false);

// Reads targets, weights, temperatures and upstream gradients of any loss call. With out_of_range =
// error, fails with target_out_of_range before anything is written. `vocab` is V of the views. An
// invalid temperature sets the call's `fault`.
Status prepare_tokens(const Call& call, int64_t vocab, void* memory, Tokens* tokens);

// Writes the loss (none: per token, 0 if ignored; sum, mean: reduced in a fixed order) and the
// statistics, from the compacted rows' states [valid] and `rare` [valid], null if none is asked
// for. Writes the values of tokens that do not count too.
void write_tokens(const Call& call, const Tokens& tokens, const RowState* states,
                  const RareStatistics* rare);

// Writes the loss alone, from the compacted tokens' own losses [valid].
void write_losses(const Tokens& tokens, const float* losses, const TensorView& loss,
                  const LossOptions& options);

// Calls f(i) for every token that is not compacted.
template <class F>
void for_each_other(const Tokens& tokens, const F& f) {
  for (int64_t i = 0, next = 0; i < tokens.total; ++i) {
    if (next < tokens.valid && tokens.row[next] == i) {
      ++next;
    } else {
      f(i);
    }
  }
}

// Returns the first compacted index whose token is `row` or later.
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
