// SPDX-License-Identifier: Apache-2.0
// An op is one flat struct inside the library, whatever its kind, made once where a call comes in.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "logitless/logitless.h"
#include "src/row/sums.h"

namespace logitless {

// The rules that ask the same of every tensor of a call take it by name.
struct Field {
  std::string_view name;  // it is a string literal's, so it ends with a NUL
  Access access = Access::read;
  const TensorView* view = nullptr;  // it is never null, but the view may be absent
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

// Ops of a kind have this tensor at these places in a Call and in logitless_op.
struct TensorField {
  const char* name = "";
  Access access = Access::read;
  size_t in_call = 0, in_c = 0;  // it counts bytes
};
// Returns the tensors of one kind, from the listing of fields.h.
std::span<const TensorField> tensor_fields(int32_t kind);
constexpr int32_t kinds = 11;
inline constexpr int64_t most_chosen = 1024;  // a token has at most so many chosen columns
inline constexpr int64_t most_listed = 256;  // a token's list of largest logits has at most so many

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

inline constexpr uint32_t most_alignment = 16;  // a kernel moves so many bytes at a time
// Returns the largest power of two up to that which divides the view's address, or 0 without one.
inline uint32_t alignment_of(const TensorView& v) {
  if (v.data == nullptr) return 0;
  const uint64_t bits = (reinterpret_cast<uintptr_t>(v.data) + v.byte_offset) | most_alignment;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// Plans read of a tensor's address only its alignment, which is 0 where it is not known yet.
struct Tensor : TensorView {
  uint32_t alignment = 0;

  Tensor() = default;
  Tensor(const TensorView& view) : TensorView(view), alignment(alignment_of(view)) {}  // NOLINT
};

// Tensors that the op's kind does not have are absent.
struct Call {
  int32_t kind = -1;
  bool linear = false;
  bool diverges = false;   // it is a LinearDivergence op, which is linear too
  bool combines = false;   // it is Combine, whose rows are [P, N]
  bool loss_op = false;    // any kind but Softmax has options and targets
  bool gradients = false;  // it is Backward or ForwardBackward
  bool forward = false;  // it is Forward or ForwardBackward, whose loss and statistics are outputs
  bool accumulate = false;  // it adds to grad_weight and grad_bias
  bool consume_kept = false;
  bool only_chosen = false;  // of a Backward: logits_at alone has a gradient
  uint64_t kept_key = 0;
  Execution execution{};
  LossOptions options{};
  DivergenceOptions divergence{};

  Tensor logits{}, probabilities{};                               // each is [N, V]
  Tensor input{}, weight{}, bias{};                               // [N, D] [V, D] [V]
  Tensor teacher_input{}, teacher_weight{}, teacher_bias{};       // [N, Dt] [V, Dt] [V]
  Tensor teacher_logits{}, teacher_temperature{};                 // [N, V] [N]
  Tensor target{}, token_weight{}, vocab_weight{}, normalizer{};  // [N] [N] [V, whole] []
  Tensor temperature{};                                           // [N]
  Tensor loss{};                                                  // [N] or []
  Tensor lse{}, target_logit{}, argmax{}, weighted_logit_sum{};   // each is [N]
  Tensor logprob{}, rank{}, sum_p_squared{}, mean_logit{};        // each is [N]
  Tensor max_logprob{}, mass_above{};                             // [N] [N]
  Tensor teacher_entropy{}, acceptance{};                         // each is [N]
  Tensor teacher_row_reference{}, teacher_row_log_sum{};          // each is [N]
  Tensor divergence_sum{}, slope_sum{}, slope_mean{};             // each is [N]
  Tensor row_reference{}, row_log_sum{}, entropy{};               // [N]; Backward reads them
  Tensor grad_loss{};                                             // [N] or []
  Tensor grad_lse{}, grad_target_logit{}, grad_entropy{};         // each is [N]
  Tensor anchor{};                                                // [N]
  Tensor ids{}, logits_at{}, grad_logits_at{};                    // each is [N, K], or [M]
  Tensor id_offsets{};                                            // [N + 1]
  Tensor kept{}, kept_rows{};  // Backward reads them; kept.h says what they are
  Tensor grad_logits{};        // [N, V]
  Tensor grad_input{}, grad_weight{}, grad_bias{};                          // [N, D] [V, D] [V]
  Tensor fault{};                                                           // [1]
  Tensor shard_row_reference{}, shard_row_log_sum{}, shard_target_logit{};  // each is [P, N]
  Tensor shard_entropy{}, shard_argmax{}, shard_weighted_logit_sum{};       // each is [P, N]
  Tensor shard_sum_p_squared{}, shard_mean_logit{}, shard_max_logprob{};    // each is [P, N]
  Tensor top_logits{}, top_ids{};                                           // each is [N, k]
  Tensor shard_top_logits{}, shard_top_ids{};                               // each is [P, N k]

  Call() = default;
  // Makes an op of that kind without tensors; `kind` is in range.
  Call(int32_t kind, const Execution& execution);
  // This is not explicit, so that what takes a call takes an op of the C++ interface too.
  template <class Op>
    requires requires { kind_of<Op>; }
  Call(const Op& op, const Execution& execution = {});  // NOLINT

  Fields fields() const;
  // Returns the tensor of that name, or an absent one where the op has no such field.
  const Tensor& operator[](std::string_view name) const;
  const char* op_name() const { return name_of_op(kind); }

  const Tensor& rows() const { return linear ? input : combines ? shard_row_reference : logits; }
  int64_t tokens() const { return combines ? target.shape[0] : rows().shape[0]; }
  int64_t vocab() const {
    return linear ? weight.shape[0] : combines ? options.vocab_total : rows().shape[1];
  }
  int64_t shards() const { return rows().shape[0]; }  // only Combine has them
  int64_t hidden() const { return rows().shape[1]; }  // only linear ops have it
  int64_t vocab_total() const { return options.vocab_total > 0 ? options.vocab_total : vocab(); }
  int64_t vocab_start() const {
    return options.vocab_total > 0 && !combines ? options.vocab_start : 0;
  }
  bool shard() const { return vocab_total() > vocab(); }
  bool lists() const { return static_cast<bool>(id_offsets); }  // tokens have lists of ids
  // Returns how many columns of each token are chosen, where these are no lists.
  int64_t chosen() const { return ids && !lists() ? ids.shape[1] : 0; }
  // Returns how many are chosen of all tokens.
  int64_t all_chosen() const { return !ids ? 0 : lists() ? ids.shape[0] : tokens() * chosen(); }
  int64_t listed() const { return top_logits ? top_logits.shape[1] : 0; }  // it is k
  // Returns what the statistics that this call writes are made of.
  SumSet sums_of_statistics() const;
  // Returns the same of all that it writes, beside the exponentials.
  SumSet sums() const;
  // Returns whether nothing but logits of the targets and of chosen columns is asked for, which
  // takes no product.
  bool targets_only() const;
  // Returns whether a divergence is asked for its sums, of rows whose states it is given.
  bool sums_of_shard() const { return divergence_sum || slope_sum; }
  // Returns whether the rows' state comes from an earlier Forward.
  bool state_given() const { return row_reference && (!forward || sums_of_shard()); }
  // Returns options whose map from raw logits to z is the teacher's.
  LossOptions teacher_options() const {
    LossOptions o = options;
    o.logit_scale = divergence.teacher_logit_scale;
    o.softcap = divergence.teacher_softcap;
    o.temperature = divergence.teacher_temperature;
    return o;
  }
  // Returns whether the teacher is a head, and not logits or what is kept.
  bool teacher_is_head() const { return diverges && teacher_weight; }
  // Returns the statistics that this call writes.
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
  for_each_tensor(op, *this,
                  [](const char*, Access, const TensorView& from, Tensor& to) { to = from; });
}

}  // namespace logitless
