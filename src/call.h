// SPDX-License-Identifier: Apache-2.0
// An op inside the library: one flat struct for every kind, made once at the entry of a call.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "logitless/logitless.h"
#include "src/row/sums.h"

namespace logitless {

// A tensor with its name, for rules that apply to all tensors of a call.
struct Field {
  std::string_view name;  // a string literal, so NUL-terminated
  Access access = Access::read;
  const TensorView* view = nullptr;  // never null, but the view may be absent
  bool given() const { return static_cast<bool>(*view); }
  bool written() const { return access != Access::read; }
};

struct Fields {
  std::array<Field, 40> field{};
  size_t count = 0;
  const Field* begin() const { return field.data(); }
  const Field* end() const { return field.data() + count; }
  size_t size() const { return count; }
  const Field& operator[](size_t i) const { return field[i]; }
};

// A tensor that ops of some kind have: its name, and its offsets in Call and in logitless_op.
struct TensorField {
  const char* name = "";
  Access access = Access::read;
  size_t in_call = 0, in_c = 0;  // bytes
};
std::span<const TensorField> tensor_fields(int32_t kind);
constexpr int32_t kinds = 11;
inline constexpr int64_t most_chosen = 1024;  // limit of K in ids [N, K]
inline constexpr int64_t most_listed = 256;   // limit of k for top-k

constexpr const char* name_of_op(int32_t kind) {
  constexpr const char* names[] = {"Softmax",
                                   "CrossEntropyForward",
                                   "CrossEntropyBackward",
                                   "CrossEntropyForwardBackward",
                                   "LinearCrossEntropyForward",
                                   "LinearCrossEntropyBackward",
                                   "LinearCrossEntropyForwardBackward",
                                   "Combine",
                                   "LinearDivergenceForward",
                                   "LinearDivergenceBackward",
                                   "LinearDivergenceForwardBackward"};
  return names[kind];
}

inline constexpr uint32_t most_alignment = 16;  // bytes; a kernel's widest load
// The largest power of two, up to most_alignment, that divides the view's address; 0 without one.
inline uint32_t alignment_of(const TensorView& v) {
  if (v.data == nullptr) return 0;
  const uint64_t bits = (reinterpret_cast<uintptr_t>(v.data) + v.byte_offset) | most_alignment;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// A plan reads only the alignment of a tensor's address, 0 where the address is not known yet.
struct Tensor : TensorView {
  uint32_t alignment = 0;

  Tensor() = default;
  Tensor(const TensorView& view) : TensorView(view), alignment(alignment_of(view)) {}  // NOLINT
};

// Tensors that this kind of op does not have are absent.
struct Call {
  int32_t kind = -1;
  bool linear = false;
  bool diverges = false;    // a LinearDivergence op, which is linear too
  bool combines = false;    // Combine, whose rows are [P, N]
  bool loss_op = false;     // every kind but Softmax has options and targets
  bool gradients = false;   // Backward or ForwardBackward
  bool forward = false;     // Forward or ForwardBackward, whose loss and statistics are outputs
  bool accumulate = false;  // into grad_weight and grad_bias
  bool consume_kept = false;
  bool only_chosen = false;  // in Backward: logits_at alone has a gradient
  bool grad_input_first = false;
  int part = 0;  // which part of a plan runs; 0: all of it
  uint64_t kept_key = 0;
  Execution execution{};
  LossOptions options{};
  DivergenceOptions divergence{};

  Tensor logits{}, probabilities{};                               // each [N, V]
  Tensor input{}, weight{}, bias{};                               // [N, D] [V, D] [V]
  Tensor teacher_input{}, teacher_weight{}, teacher_bias{};       // [N, Dt] [V, Dt] [V]
  Tensor teacher_logits{}, teacher_temperature{};                 // [N, V] [N]
  Tensor target{}, token_weight{}, vocab_weight{}, normalizer{};  // [N] [N] [V, whole] []
  Tensor temperature{};                                           // [N]
  Tensor loss{};                                                  // [N] or []
  Tensor lse{}, target_logit{}, argmax{}, weighted_logit_sum{};   // each [N]
  Tensor logprob{}, rank{}, sum_p_squared{}, mean_logit{};        // each [N]
  Tensor max_logprob{}, mass_above{};                             // [N] [N]
  Tensor teacher_entropy{}, acceptance{};                         // each [N]
  Tensor teacher_row_reference{}, teacher_row_log_sum{};          // each [N]
  Tensor divergence_sum{}, slope_sum{}, slope_mean{};             // each [N]
  Tensor row_reference{}, row_log_sum{}, entropy{};               // each [N]
  Tensor grad_loss{};                                             // [N] or []
  Tensor grad_lse{}, grad_target_logit{}, grad_entropy{};         // each [N]
  Tensor anchor{};                                                // [N]
  Tensor ids{}, logits_at{}, grad_logits_at{};                    // each [N, K], or [M]
  Tensor id_offsets{};                                            // [N + 1]
  Tensor kept{}, kept_rows{};                                     // see kept.h
  Tensor grad_logits{};                                           // [N, V]
  Tensor grad_input{}, grad_weight{}, grad_bias{};
  Tensor fault{};                                                           // [1]
  Tensor shard_row_reference{}, shard_row_log_sum{}, shard_target_logit{};  // each [P, N]
  Tensor shard_entropy{}, shard_argmax{}, shard_weighted_logit_sum{};       // each [P, N]
  Tensor shard_sum_p_squared{}, shard_mean_logit{}, shard_max_logprob{};    // each [P, N]
  Tensor top_logits{}, top_ids{};                                           // each [N, k]
  Tensor shard_top_logits{}, shard_top_ids{};                               // each [P, N k]

  Call() = default;
  // `kind` is in range.
  Call(int32_t kind, const Execution& execution);
  // Implicit, so that a function of a Call also accepts an op of the C++ interface.
  template <class Op>
    requires requires { kind_of<Op>; }
  Call(const Op& op, const Execution& execution = {});  // NOLINT

  Fields fields() const;
  const Tensor& operator[](std::string_view name) const;
  const char* op_name() const { return name_of_op(kind); }

  const Tensor& rows() const { return linear ? input : combines ? shard_row_reference : logits; }
  int64_t tokens() const { return combines ? target.shape[0] : rows().shape[0]; }
  int64_t vocab() const {
    return linear ? weight.shape[0] : combines ? options.vocab_total : rows().shape[1];
  }
  int64_t shards() const { return rows().shape[0]; }  // only for Combine
  int64_t hidden() const { return rows().shape[1]; }  // only for linear ops
  int64_t vocab_total() const { return options.vocab_total > 0 ? options.vocab_total : vocab(); }
  int64_t vocab_start() const {
    return options.vocab_total > 0 && !combines ? options.vocab_start : 0;
  }
  bool shard() const { return vocab_total() > vocab(); }
  bool lists() const { return static_cast<bool>(id_offsets); }  // ids are lists
  // Chosen columns per token, or 0 if ids are lists.
  int64_t chosen() const { return ids && !lists() ? ids.shape[1] : 0; }
  // Chosen columns of all tokens.
  int64_t all_chosen() const { return !ids ? 0 : lists() ? ids.shape[0] : tokens() * chosen(); }
  int64_t listed() const { return top_logits ? top_logits.shape[1] : 0; }  // k
  // The sums over a row from which this call's statistics are computed.
  SumSet sums_of_statistics() const;
  // The same, and the sum that label smoothing needs.
  SumSet sums() const;
  // Whether the call requests only logits of targets and of chosen columns, which need no product.
  bool targets_only() const;
  // Whether a divergence requests the sums of its shard, given its rows' states.
  bool sums_of_shard() const { return divergence_sum || slope_sum; }
  bool state_given() const { return row_reference && (!forward || sums_of_shard()); }
  // The student's options with the teacher's map from raw to z.
  LossOptions teacher_options() const {
    LossOptions o = options;
    o.logit_scale = divergence.teacher_logit_scale;
    o.softcap = divergence.teacher_softcap;
    o.temperature = divergence.teacher_temperature;
    return o;
  }
  bool teacher_is_head() const { return diverges && teacher_weight; }
  // The statistics that this call writes.
  TokenStatistics statistics() const;
};

inline Tensor& tensor_at(Call& call, const TensorField& field) {
  return *reinterpret_cast<Tensor*>(reinterpret_cast<char*>(&call) + field.in_call);
}
inline const Tensor& tensor_at(const Call& call, const TensorField& field) {
  return *reinterpret_cast<const Tensor*>(reinterpret_cast<const char*>(&call) + field.in_call);
}

template <class Op>
  requires requires { kind_of<Op>; }
Call::Call(const Op& op, const Execution& execution) : Call(kind_of<Op>, execution) {
  if constexpr (LossOp<Op>) options = op.options;
  if constexpr (LinearOp<Op> && GradientOp<Op>) accumulate = op.accumulate_grad_weight;
  if constexpr (DivergenceOp<Op>) divergence = op.divergence;
  if constexpr (KeepingOp<Op> && GradientOp<Op>) kept_key = op.kept_key;
  if constexpr (ConsumingOp<Op>) consume_kept = op.consume_kept;
  if constexpr (OnlyChoosingOp<Op>) only_chosen = op.only_chosen;
  if constexpr (OrderedOp<Op>) grad_input_first = op.grad_input_first;
  for_each_tensor(op, *this,
                  [](const char*, Access, const TensorView& from, Tensor& to) { to = from; });
}

}  // namespace logitless
