// SPDX-License-Identifier: Apache-2.0
// The ops: structs of views. docs/semantics.md says what the fields mean and has the formulas. N
// counts tokens, V the vocabulary, D the hidden axis. An absent view is an input not given or an
// output not wanted.
#pragma once

#include "logitless/tensor.h"

namespace logitless {

enum class Reduction : int32_t {
  none = LOGITLESS_REDUCTION_NONE,
  sum = LOGITLESS_REDUCTION_SUM,
  mean = LOGITLESS_REDUCTION_MEAN,
};
// How a target outside [0, V) that is not ignore_index is handled.
enum class OutOfRange : int32_t {
  error = LOGITLESS_OUT_OF_RANGE_ERROR,
  ignore = LOGITLESS_OUT_OF_RANGE_IGNORE,
};
// The mean loss if no token counts.
enum class EmptyMean : int32_t { zero = LOGITLESS_EMPTY_MEAN_ZERO, nan = LOGITLESS_EMPTY_MEAN_NAN };
enum class InputKind : int32_t {
  logits = LOGITLESS_INPUT_LOGITS,
  probabilities = LOGITLESS_INPUT_PROBABILITIES,  // only for CrossEntropy ops
};

// Divergences of a student p from a teacher q.
enum class DivergenceKind : int32_t {
  forward_kl = LOGITLESS_FORWARD_KL,  // KL(q || p)
  reverse_kl = LOGITLESS_REVERSE_KL,  // KL(p || q)
  jsd = LOGITLESS_JSD,                // beta KL(q || m) + (1 - beta) KL(p || m)
  skew_kl = LOGITLESS_SKEW_KL,        // KL(q || m), m = (1 - beta) p + beta q
  tv = LOGITLESS_TV,                  // 1/2 sum_j |p_j - q_j|
};

// Or-ed into an op's fault word.
enum class FaultBits : int32_t {
  target_outside = 1,   // a target is outside the vocabulary and out_of_range is error
  kept_of_another = 2,  // a row's kept state is another Forward's, or was consumed
  temperature = 4,      // a token's temperature is not allowed
};

// What the loss is: docs/semantics.md, "Logits" to "Reduction".
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
  float probability_floor = 1e-9f;  // >= 0
  bool allow_tf32 = false;
  double normalizer = 0;    // what the mean divides by; 0: the number of tokens that count
  int64_t vocab_start = 0;  // the first column of this shard
  // Columns of the whole vocabulary; 0: the views hold all of it.
  int64_t vocab_total = 0;
};

// The options of a divergence, besides the student's LossOptions.
struct DivergenceOptions {
  DivergenceKind kind = DivergenceKind::forward_kl;
  float beta = 0.5f;              // 0 or in [2^-90, 1]; only jsd and skew_kl read it
  float label_weight = 0;         // >= 0; times lse - z_t, added to the divergence
  float teacher_logit_scale = 1;  // as in LossOptions, of the teacher
  float teacher_softcap = 0;
  float teacher_temperature = 1;
};

// Optional constants of a loss; they have no gradient.
struct LossWeights {
  TensorView token{};        // [N]   f32
  TensorView vocab{};        // [V]  f32; on a shard [vocab_total]
  TensorView normalizer{};   // []  f32 or i64; what the mean divides by
  TensorView temperature{};  // [N]  f32; replaces options.temperature
};

