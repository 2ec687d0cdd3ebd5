// SPDX-License-Identifier: Apache-2.0
// Device arrays that the kernels of divergences read and write.
#pragma once

#include "logitless/ops.h"
#include "src/cuda/linear/arrays.h"
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

// A head's raw logits for a chunk of tokens: computed in the workspace or in `kept`, or given by
// the caller.
struct HeadLogits {
  const float* made = nullptr;  // [rows, pitch], pitch a multiple of 16 bytes; null: `given`
  int64_t pitch = 0;
  TensorView given{};  // [N, V]  by token
  TensorView bias{};   // [V]
  MapFactors map{};
  const TokenMap* maps = nullptr;  // [N]  if each token has its own map, else null
};

// Per row: both heads' states, apart = lse - lse', the mean that dz subtracts, and the factors that
// turn exponentials relative to the references into p and q.
struct DivergenceState {
  float reference, log_sum;
  float teacher_reference, teacher_log_sum;
  float apart, mean;
  float inverse, teacher_inverse;
};

// What a shard of the vocabulary writes for the other shards, per token. The states are the shard's
// own or, if `given`, those of the whole vocabulary.
struct DivergenceOfShard {
  bool given = false;
  DivergenceStates states{};
  TensorView target_logit{}, divergence_sum{}, slope_sum{};  // outputs
  TensorView slope_mean{};                                   // input, if dz subtracts a mean
};

// Receives dz times the student's slope; rows without a token become zeros.
struct DivergencePanel {
  char* data = nullptr;  // [rows, pitch]  null: dz is not computed
  int64_t pitch = 0;
  int32_t columns = 0;  // from the first of the launch's columns
  DType dtype = DType::f32;
  // If kept_rows is set, dz is kept for another call: rows are indexed by token and multiplied by
  // `lift`, not by upstream gradients. A row that is not finite becomes zeros and is marked.
  float* kept_rows = nullptr;  // [N, 8]
  float lift = 1, layout = 0;
};

// A launch over columns [first, first + columns) of a chunk's rows.
struct DivergenceRows {
  TokenInput in{};
  Chunk chunk{};
  HeadLogits student{}, teacher{};
  int64_t first = 0;
  int32_t columns = 0;
  int32_t blocks = 1;  // the blocks that share a row
  float beta = 0, label_weight = 0;
  bool has_target = false, has_outputs = false;
  bool has_statistics = false;  // any statistic that is a sum over columns
  float* losses = nullptr;      // [N]  by token, if losses are reduced; else null
  TensorView loss{};            // [N]
  DivergenceStatistics statistics{};
  DivergenceOfShard shard{};
  bool sums_columns = true;           // whether an output or dz needs sums over the columns
  DivergenceState* states = nullptr;  // [N]  compacted, if known or kept; else null
  bool has_states = false;            // all fields but `mean` are known
  DivergencePanel dz{};
  // [N] compacted: each token's row of a shard's kept logits, -1 if there is none. Null: the logits
  // are in the chunk's order.
  const int32_t* logit_rows = nullptr;
};

}  // namespace logitless::cuda
