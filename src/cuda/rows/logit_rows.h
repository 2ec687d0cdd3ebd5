// SPDX-License-Identifier: Apache-2.0
// Rows of given logits [N, V]. One launch computes the state of every row (maximum, log of the sum,
// statistics) and its output row (gradient or probabilities), from one read if the row fits into
// shared memory; gradient rows of tokens that do not count or are inactive are cleared. How a row
// is divided, and so its bits, depends only on V, the dtype and the device.
#pragma once

#include "src/cuda/runtime/runtime.h"
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

struct RowsCall {
  TensorView logits;  // [N, V]
  TensorView output;  // [N, V]  may be `logits` itself; absent: only states are computed
  TokenInput in;      // in.vocab_weight: c_j of label smoothing and of the weighted sum
  // Scalars of the compacted tokens; null: `output` is the softmax.
  const TokenScalars* scalars = nullptr;
  const uint8_t* inactive = nullptr;  // [N]  Tokens::inactive
  const TokenMap* map = nullptr;      // [N]
  TokenOutputs outputs;
  // [N] of tokens that count, if outputs.loss is reduced
  float* losses = nullptr;
  // [N] the state, if it is given rather than computed
  TensorView row_reference, row_log_sum;
  TensorView entropy;  // [N]  for the gradient's entropy term
  SumSet wants{};
};

// A grid has up to 2^31 - 1 blocks and a row takes up to eight (most_row_blocks); columns are
// counted in 32 bits, with room for those of the last tiles.
constexpr int64_t most_rows = (int64_t{1} << 28) - 1, most_columns = int64_t{1} << 30;
Status check_row_extents(const TensorView& logits);

// Launches the rows, directly after the compaction of tokens if there is one. Returns whether the
// next kernel may be launched early (early.cuh).
bool launch_rows(const RowsCall& call, const DeviceInfo& device, Stream* stream);

// For probabilities as input. The losses of tokens that count go to `losses` [N] or, if that is
// null, to `loss`. They must be launched before the gradient rows if these overwrite the
// probabilities.
void launch_probability_losses(const TensorView& probabilities, const TokenInput& in,
                               const Tokens& tokens, float* losses, const TensorView& loss,
                               Stream* stream);
void launch_probability_gradient(const TensorView& probabilities, const TensorView& gradient,
                                 const TokenInput& in, const Tokens& tokens, Stream* stream);

}  // namespace logitless::cuda
