// SPDX-License-Identifier: Apache-2.0
// The size of what Forward keeps for Backward (docs/semantics.md, "Kept state"):
//   kept       [blocks, rows, 64]  blocks of 64 columns of the vocabulary, from its first; rows is
//                                  the number of tokens rounded up to a multiple of 64
//   kept_rows  [N, 8]              each token's state
// Each backend divides the bytes of `kept` as it likes.
#pragma once

#include "src/call.h"
#include "src/rounding.h"

namespace logitless {

// Columns of a block; rows are rounded up to a multiple of it.
inline constexpr int64_t kept_block = 64;
inline constexpr int64_t kept_row_width = 8;  // floats per token
// In blocks; a part of the vocabulary is kept in whole groups.
inline constexpr int64_t kept_group = 3;
inline constexpr uint64_t kept_alignment = 16;  // bytes
// Also the alignment of an offset in a WebGPU buffer.
inline constexpr uint64_t kept_binding = 256;

// A token's row of kept_rows. What has no name here is 0.
struct KeptRow {
  float reference;     // m; of a shard its own, as log_sum is
  float log_sum;       // log sum_j exp(z_j - m)
  float target_logit;  // z_t, or what E is relative to
  float rest;          // 1 - p_t
  float overwritten;   // not 0: Backward has overwritten the row's E
  float layout;        // the engine whose layout the bytes of `kept` have
  float columns;       // the number kept, at most those that there is room for
  float unused;
};
static_assert(sizeof(KeptRow) == kept_row_width * sizeof(float));

// A shard's lse exceeds that of the whole vocabulary by rounding alone, at most by this.
inline constexpr float kept_tolerance = 1e-3f;

inline int64_t kept_rows_of(int64_t tokens) { return round_up(tokens, kept_block); }
// Returns how many columns the op's `kept` has room for, or 0 without one.
inline int64_t kept_columns(const Call& call) {
  if (!call.kept || call.tokens() <= 0) return 0;
  const int64_t blocks = call.kept.shape[0] / kept_rows_of(call.tokens());
  return blocks * kept_block < call.vocab() ? blocks * kept_block : call.vocab();
}

// Returns what a Forward keeps in `bytes`, whatever tensors the call has.
Kept kept_in(const Call& call, uint64_t bytes);
// Distinguishes Forwards whose state differs: a hash of shape, device and options.
uint64_t kept_key(const Call& call, int64_t columns);

}  // namespace logitless
