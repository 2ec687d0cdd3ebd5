// SPDX-License-Identifier: Apache-2.0
// These launch the kernels of the divergences.
#pragma once

#include "src/cuda/divergence/arrays.h"
#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

// states.cu makes both heads' states of a chunk's rows, `states` [N] compacted, from the sums of
// stored logits.
void divergence_states(const Chunk& chunk, const Partials& student, const Partials& teacher,
                       DivergenceState* states, Stream* stream);
// whole_rows.cu makes of whole rows the outputs, the states where they are asked for, and dz where
// there is a panel, of `rows` rows: those behind the chunk's become 0.
void divergence_rows(DivergenceRows rows, DivergenceKind kind, int64_t launched,
                     const DeviceInfo& device, Stream* stream);
// Writes the states [N] of rows that are given them, without a look at their logits.
void divergence_given_states(const DivergenceRows& rows, Stream* stream);
// some_columns.cu makes dz of some columns, with the states known.
void divergence_block(const DivergenceRows& rows, DivergenceKind kind, int64_t launched,
                      Stream* stream);

// What a Backward makes of dz that a Forward has kept, by token.
struct KeptFactors {
  TokenInput in;
  Tokens tokens;           // as they are compacted
  Tokens ordered;          // each token in its own place; all count, those without gradient as 0
  RowFactors* factors;     // [N]  what grad_weight's input and grad_input's sums are multiplied by
  float* scales;           // [N]  what dz is multiplied by where it is made again; or null
  const float* kept_rows;  // [N, 8]
  float layout, slope, lift;
  int64_t vocab;
  bool alike;  // every token with a gradient has the same factor, which leaves them 1
};
void kept_factors(const KeptFactors& arguments, Stream* stream);
// Copies rows of input times their factors, in the tokens' own order, with zeros behind them.
void gather_scaled(const TensorView& input, const RowFactors* factors, int64_t rows, int64_t pitch,
                   char* to, Stream* stream);
// Copies rows of a panel times `scales`.
void scale_panel(DType dtype, const Panel& from, const float* scales, int64_t tokens, int64_t rows,
                 const Panel& to, Stream* stream);

}  // namespace logitless::cuda
