// SPDX-License-Identifier: Apache-2.0
// Rows of given logits [N, V]. One launch makes the state of every row (maximum, log of the sum,
// statistics) and writes its output row (gradient or probabilities) from the same read of the row;
// gradient rows of tokens that do not count are cleared. How a row is cut, and so its bits, depends
// on V and its dtype alone.
#pragma once

#include "src/cuda/runtime/runtime.h"
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

struct RowsCall {
  TensorView logits;  // [N, V]
  TensorView output;  // [N, V]  may be `logits` itself; absent: only states are made
  TokenInput in;      // in.vocab_weight: c_j of label smoothing and of the weighted sum
  // Of prepared tokens; null: `output` is the softmax.
  const TokenScalars* scalars = nullptr;
  const uint8_t* inactive = nullptr;  // [N]  of prepared tokens
  const TokenMap* map = nullptr;      // [N]
  TokenOutputs outputs;
  // [N]  of tokens that count, where outputs.loss is reduced
  float* losses = nullptr;
  // [N]  if given they are used, and no state is made
  TensorView row_reference, row_log_sum;
  TensorView entropy;  // [N]  for the gradient's entropy term
  SumSet wants{};
};

// A row has at least one block of the grid, and columns are counted in 32 bits.
constexpr int64_t most_rows = (int64_t{1} << 28) - 1, most_columns = int64_t{1} << 30;
Status check_row_extents(const TensorView& logits);

// Launches the rows, directly behind the preparation of the tokens if there is one. Returns whether
// what follows may be launched early (early.cuh).
bool launch_rows(const RowsCall& call, const DeviceInfo& device, Stream* stream);

// For probabilities as input: the losses of tokens that count, to `losses` [N] or if that is null
// to `loss`; and the gradient rows. The losses must be launched first if the gradient overwrites
// the probabilities.
void launch_probability_losses(const TensorView& probabilities, const TokenInput& in,
                               const Tokens& tokens, float* losses, const TensorView& loss,
                               Stream* stream);
void launch_probability_gradient(const TensorView& probabilities, const TensorView& gradient,
                                 const TokenInput& in, const Tokens& tokens, Stream* stream);

}  // namespace logitless::cuda
