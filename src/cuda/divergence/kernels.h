// SPDX-License-Identifier: Apache-2.0
// Launches of the divergences' kernels.
#pragma once

#include "src/cuda/divergence/arrays.h"
#include "src/cuda/linear/linear.h"
#include "src/kept.h"

namespace logitless::cuda {

// states.cu: both heads' states of a chunk's rows, `states` [N] by compacted index, from the sums
// of stored logits.
void divergence_states(const Chunk& chunk, const Partials& student, const Partials& teacher,
                       DivergenceState* states, Stream* stream);
// whole_rows.cu: reads whole rows and writes the outputs, the states if asked for, and dz of
// `launched` rows if there is a panel; dz of rows after the chunk's becomes 0.
void divergence_rows(DivergenceRows rows, DivergenceKind kind, int64_t launched,
                     const DeviceInfo& device, Stream* stream);
// Writes the states [N] of rows whose states are given, without reading their logits.
void divergence_given_states(const DivergenceRows& rows, Stream* stream);
// some_columns.cu: dz of some columns, with known states.
void divergence_block(const DivergenceRows& rows, DivergenceKind kind, int64_t launched,
                      Stream* stream);

// A shard's Forward keeps the logits in its own order of the tokens, and notes each token's row in
// kept_rows [N].
void note_logit_rows(const Chunk& all, KeptRow* kept_rows, int64_t vocab, Stream* stream);
// Finds the rows of a later call's tokens, -1 where none was noted; the fault word is then set.
void find_logit_rows(const TokenInput& in, const Chunk& all, const KeptRow* kept_rows,
                     int64_t vocab, int32_t* logit_rows, Stream* stream);

// The factors of a Backward from kept dz, by token.
struct KeptFactors {
  TokenInput in;
  Tokens tokens;           // compacted
  Tokens ordered;          // all tokens, in their own order; some with factor 0
  RowFactors* factors;     // [N]  for grad_weight's input and grad_input's sums
  float* scales;           // [N]  for dz if it is copied, else null
  const float* kept_rows;  // [N, 8]
  float layout, slope, lift;
  int64_t vocab;
  bool alike;  // all tokens with a gradient share one factor, so that factors are 0 or 1
};
void kept_factors(const KeptFactors& arguments, Stream* stream);
// Copies rows of input times their factors, in the tokens' own order, followed by zero rows.
void gather_scaled(const TensorView& input, const RowFactors* factors, int64_t rows, int64_t pitch,
                   char* to, Stream* stream);
// Copies rows of a panel times `scales`.
void scale_panel(DType dtype, const Panel& from, const float* scales, int64_t tokens, int64_t rows,
                 const Panel& to, Stream* stream);

}  // namespace logitless::cuda
