// SPDX-License-Identifier: Apache-2.0
// Rows are of given logits [N, V]. One launch makes the state of every row (maximum, log of the
// sum, statistics) and writes its output row (gradient or probabilities) from the same read of the
// row; gradient rows of tokens that do not count are cleared.
// How a row is cut depends on V and its dtype alone, and so do its bits.
#pragma once

#include "src/cuda/runtime/runtime.h"
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

struct RowsCall {
  TensorView logits;  // [N, V]
  TensorView output;  // [N, V]  may be `logits` itself; where it is absent, only states are made
  TokenInput in;      // in.vocab_weight is c_j of label smoothing and of the weighted sum
  // It is of prepared tokens; where it is null, `output` is the softmax.
  const TokenScalars* scalars = nullptr;
  const uint8_t* inactive = nullptr;  // [N]  prepared tokens have it
  const TokenMap* map = nullptr;      // [N]
  TokenOutputs outputs;
  // [N]  it gets those of tokens that count, where outputs.loss is reduced
  float* losses = nullptr;
  // [N]  If these are given they are used as they are, and no state is made.
  TensorView row_reference, row_log_sum;
  TensorView entropy;  // [N]  the gradient's entropy term reads it
  SumSet wants{};
};

// A row has at least one block of the grid, and columns are counted in 32 bits.
constexpr int64_t most_rows = (int64_t{1} << 28) - 1, most_columns = int64_t{1} << 30;
Status check_row_extents(const TensorView& logits);

// Launches the rows, right behind the preparation of the tokens where there is one. Returns whether
// what follows may then be launched early (early.cuh).
bool launch_rows(const RowsCall& call, const DeviceInfo& device, Stream* stream);

// Writes the losses of tokens that count, of probabilities as input, to `losses` [N] or, where it
// is null, to `loss`; the other function makes the gradient rows. The losses must be launched first
// where the gradient overwrites the probabilities.
void launch_probability_losses(const TensorView& probabilities, const TokenInput& in,
                               const Tokens& tokens, float* losses, const TensorView& loss,
                               Stream* stream);
void launch_probability_gradient(const TensorView& probabilities, const TensorView& gradient,
                                 const TokenInput& in, const Tokens& tokens, Stream* stream);

}  // namespace logitless::cuda