// Optional outputs; ignored tokens get 0, and -1 for argmax and rank.
struct TokenStatistics {
  TensorView lse{};            // [N] f32; log sum_j exp z_ij
  TensorView target_logit{};   // [N] f32; z_it
  TensorView entropy{};        // [N] f32; lse - sum_j p_ij z_ij
  TensorView argmax{};         // [N] i32 or i64
  TensorView row_reference{};  // [N] f32; m_i, the row maximum or a number near it
  TensorView row_log_sum{};    // [N] f32; log sum_j exp(z_ij - m_i), so that lse = m + log sum
  // [N] f32; sum_j c_j z_ij, for shards under label smoothing
  TensorView weighted_logit_sum{};
  TensorView logprob{};        // [N] f32; min(0, (z_it - m_i) - log s_i)
  TensorView rank{};           // [N] i32 or i64; the number of logits that exceed the target's
  TensorView sum_p_squared{};  // [N] f32; sum_j p_ij^2
  TensorView mean_logit{};     // [N] f32; 1/V sum_j z_ij
  TensorView max_logprob{};    // [N] f32; max_j z_ij - lse
  TensorView mass_above{};     // [N] f32; sum of p_ij over the columns that rank counts
};

// A second head, or its logits. It gets no gradient.
struct Teacher {
  TensorView input{};        // [N, Dt]  in the dtype of the student's
  TensorView weight{};       // [V, Dt]
  TensorView bias{};         // [V]
  TensorView logits{};       // [N, V]  in place of input, weight and bias
  TensorView temperature{};  // [N]  f32; replaces options.teacher_temperature
};

// Optional outputs; ignored tokens get 0.
struct DivergenceStatistics {
  TensorView entropy{};          // [N] f32; of the student
  TensorView teacher_entropy{};  // [N] f32
  TensorView acceptance{};       // [N] f32; sum_j min(p_j, q_j)
  TensorView logprob{};          // [N] f32; log p_t of the student
};

// Both heads' row states, for a vocabulary in shards. Forward writes the shard's own, or, if
// divergence_sum or slope_sum is present, reads the whole vocabulary's; Backward reads the latter.
struct DivergenceStates {
  TensorView row_reference{};          // [N] f32; of the student
  TensorView row_log_sum{};            // [N] f32
  TensorView teacher_row_reference{};  // [N] f32
  TensorView teacher_row_log_sum{};    // [N] f32
};

// The softmax of each row.
struct Softmax {
  TensorView logits{};         // [R, C]
  TensorView probabilities{};  // [R, C]  may be logits itself
};

