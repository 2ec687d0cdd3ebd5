// SPDX-License-Identifier: Apache-2.0
// The size of what Forward keeps for Backward, by the formula of docs/semantics.md, "Kept state":
//   kept       [blocks, rows, 64]  blocks of 64 columns of the vocabulary, its first ones; rows:
//   the
//                                  tokens, to a multiple of 64
//   kept_rows  [N, 8]              each token's state
// How a backend divides the bytes of `kept` is its own.
#pragma once

#include "src/call.h"
#include "src/rounding.h"

namespace logitless {

inline constexpr int64_t kept_block = 64;       // columns, and what rows are rounded up to
inline constexpr int64_t kept_row_width = 8;    // f32 of a token
inline constexpr int64_t kept_group = 3;        // blocks that a share consists of whole ones of
inline constexpr uint64_t kept_alignment = 16;  // bytes, of the address
inline constexpr uint64_t kept_binding = 256;   // and of an offset in a WebGPU buffer

// Where a token's state lies in its row of kept_rows; what is not named is 0.
struct KeptRow {
  float reference;     // m
  float log_sum;       // log sum_j exp(z_j - m)
  float target_logit;  // z_t, or what E is relative to
  float rest;          // 1 - p_t
  float overwritten;   // not 0: Backward has made other things of the row's E
  float layout;        // whose the bytes of `kept` are: an engine's number
  float columns;       // how many are kept, of those that there is room for
  float unused;
};
static_assert(sizeof(KeptRow) == kept_row_width * sizeof(float));

inline int64_t kept_rows_of(int64_t tokens) { return round_up(tokens, kept_block); }
// Columns that a tensor of the op has room for; 0 where none is given.
inline int64_t kept_columns(const Call& call) {
  if (!call.kept || call.tokens() <= 0) return 0;
  const int64_t blocks = call.kept.shape[0] / kept_rows_of(call.tokens());
  return blocks * kept_block < call.vocab() ? blocks * kept_block : call.vocab();
}

// What a Forward keeps in so many bytes; the call's own tensors are not looked at.
Kept kept_in(const Call& call, uint64_t bytes);
// What tells a Forward from one whose state would be another: its shape, device and options.
uint64_t kept_key(const Call& call, int64_t columns);

}  // namespace logitless
