// SPDX-License-Identifier: Apache-2.0
// The device arrays of a divergence, as its kernels take them.
#pragma once

#include "logitless/ops.h"
#include "src/cuda/linear/arrays.h"
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

// A head's raw logits for a chunk of tokens: made here, or the caller's.
struct HeadLogits {
  const float* made = nullptr;  // [rows, pitch]  rows a multiple of 16 bytes apart; null: `given`
  int64_t pitch = 0;
  TensorView given{};  // [N, V]  by token
  TensorView bias{};   // [V]
  MapFactors map{};
  const TokenMap* maps = nullptr;  // [N]  where each token has its own map, else null
};

// Per row: both states, apart = lse - lse', the mean that dz subtracts, and the factors that turn
// exponentials relative to the references into p and q.
struct DivergenceState {
  float reference, log_sum;
  float teacher_reference, teacher_log_sum;
  float apart, mean;
  float inverse, teacher_inverse;
};

// What a shard of the vocabulary passes on, by token. The states are the shard's own or, if
// `given`, those of the whole vocabulary.
struct DivergenceOfShard {
  bool given = false;
  DivergenceStates states{};
  TensorView target_logit{}, divergence_sum{}, slope_sum{};  // outputs
  TensorView slope_mean{};                                   // input, where dz has a mean
};

// Where dz times the student's slope goes; tokens without a row get zeros.
struct DivergencePanel {
  char* data = nullptr;  // [rows, pitch]  null: no dz is made
  int64_t pitch = 0;
  int32_t columns = 0;  // the first ones of the launch's columns
  DType dtype = DType::f32;
  // With kept_rows, dz is kept for another call: rows are by token and multiplied by `lift` alone;
  // a row that is not finite becomes zeros, and is marked.
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
  bool has_statistics = false;  // of those that are summed over columns
  float* losses = nullptr;      // [N]  by token; where the losses are reduced, else null
  TensorView loss{};            // [N]
  DivergenceStatistics statistics{};
  DivergenceOfShard shard{};
  bool sums_columns = true;           // anything is made of sums over the columns
  DivergenceState* states = nullptr;  // [N]  compacted; where they are known or kept, else null
  bool has_states = false;            // all but `mean` is known
  DivergencePanel dz{};
};

}  // namespace logitless::cuda
