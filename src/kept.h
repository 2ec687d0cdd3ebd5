// SPDX-License-Identifier: Apache-2.0
// The size of what Forward keeps for Backward (docs/semantics.md, "Kept state"):
//   kept       [blocks, rows, 64]  blocks of 64 columns of the vocabulary, from its first; rows is
//                                  the number of tokens rounded up to a multiple of 64
//   kept_rows  [N, 8]              each token's state
// Each backend has its own layout of the bytes of `kept`. A divergence's shard on CUDA keeps f32
// logits of both heads (of the student, if the teacher's are given), so it has more blocks.
#pragma once

#include "src/call.h"
#include "src/rounding.h"

namespace logitless {

// Columns of a block; rows are rounded up to a multiple of it.
inline constexpr int64_t kept_block = 64;
inline constexpr int64_t kept_row_width = 8;  // floats per row of kept_rows
// If a part of the vocabulary is kept, its number of blocks is a multiple of this.
inline constexpr int64_t kept_group = 3;
inline constexpr uint64_t kept_alignment = 16;  // bytes
// Bytes, of the offset of `kept` in a WebGPU buffer.
inline constexpr uint64_t kept_binding = 256;

// A token's row of kept_rows.
struct KeptRow {
  float reference;     // m; like log_sum, of the shard alone
  float log_sum;       // log sum_j exp(z_j - m)
  float target_logit;  // z_t, or the anchor that E is relative to
  // 1 - p_t, on WebGPU 0; of a divergence, what divided its row of `kept`, or of its shard the row
  float rest;
  float overwritten;  // not 0: the row's E is too coarse, or Backward overwrote it
  float layout;       // identifies the layout of `kept`
  float columns;      // the number of columns kept
  float unused;
};
static_assert(sizeof(KeptRow) == kept_row_width * sizeof(float));

// A shard's lse may exceed that of the whole vocabulary only by rounding, at most by this.
inline constexpr float kept_tolerance = 1e-3f;

inline int64_t kept_rows_of(int64_t tokens) { return round_up(tokens, kept_block); }
inline bool keeps_logits(const Call& call) {
  return call.diverges && call.shard() && call.execution.device.type == DeviceType::cuda;
}
// The number of blocks if the whole vocabulary is kept.
inline int64_t kept_blocks(const Call& call) {
  const int64_t heads = call.teacher_logits ? 1 : 2;
  const int64_t words = keeps_logits(call) ? heads * 4 / size_of(call.input.dtype) : 1;
  return divide_up(call.vocab(), kept_block) * words;
}
// Returns how many columns the op's `kept` has room for; 0 without `kept`.
inline int64_t kept_columns(const Call& call) {
  if (!call.kept || call.tokens() <= 0) return 0;
  const int64_t blocks = call.kept.shape[0] / kept_rows_of(call.tokens());
  return blocks * kept_block < call.vocab() ? blocks * kept_block : call.vocab();
}

// Returns what a Forward keeps in `bytes`, whichever tensors the call has.
Kept kept_in(const Call& call, uint64_t bytes);
// A hash of what the state depends on besides the tensors' values: shape, dtype, device, options.
uint64_t kept_key(const Call& call, int64_t columns);

}  // namespace logitless