// Loss and statistics of given logits.
struct CrossEntropyForward {
  TensorView logits{};  // [N, V]
  TensorView target{};  // [N]  i32 or i64
  TensorView loss{};    // [N] where the reduction is none, else []
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

// The gradient of given logits, once the upstream gradient is known.
struct CrossEntropyBackward {
  TensorView logits{};             // [N, V]
  TensorView target{};             // [N]  i32 or i64
  TensorView row_reference{};      // [N]  from Forward; with row_log_sum or not at all
  TensorView row_log_sum{};        // [N]
  TensorView entropy{};            // [N]  from Forward; needed for grad_entropy
  TensorView grad_loss{};          // [N] where the reduction is none, else []; 1 by default
  TensorView grad_lse{};           // [N]
  TensorView grad_target_logit{};  // [N]
  TensorView grad_entropy{};       // [N]
  TensorView grad_logits{};        // [N, V]  may be logits itself
  LossOptions options{};
  LossWeights weights{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

// Loss and gradient in one pass, for an upstream gradient that is known before the loss.
struct CrossEntropyForwardBackward {
  TensorView logits{};       // [N, V]
  TensorView target{};       // [N]  i32 or i64
  TensorView loss{};         // [N] where the reduction is none, else []
  TensorView grad_loss{};    // [N] where the reduction is none, else []; 1 by default
  TensorView grad_logits{};  // [N, V]  may be logits itself
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

// Loss and statistics of the logits input_i . weight_j + bias_j.
struct LinearCrossEntropyForward {
  TensorView input{};   // [N, D]
  TensorView weight{};  // [V, D]
  TensorView bias{};    // [V]
  TensorView target{};  // [N]  i32 or i64
  TensorView loss{};    // [N] where the reduction is none, else []
  // [N] f32; only on a shard: z_it, to which the kept state of a shard without target t is relative
  TensorView anchor{};
  TensorView kept{};       // [blocks * rows, 64]  for Backward, sized by kept_size()
  TensorView kept_rows{};  // [N, 8] f32; with `kept`
  TensorView ids{};        // [N, K] i32 or i64; chosen columns, -1 where there is none
  TensorView logits_at{};  // [N, K] f32; z of these columns
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};       // [1] i32; FaultBits are or-ed into it
  TensorView top_logits{};  // [N, k] f32; the k largest z of each token, the largest first
  TensorView top_ids{};     // [N, k] i32 or i64; their columns in the whole vocabulary
  // [N + 1] i32 or i64; ids and logits_at are then [M]: token i's begin at id_offsets[i]
  TensorView id_offsets{};
};

// Gradients of LinearCrossEntropyForward, once the upstream gradient is known.
struct LinearCrossEntropyBackward {
  TensorView input{};                   // [N, D]
  TensorView weight{};                  // [V, D]
  TensorView bias{};                    // [V]
  TensorView target{};                  // [N]  i32 or i64
  TensorView row_reference{};           // [N]  from Forward; with row_log_sum or not at all
  TensorView row_log_sum{};             // [N]
  TensorView entropy{};                 // [N]  from Forward; needed for grad_entropy
  TensorView grad_loss{};               // [N] where the reduction is none, else []; 1 by default
  TensorView grad_lse{};                // [N]
  TensorView grad_target_logit{};       // [N]
  TensorView grad_entropy{};            // [N]
  TensorView ids{};                     // [N, K] i32 or i64; chosen columns, -1 where there is none
  TensorView grad_logits_at{};          // [N, K] f32; with `ids`
  TensorView kept{};                    // from Forward; with kept_rows and the row state
  TensorView kept_rows{};               // [N, 8]  f32
  uint64_t kept_key = 0;                // from kept_size() of that Forward
  bool consume_kept = false;            // no further Backward reads `kept`
  TensorView grad_input{};              // [N, D]
  TensorView grad_weight{};             // [V, D]
  TensorView grad_bias{};               // [V]
  bool accumulate_grad_weight = false;  // add to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  LossWeights weights{};
  TensorView fault{};             // [1] i32; FaultBits are or-ed into it
  TensorView id_offsets{};        // [N + 1] i32 or i64; ids and grad_logits_at are then [M]
  bool only_chosen = false;       // logits_at alone has a gradient: no product over the vocabulary
  bool grad_input_first = false;  // a plan can run in parts, the first of which writes grad_input
};

// Loss and gradients in one pass, for an upstream gradient that is known before the loss.
struct LinearCrossEntropyForwardBackward {
  TensorView input{};                   // [N, D]
  TensorView weight{};                  // [V, D]
  TensorView bias{};                    // [V]
  TensorView target{};                  // [N]  i32 or i64
  TensorView loss{};                    // [N] where the reduction is none, else []
  TensorView grad_loss{};               // [N] where the reduction is none, else []; 1 by default
  TensorView grad_input{};              // [N, D]
  TensorView grad_weight{};             // [V, D]
  TensorView grad_bias{};               // [V]
  bool accumulate_grad_weight = false;  // add to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

// How far a student's head (input, weight, bias) is from a teacher's: docs/semantics.md,
// "Divergences of two heads".
struct LinearDivergenceForward {
  TensorView input{};   // [N, D]
  TensorView weight{};  // [V, D]
  TensorView bias{};    // [V]
  Teacher teacher{};
  TensorView target{};          // [N]  i32 or i64; optional
  TensorView loss{};            // [N] where the reduction is none, else []
  TensorView kept{};            // [blocks * rows, 64]  for Backward, sized by kept_size(); an input
                                // beside the sums of a shard
  TensorView kept_rows{};       // [N, 8] f32; with `kept`
  DivergenceStates states{};    // inputs if one of the sums below is given, else outputs
  TensorView target_logit{};    // [N] f32; -inf where another shard has it
  TensorView divergence_sum{};  // [N] f32; of the divergence, over the columns of the views
  TensorView slope_sum{};       // [N] f32; sum_j p_j f_j, with f of dz in docs/semantics.md
  LossOptions options{};
  DivergenceOptions divergence{};
  LossWeights weights{};  // no class weights
  DivergenceStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
  constexpr bool sums() const { return divergence_sum || slope_sum; }
};

// Gradients of the student's head, once the upstream gradient is known.
struct LinearDivergenceBackward {
  TensorView input{};                   // [N, D]
  TensorView weight{};                  // [V, D]
  TensorView bias{};                    // [V]
  Teacher teacher{};                    // may be absent with `kept`
  TensorView target{};                  // [N]  i32 or i64; optional
  TensorView grad_loss{};               // [N] where the reduction is none, else []; 1 by default
  TensorView kept{};                    // from Forward; with kept_rows
  TensorView kept_rows{};               // [N, 8]  f32
  uint64_t kept_key = 0;                // from kept_size() of that Forward
  DivergenceStates states{};            // of the whole vocabulary; all or none
  TensorView slope_mean{};              // [N] f32; the whole vocabulary's slope_sum; with `states`
  TensorView grad_input{};              // [N, D]
  TensorView grad_weight{};             // [V, D]
  TensorView grad_bias{};               // [V]
  bool accumulate_grad_weight = false;  // add to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  DivergenceOptions divergence{};
  LossWeights weights{};
  TensorView fault{};             // [1] i32; FaultBits are or-ed into it
  bool grad_input_first = false;  // a plan can run in parts, the first of which writes grad_input
};

// Loss and gradients in one pass, for an upstream gradient that is known before the loss.
struct LinearDivergenceForwardBackward {
  TensorView input{};   // [N, D]
  TensorView weight{};  // [V, D]
  TensorView bias{};    // [V]
  Teacher teacher{};
  TensorView target{};                  // [N]  i32 or i64; optional
  TensorView loss{};                    // [N] where the reduction is none, else []
  TensorView grad_loss{};               // [N] where the reduction is none, else []; 1 by default
  TensorView grad_input{};              // [N, D]
  TensorView grad_weight{};             // [V, D]
  TensorView grad_bias{};               // [V]
  bool accumulate_grad_weight = false;  // add to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  DivergenceOptions divergence{};
  LossWeights weights{};
  DivergenceStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

// Computes the whole vocabulary's results from what Forward wrote for each token on P shards, in
// the vocabulary's order. options.vocab_total is V.
struct Combine {
  TensorView target{};                    // [N]  i32 or i64
  TensorView shard_row_reference{};       // [P, N] f32
  TensorView shard_row_log_sum{};         // [P, N] f32
  TensorView shard_target_logit{};        // [P, N] f32; -inf where another shard has it
  TensorView shard_entropy{};             // [P, N] f32
  TensorView shard_argmax{};              // [P, N] i32 or i64; columns of the whole vocabulary
  TensorView shard_weighted_logit_sum{};  // [P, N] f32; for the loss under label smoothing
  TensorView shard_sum_p_squared{};       // [P, N] f32
  TensorView shard_mean_logit{};          // [P, N] f32
  TensorView shard_max_logprob{};         // [P, N] f32
  TensorView loss{};                      // [N] where the reduction is none, else []
  LossOptions options{};                  // the map from raw to z is not used
  LossWeights weights{};
  TokenStatistics statistics{};   // no rank, no mass_above
  TensorView fault{};             // [1] i32; FaultBits are or-ed into it
  TensorView shard_top_logits{};  // [P, N k] f32; the shards' top_logits, one after the other
  TensorView shard_top_ids{};     // [P, N k] i32 or i64
  TensorView top_logits{};        // [N, k] f32
  TensorView top_ids{};           // [N, k] i32 or i64
};

}  // namespace logitless
