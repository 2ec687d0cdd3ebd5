// SPDX-License-Identifier: Apache-2.0
// These are the ops. An op is a struct of views; docs/semantics.md says what every field
// means, and has every formula. N counts tokens, V the vocabulary, D the hidden axis. An absent
// view is an input not given or an output not wanted.
#pragma once

#include "logitless/tensor.h"

namespace logitless {

enum class Reduction : int32_t {
  none = LOGITLESS_REDUCTION_NONE,
  sum = LOGITLESS_REDUCTION_SUM,
  mean = LOGITLESS_REDUCTION_MEAN,
};
// This says what a target outside [0, V) that is not ignore_index is.
enum class OutOfRange : int32_t {
  error = LOGITLESS_OUT_OF_RANGE_ERROR,
  ignore = LOGITLESS_OUT_OF_RANGE_IGNORE,
};
// This is the mean over no token.
enum class EmptyMean : int32_t { zero = LOGITLESS_EMPTY_MEAN_ZERO, nan = LOGITLESS_EMPTY_MEAN_NAN };
enum class InputKind : int32_t {
  logits = LOGITLESS_INPUT_LOGITS,
  probabilities = LOGITLESS_INPUT_PROBABILITIES,  // only CrossEntropy ops take it
};

// Which divergence of a student p from a teacher q.
enum class DivergenceKind : int32_t {
  forward_kl = LOGITLESS_FORWARD_KL,  // KL(q || p)
  reverse_kl = LOGITLESS_REVERSE_KL,  // KL(p || q)
  jsd = LOGITLESS_JSD,                // beta KL(q || m) + (1 - beta) KL(p || m)
  skew_kl = LOGITLESS_SKEW_KL,        // KL(q || m), m = (1 - beta) p + beta q
  tv = LOGITLESS_TV,                  // 1/2 sum_j |p_j - q_j|
};

// These bits are or-ed into an op's fault word.
enum class FaultBits : int32_t {
  target_outside = 1,   // a target is outside the vocabulary, where that is an error
  kept_of_another = 2,  // a row's kept state is another Forward's, or was consumed
  temperature = 4,      // a token's temperature is none
};

struct LossOptions {
  Reduction reduction = Reduction::mean;
  int64_t ignore_index = -100;
  float label_smoothing = 0;  // it is in [0, 1]
  float z_loss = 0;           // it is >= 0
  float logit_scale = 1;      // it is finite
  float softcap = 0;          // it is >= 0; 0 says that there is none
  float temperature = 1;      // it is > 0
  OutOfRange out_of_range = OutOfRange::error;
  EmptyMean empty_mean = EmptyMean::zero;
  InputKind input_kind = InputKind::logits;
  float probability_floor = 1e-9f;
  bool allow_tf32 = false;
  double normalizer = 0;    // the mean divides by it; 0 says that tokens are counted
  int64_t vocab_start = 0;  // this shard of the vocabulary begins with it
  // The whole vocabulary has so many columns; 0 says that the views hold it whole.
  int64_t vocab_total = 0;
};

// What a divergence has beside the LossOptions of the student.
struct DivergenceOptions {
  DivergenceKind kind = DivergenceKind::forward_kl;
  float beta = 0.5f;              // 0 or in [2^-90, 1]; jsd and skew_kl alone read it
  float label_weight = 0;         // >= 0; of lse - z_t, beside the divergence
  float teacher_logit_scale = 1;  // as LossOptions has them of the student
  float teacher_softcap = 0;
  float teacher_temperature = 1;
};

struct LossWeights {
  TensorView token{};        // [N]   f32
  TensorView vocab{};        // [V]  f32; a shard has [vocab_total]
  TensorView normalizer{};   // []  f32 or i64; the mean divides by it
  TensorView temperature{};  // [N]  f32; it replaces options.temperature
};

// These outputs are optional; those of ignored tokens are 0 (argmax and rank are -1).
struct TokenStatistics {
  TensorView lse{};            // [N] f32; it is log sum_j exp z_ij
  TensorView target_logit{};   // [N] f32; it is z_it
  TensorView entropy{};        // [N] f32; it is lse - sum_j p_ij z_ij
  TensorView argmax{};         // [N] i32 or i64
  TensorView row_reference{};  // [N] f32; it is m_i, the row maximum or an anchor near it
  TensorView row_log_sum{};  // [N] f32; it is log sum_j exp(z_ij - m_i), so that lse = m + log sum
  // [N] f32; it is sum_j c_j z_ij, for shards under label smoothing
  TensorView weighted_logit_sum{};
  TensorView logprob{};        // [N] f32; it is min(0, (z_it - m_i) - log s_i)
  TensorView rank{};           // [N] i32 or i64; so many logits exceed the target's
  TensorView sum_p_squared{};  // [N] f32; it is sum_j p_ij^2
  TensorView mean_logit{};     // [N] f32; it is 1/V sum_j z_ij
  TensorView max_logprob{};    // [N] f32; it is max_j z_ij - lse
  TensorView mass_above{};     // [N] f32; it is sum_j p_ij of the columns that rank counts
};

// A teacher is a head of its own, or logits; it has no gradient.
struct Teacher {
  TensorView input{};        // [N, Dt]  in the dtype of the student's
  TensorView weight{};       // [V, Dt]
  TensorView bias{};         // [V]
  TensorView logits{};       // [N, V]  in place of the three above
  TensorView temperature{};  // [N]  f32; it replaces options.teacher_temperature
};

// These outputs are optional; those of ignored tokens are 0.
struct DivergenceStatistics {
  TensorView entropy{};          // [N] f32; of the student
  TensorView teacher_entropy{};  // [N] f32
  TensorView acceptance{};       // [N] f32; it is sum_j min(p_j, q_j)
  TensorView logprob{};          // [N] f32; it is log p_t of the student
};

// What a divergence on a shard of the vocabulary needs of both heads' rows: Forward writes the
// shard's own, or with the sums it is given the whole vocabulary's, as Backward is.
struct DivergenceStates {
  TensorView row_reference{};          // [N] f32; of the student
  TensorView row_log_sum{};            // [N] f32
  TensorView teacher_row_reference{};  // [N] f32
  TensorView teacher_row_log_sum{};    // [N] f32
};

struct Softmax {
  TensorView logits{};         // [R, C]
  TensorView probabilities{};  // [R, C]  it may be logits itself
};

struct CrossEntropyForward {
  TensorView logits{};  // [N, V]
  TensorView target{};  // [N]  i32 or i64
  TensorView loss{};    // [N] where the reduction is none, else []
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

struct CrossEntropyBackward {
  TensorView logits{};             // [N, V]
  TensorView target{};             // [N]  i32 or i64
  TensorView row_reference{};      // [N]  Forward wrote it; it comes with row_log_sum or not at all
  TensorView row_log_sum{};        // [N]
  TensorView entropy{};            // [N]  Forward wrote it; grad_entropy wants it
  TensorView grad_loss{};          // [N] where the reduction is none, else []; it is 1 by default
  TensorView grad_lse{};           // [N]
  TensorView grad_target_logit{};  // [N]
  TensorView grad_entropy{};       // [N]
  TensorView grad_logits{};        // [N, V]  it may be logits itself
  LossOptions options{};
  LossWeights weights{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

struct CrossEntropyForwardBackward {
  TensorView logits{};       // [N, V]
  TensorView target{};       // [N]  i32 or i64
  TensorView loss{};         // [N] where the reduction is none, else []
  TensorView grad_loss{};    // [N] where the reduction is none, else []; it is 1 by default
  TensorView grad_logits{};  // [N, V]  it may be logits itself
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

struct LinearCrossEntropyForward {
  TensorView input{};   // [N, D]
  TensorView weight{};  // [V, D]
  TensorView bias{};    // [V]
  TensorView target{};  // [N]  i32 or i64
  TensorView loss{};    // [N] where the reduction is none, else []
  // [N] f32; what a shard keeps of a row whose target is elsewhere is relative to it: z_it
  TensorView anchor{};
  TensorView kept{};       // [blocks * N to 64, 64]  Backward needs it of the logits: kept_size()
  TensorView kept_rows{};  // [N, 8] f32; it goes with `kept`
  TensorView ids{};        // [N, K] i32 or i64; chosen columns, -1 where there is none
  TensorView logits_at{};  // [N, K] f32; z of these columns
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};       // [1] i32; FaultBits are or-ed into it
  TensorView top_logits{};  // [N, k] f32; the k largest z of each token, the largest first
  TensorView top_ids{};     // [N, k] i32 or i64; their columns in the whole vocabulary
  // [N + 1] i32 or i64; ids and logits_at are [M] then: those of token i begin at id_offsets[i]
  TensorView id_offsets{};
};

struct LinearCrossEntropyBackward {
  TensorView input{};              // [N, D]
  TensorView weight{};             // [V, D]
  TensorView bias{};               // [V]
  TensorView target{};             // [N]  i32 or i64
  TensorView row_reference{};      // [N]  Forward wrote it; it comes with row_log_sum or not at all
  TensorView row_log_sum{};        // [N]
  TensorView entropy{};            // [N]  Forward wrote it; grad_entropy wants it
  TensorView grad_loss{};          // [N] where the reduction is none, else []; it is 1 by default
  TensorView grad_lse{};           // [N]
  TensorView grad_target_logit{};  // [N]
  TensorView grad_entropy{};       // [N]
  TensorView ids{};                // [N, K] i32 or i64; chosen columns, -1 where there is none
  TensorView grad_logits_at{};     // [N, K] f32; it comes with `ids`
  TensorView kept{};               // Forward wrote it; it comes with kept_rows and the row state
  TensorView kept_rows{};          // [N, 8]  f32
  uint64_t kept_key = 0;           // kept_size() said it of that Forward
  bool consume_kept = false;       // `kept` need not serve another Backward
  TensorView grad_input{};         // [N, D]
  TensorView grad_weight{};        // [V, D]
  TensorView grad_bias{};          // [V]
  bool accumulate_grad_weight = false;  // it adds to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  LossWeights weights{};
  TensorView fault{};        // [1] i32; FaultBits are or-ed into it
  TensorView id_offsets{};   // [N + 1] i32 or i64; ids and grad_logits_at are [M] then
  bool only_chosen = false;  // logits_at alone has a gradient: no product of the vocabulary
};

struct LinearCrossEntropyForwardBackward {
  TensorView input{};        // [N, D]
  TensorView weight{};       // [V, D]
  TensorView bias{};         // [V]
  TensorView target{};       // [N]  i32 or i64
  TensorView loss{};         // [N] where the reduction is none, else []
  TensorView grad_loss{};    // [N] where the reduction is none, else []; it is 1 by default
  TensorView grad_input{};   // [N, D]
  TensorView grad_weight{};  // [V, D]
  TensorView grad_bias{};    // [V]
  bool accumulate_grad_weight = false;  // it adds to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  LossWeights weights{};
  TokenStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

struct LinearDivergenceForward {
  TensorView input{};   // [N, D]
  TensorView weight{};  // [V, D]
  TensorView bias{};    // [V]
  Teacher teacher{};
  TensorView target{};          // [N]  i32 or i64; optional
  TensorView loss{};            // [N] where the reduction is none, else []
  TensorView kept{};            // [blocks * N to 64, 64]  Backward uses it: kept_size()
  TensorView kept_rows{};       // [N, 8] f32; it goes with `kept`
  DivergenceStates states{};    // inputs where one of the sums is asked for, else outputs
  TensorView target_logit{};    // [N] f32; it is -inf where another shard has it
  TensorView divergence_sum{};  // [N] f32; of the divergence, over the columns of the views
  TensorView slope_sum{};       // [N] f32; of p f, which dz subtracts
  LossOptions options{};
  DivergenceOptions divergence{};
  LossWeights weights{};  // there are no class weights
  DivergenceStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
  constexpr bool sums() const { return divergence_sum || slope_sum; }
};

struct LinearDivergenceBackward {
  TensorView input{};         // [N, D]
  TensorView weight{};        // [V, D]
  TensorView bias{};          // [V]
  Teacher teacher{};          // it may be absent beside `kept`
  TensorView target{};        // [N]  i32 or i64; optional
  TensorView grad_loss{};     // [N] where the reduction is none, else []; it is 1 by default
  TensorView kept{};          // Forward wrote it; it comes with kept_rows
  TensorView kept_rows{};     // [N, 8]  f32
  uint64_t kept_key = 0;      // kept_size() said it of that Forward
  DivergenceStates states{};  // of the whole vocabulary; all or none
  TensorView slope_mean{};    // [N] f32; the whole vocabulary's slope_sum, beside the states
  TensorView grad_input{};    // [N, D]
  TensorView grad_weight{};   // [V, D]
  TensorView grad_bias{};     // [V]
  bool accumulate_grad_weight = false;  // it adds to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  DivergenceOptions divergence{};
  LossWeights weights{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

struct LinearDivergenceForwardBackward {
  TensorView input{};   // [N, D]
  TensorView weight{};  // [V, D]
  TensorView bias{};    // [V]
  Teacher teacher{};
  TensorView target{};       // [N]  i32 or i64; optional
  TensorView loss{};         // [N] where the reduction is none, else []
  TensorView grad_loss{};    // [N] where the reduction is none, else []; it is 1 by default
  TensorView grad_input{};   // [N, D]
  TensorView grad_weight{};  // [V, D]
  TensorView grad_bias{};    // [V]
  bool accumulate_grad_weight = false;  // it adds to grad_weight and grad_bias, which must be f32
  LossOptions options{};
  DivergenceOptions divergence{};
  LossWeights weights{};
  DivergenceStatistics statistics{};
  TensorView fault{};  // [1] i32; FaultBits are or-ed into it
};

// What Forward wrote of each token on P shards of the vocabulary, in the vocabulary's order,
// becomes the whole vocabulary's. options.vocab_total is V.
struct Combine {
  TensorView target{};                    // [N]  i32 or i64
  TensorView shard_row_reference{};       // [P, N] f32
  TensorView shard_row_log_sum{};         // [P, N] f32
  TensorView shard_target_logit{};        // [P, N] f32; it is -inf where another shard has it
  TensorView shard_entropy{};             // [P, N] f32
  TensorView shard_argmax{};              // [P, N] i32 or i64; it indexes the whole vocabulary
  TensorView shard_weighted_logit_sum{};  // [P, N] f32; the loss wants it under label smoothing
  TensorView shard_sum_p_squared{};       // [P, N] f32
  TensorView shard_mean_logit{};          // [P, N] f32
  TensorView shard_max_logprob{};         // [P, N] f32
  TensorView loss{};                      // [N] where the reduction is none, else []
  LossOptions options{};                  // the map from raw to z is not used
  LossWeights weights{};
  TokenStatistics statistics{};   // there is no rank
  TensorView fault{};             // [1] i32; FaultBits are or-ed into it
  TensorView shard_top_logits{};  // [P, N k] f32; the shards' top_logits, one behind the other
  TensorView shard_top_ids{};     // [P, N k] i32 or i64
  TensorView top_logits{};        // [N, k] f32
  TensorView top_ids{};           // [N, k] i32 or i64
};

}  // namespace logitless
