// SPDX-License-Identifier: Apache-2.0
// These are the device arrays of a divergence as its kernels take them.
#pragma once

#include "logitless/ops.h"
#include "src/cuda/linear/arrays.h"
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

// A head's logits of a chunk of tokens, raw: made here, or the caller's.
struct HeadLogits {
  const float* made = nullptr;  // [rows, pitch]  a multiple of 16 bytes apart; null: `given`
  int64_t pitch = 0;
  TensorView given{};  // [N, V]  by token
  TensorView bias{};   // [V]
  MapFactors map{};
  const TokenMap* maps = nullptr;  // [N]  there where each token has a map of its own
};

// dz of a row needs this: both states, lse - lse' of these, the mean that is subtracted, and what
// the exponentials relative to the references are multiplied by to be p and q.
struct DivergenceState {
  float reference, log_sum;
  float teacher_reference, teacher_log_sum;
  float apart, mean;
  float inverse, teacher_inverse;
};

// What a shard of the vocabulary hands on, by token: the states are its own, or `given`, those of
// the whole vocabulary.
struct DivergenceOfShard {
  bool given = false;
  DivergenceStates states{};
  TensorView target_logit{}, divergence_sum{}, slope_sum{};  // outputs
  TensorView slope_mean{};                                   // given where dz has a mean
};

// Where dz goes, times the student's slope; zeros go where no token has a row.
struct DivergencePanel {
  char* data = nullptr;  // [rows, pitch]  null where no dz is made
  int64_t pitch = 0;
  int32_t columns = 0;  // it has the first so many of the launch's
  DType dtype = DType::f32;
  // Kept for another call: rows are by token, each times `lift` and nothing else; a row that is not
  // finite becomes zeros, and is marked.
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
  int32_t blocks = 1;  // so many share a row
  float beta = 0, label_weight = 0;
  bool has_target = false, has_outputs = false;
  bool has_statistics = false;  // of those that are summed over columns
  float* losses = nullptr;      // [N]  by token; there where the losses are reduced
  TensorView loss{};            // [N]
  DivergenceStatistics statistics{};
  DivergenceOfShard shard{};
  bool sums_columns = true;           // something is made of sums over the columns
  DivergenceState* states = nullptr;  // [N]  compacted; there where they are known or kept
  bool has_states = false;            // they are known but for `mean`
  DivergencePanel dz{};
};

}  // namespace logitless::cuda
