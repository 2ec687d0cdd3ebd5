// SPDX-License-Identifier: Apache-2.0
// The seven ops. An op is a struct of views; what every field means, and every formula, is
// docs/semantics.md. N tokens, V vocabulary, D hidden. An absent view is an input not given or an
// output not wanted.
#pragma once

#include "logitless/tensor.h"

namespace logitless {

enum class Reduction : int32_t {
  none = LOGITLESS_REDUCTION_NONE,
  sum = LOGITLESS_REDUCTION_SUM,
  mean = LOGITLESS_REDUCTION_MEAN,
};
// A target outside [0, V) that is not ignore_index.
enum class OutOfRange : int32_t {
  error = LOGITLESS_OUT_OF_RANGE_ERROR,
  ignore = LOGITLESS_OUT_OF_RANGE_IGNORE,
};
// The mean over no token.
enum class EmptyMean : int32_t { zero = LOGITLESS_EMPTY_MEAN_ZERO, nan = LOGITLESS_EMPTY_MEAN_NAN };
enum class InputKind : int32_t {
  logits = LOGITLESS_INPUT_LOGITS,
  probabilities = LOGITLESS_INPUT_PROBABILITIES,  // CrossEntropy ops only
};

// What is or-ed into an op's fault word.
enum class FaultBits : int32_t {
  target_outside = 1,   // a target outside the vocabulary, where that is an error
  kept_of_another = 2,  // a row's kept state is another Forward's, or was consumed
  temperature = 4,      // a token's temperature is none
};

struct LossOptions {
  Reduction reduction = Reduction::mean;
  int64_t ignore_index = -100;
  float label_smoothing = 0;  // in [0, 1]
  float z_loss = 0;           // >= 0
  float logit_scale = 1;      // finite
  float softcap = 0;          // >= 0; 0: none
  float temperature = 1;      // > 0
  OutOfRange out_of_range = OutOfRange::error;
  EmptyMean empty_mean = EmptyMean::zero;
  InputKind input_kind = InputKind::logits;
  float probability_floor = 1e-9f;
  bool allow_tf32 = false;
  double normalizer = 0;    // of mean; 0: counted
  int64_t vocab_start = 0;  // first column of this shard of the vocabulary
  int64_t vocab_total = 0;  // columns of the whole vocabulary; 0: the views hold it whole
};

struct LossWeights {
  TensorView token{};        // [N]   f32
  TensorView vocab{};        // [V]   f32; [vocab_total] for a shard
  TensorView normalizer{};   // []    f32 or i64; of mean
  TensorView temperature{};  // [N]  f32; in place of options.temperature
};

// Optional outputs; those of ignored tokens are 0 (argmax and rank -1).
struct TokenStatistics {
  TensorView lse{};                 // [N] f32   log sum_j exp z_ij
  TensorView target_logit{};        // [N] f32   z_it
  TensorView entropy{};             // [N] f32   lse - sum_j p_ij z_ij
  TensorView argmax{};              // [N] i32 or i64
  TensorView row_reference{};       // [N] f32   m_i, the row maximum or an anchor near it
  TensorView row_log_sum{};         // [N] f32   log sum_j exp(z_ij - m_i); lse = m + log sum
  TensorView weighted_logit_sum{};  // [N] f32   sum_j c_j z_ij, for shards under label smoothing
  TensorView logprob{};             // [N] f32   min(0, (z_it - m_i) - log s_i)
  TensorView rank{};                // [N] i32 or i64   how many logits exceed the target's
  TensorView sum_p_squared{};       // [N] f32   sum_j p_ij^2
  TensorView mean_logit{};          // [N] f32   1/V sum_j z_ij
};

struct Softmax {
  TensorView logits{};         // [R, C]
  TensorView probabilities{};  // [R, C]  may be logits itself
};

struct CrossEntropyForward {
  TensorView logits{};  // [N, V]
  TensorView target{};  // [N]  i32 or i64
  TensorView loss{};    // [N] for none, else []
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1]  i32, sticky OR: see FaultBits
};

struct CrossEntropyBackward {
  TensorView logits{};             // [N, V]
  TensorView target{};             // [N]  i32 or i64
  TensorView row_reference{};      // [N]  as Forward wrote it; with row_log_sum or neither
  TensorView row_log_sum{};        // [N]
  TensorView entropy{};            // [N]  as Forward wrote it; wanted with grad_entropy
  TensorView grad_loss{};          // [N] for none, else []; default 1
  TensorView grad_lse{};           // [N]
  TensorView grad_target_logit{};  // [N]
  TensorView grad_entropy{};       // [N]
  TensorView grad_logits{};        // [N, V]  may be logits itself
  LossOptions options{};
  LossWeights weights{};
  TensorView fault{};  // [1]  i32, sticky OR: see FaultBits
};

struct CrossEntropyForwardBackward {
  TensorView logits{};       // [N, V]
  TensorView target{};       // [N]  i32 or i64
  TensorView loss{};         // [N] for none, else []
  TensorView grad_loss{};    // [N] for none, else []; default 1
  TensorView grad_logits{};  // [N, V]  may be logits itself
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1]  i32, sticky OR: see FaultBits
};

struct LinearCrossEntropyForward {
  TensorView input{};      // [N, D]
  TensorView weight{};     // [V, D]
  TensorView bias{};       // [V]
  TensorView target{};     // [N]  i32 or i64
  TensorView loss{};       // [N] for none, else []
  TensorView kept{};       // [blocks * N to 64, 64]  what Backward needs of the logits: kept_size()
  TensorView kept_rows{};  // [N, 8]  f32, with `kept`
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1]  i32, sticky OR: see FaultBits
};

struct LinearCrossEntropyBackward {
  TensorView input{};                   // [N, D]
  TensorView weight{};                  // [V, D]
  TensorView bias{};                    // [V]
  TensorView target{};                  // [N]  i32 or i64
  TensorView row_reference{};           // [N]  as Forward wrote it; with row_log_sum or neither
  TensorView row_log_sum{};             // [N]
  TensorView entropy{};                 // [N]  as Forward wrote it; wanted with grad_entropy
  TensorView grad_loss{};               // [N] for none, else []; default 1
  TensorView grad_lse{};                // [N]
  TensorView grad_target_logit{};       // [N]
  TensorView grad_entropy{};            // [N]
  TensorView kept{};                    // as Forward wrote it; with kept_rows and the row state
  TensorView kept_rows{};               // [N, 8]  f32
  uint64_t kept_key = 0;                // what kept_size() said of that Forward
  bool consume_kept = false;            // `kept` need not serve another Backward
  TensorView grad_input{};              // [N, D]
  TensorView grad_weight{};             // [V, D]
  TensorView grad_bias{};               // [V]
  bool accumulate_grad_weight = false;  // adds to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  LossWeights weights{};
  TensorView fault{};  // [1]  i32, sticky OR: see FaultBits
};

struct LinearCrossEntropyForwardBackward {
  TensorView input{};                   // [N, D]
  TensorView weight{};                  // [V, D]
  TensorView bias{};                    // [V]
  TensorView target{};                  // [N]  i32 or i64
  TensorView loss{};                    // [N] for none, else []
  TensorView grad_loss{};               // [N] for none, else []; default 1
  TensorView grad_input{};              // [N, D]
  TensorView grad_weight{};             // [V, D]
  TensorView grad_bias{};               // [V]
  bool accumulate_grad_weight = false;  // adds to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1]  i32, sticky OR: see FaultBits
};

}  // namespace logitless
