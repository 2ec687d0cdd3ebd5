// SPDX-License-Identifier: Apache-2.0
// These functions size what Forward keeps for Backward, by the formula of docs/semantics.md, "Kept
// state":
//   kept       [blocks, rows, 64]  blocks of 64 columns of the vocabulary, its first ones;
//                                  rows: the tokens, to a multiple of 64
//   kept_rows  [N, 8]              each token's state
// How a backend divides the bytes of `kept` is its own.
#pragma once

#include "src/call.h"
#include "src/rounding.h"

namespace logitless {

// A block has so many columns, and rows are rounded up to as many.
inline constexpr int64_t kept_block = 64;
inline constexpr int64_t kept_row_width = 8;  // a token has so many f32
inline constexpr int64_t kept_group = 3;      // a share consists of whole groups of so many blocks
inline constexpr uint64_t kept_alignment = 16;  // the address is a multiple of so many bytes
// An offset in a WebGPU buffer is a multiple of it too.
inline constexpr uint64_t kept_binding = 256;

// A token's state lies in its row of kept_rows like this; the places not named are 0.
struct KeptRow {
  float reference;     // it is m; of a shard its own, as log_sum is
  float log_sum;       // it is log sum_j exp(z_j - m)
  float target_logit;  // it is z_t, or what E is relative to
  float rest;          // it is 1 - p_t
  float overwritten;   // if not 0, Backward has made other things of the row's E
  float layout;        // an engine's number says whose layout the bytes of `kept` have
  float columns;       // so many are kept, of those that there is room for
  float unused;
};
static_assert(sizeof(KeptRow) == kept_row_width * sizeof(float));

// A shard's lse passes that of the whole vocabulary by rounding alone: no more than this.
inline constexpr float kept_tolerance = 1e-3f;

inline int64_t kept_rows_of(int64_t tokens) { return round_up(tokens, kept_block); }
// Returns how many columns a tensor of the op has room for, or 0 where none is given.
inline int64_t kept_columns(const Call& call) {
  if (!call.kept || call.tokens() <= 0) return 0;
  const int64_t blocks = call.kept.shape[0] / kept_rows_of(call.tokens());
  return blocks * kept_block < call.vocab() ? blocks * kept_block : call.vocab();
}

// Returns what a Forward keeps in so many bytes; it does not look at the call's own tensors.
Kept kept_in(const Call& call, uint64_t bytes);
// Returns a key that tells a Forward from one whose state would be another, by its shape, device
// and options.
uint64_t kept_key(const Call& call, int64_t columns);

}  // namespace logitless
