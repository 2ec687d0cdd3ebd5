// SPDX-License-Identifier: Apache-2.0
// Cross-entropy for language models without the logits: the C++ interface, a thin inline layer over
// c.h.
//
//   LinearCrossEntropyForwardBackward op{.input = x, .weight = w, .target = t, .loss = l,
//                                        .grad_input = gx, .grad_weight = gw,
//                                        .options = {.label_smoothing = 0.1f}};
//   WorkspaceSize size;
//   Status status = workspace(op, {}, &size);            // the bytes that this call needs
//   if (status.ok()) status = run(op, {buffer, size.recommended}, {});
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "logitless/combine.h"
#include "logitless/fields.h"
#include "logitless/ops.h"
#include "logitless/status.h"
#include "logitless/tensor.h"

namespace logitless {

using Executor = logitless_executor;

// Where a call runs. The default is the CPU, on the library's own threads.
struct Execution {
  Device device{};
  void* stream = nullptr;              // a cudaStream_t or a WGPUQueue
  const Executor* executor = nullptr;  // CPU only; nullptr: the library's own pool
};

// How much memory a call needs besides its tensors.
struct WorkspaceSize {
  uint64_t minimum = 0;      // bytes; the least that `run` accepts
  uint64_t recommended = 0;  // bytes of the default plan
  uint64_t alignment = 64;   // bytes; the workspace's address must be a multiple
};

// What Forward keeps for Backward: docs/semantics.md, "Kept state".
struct Kept {
  int64_t columns = 0;  // the number kept, from the vocabulary's first; 0: nothing is
  // of `kept`, in the input's dtype, and of `kept_rows`
  std::array<int64_t, 2> shape{}, rows_shape{};
  uint64_t bytes = 0;  // of both tensors together
  uint64_t key = 0;    // Backward's kept_key
};

// The library may use [data + byte_offset, + bytes) during the call.
struct Workspace {
  void* data = nullptr;
  uint64_t bytes = 0;
  uint64_t byte_offset = 0;
};

namespace detail {

inline logitless_tensor to_c(const TensorView& v) {
  return {sizeof(logitless_tensor),
          static_cast<int32_t>(v.dtype),
          v.data,
          v.byte_offset,
          static_cast<int32_t>(v.device.type),
          v.device.index,
          v.rank,
          0,
          {v.shape[0], v.shape[1]},
          {v.stride[0], v.stride[1]}};
}

inline logitless_loss_options to_c(const LossOptions& o) {
  return {sizeof(logitless_loss_options),
          static_cast<int32_t>(o.reduction),
          o.ignore_index,
          o.label_smoothing,
          o.z_loss,
          o.logit_scale,
          o.softcap,
          o.temperature,
          static_cast<int32_t>(o.out_of_range),
          static_cast<int32_t>(o.empty_mean),
          static_cast<int32_t>(o.input_kind),
          o.probability_floor,
          o.allow_tf32,
          o.normalizer,
          o.vocab_start,
          o.vocab_total};
}

inline logitless_divergence_options to_c(const DivergenceOptions& o) {
  return {sizeof(logitless_divergence_options),
          static_cast<int32_t>(o.kind),
          o.beta,
          o.label_weight,
          o.teacher_logit_scale,
          o.teacher_softcap,
          o.teacher_temperature,
          0};
}

inline logitless_execution to_c(const Execution& e) {
  return {sizeof(logitless_execution),
          static_cast<int32_t>(e.device.type),
          e.device.index,
          0,
          e.stream,
          e.executor};
}

// The C form of an op, with the tensors that its pointers point to.
template <class Op>
struct COp {
  logitless_op op{};
  logitless_loss_options options{};
  logitless_divergence_options divergence{};
  std::array<logitless_tensor, tensor_count<Op>> tensors{};

  explicit COp(const Op& source) {
    op.struct_size = sizeof(op);
    op.kind = kind_of<Op>;
    if constexpr (LossOp<Op>) {
      options = to_c(source.options);
      op.options = &options;
    }
    if constexpr (LinearOp<Op> && GradientOp<Op>)
      op.accumulate_grad_weight = source.accumulate_grad_weight;
    if constexpr (DivergenceOp<Op>) {
      divergence = to_c(source.divergence);
      op.divergence = &divergence;
    }
    if constexpr (KeepingOp<Op> && GradientOp<Op>) op.kept_key = source.kept_key;
    if constexpr (ConsumingOp<Op>) op.consume_kept = source.consume_kept;
    if constexpr (OnlyChoosingOp<Op>) op.only_chosen = source.only_chosen;
    if constexpr (OrderedOp<Op>) op.grad_input_first = source.grad_input_first;
    size_t used = 0;
    for_each_tensor(
        source, op,
        [&](const char*, Access, const TensorView& view, const logitless_tensor*& field) {
          if (!view) return;
          tensors[used] = to_c(view);
          field = &tensors[used++];
        });
  }
  COp(const COp&) = delete;
  COp& operator=(const COp&) = delete;
};

}  // namespace detail

// Finds the bytes of workspace that `run` needs for `op`. Pure and cheap. With null data pointers
// the answer is enough for any address, else for the given ones. On an error *size is unchanged.
template <class Op>
Status workspace(const Op& op, const Execution& execution, WorkspaceSize* size) {
  const detail::COp<Op> c(op);
  const logitless_execution e = detail::to_c(execution);
  logitless_workspace_size s{};
  s.struct_size = sizeof(s);
  Status status;
  logitless_workspace(&c.op, &e, size != nullptr ? &s : nullptr, status.c());
  if (status.ok()) *size = {s.minimum, s.recommended, s.alignment};
  return status;
}

// Finds what `op` keeps for Backward in `bytes` of `kept` and `kept_rows` together, which may be
// absent yet: a formula of the op's kind, shape and dtype. On an error *kept is unchanged. (A
// template, because nvcc 13.0 crashes on what it would instantiate otherwise.)
template <class Op>
  requires KeepingOp<Op> && ForwardOp<Op>
Status kept_size(const Op& op, const Execution& execution, uint64_t bytes, Kept* kept) {
  const detail::COp<Op> c(op);
  const logitless_execution e = detail::to_c(execution);
  logitless_kept k = LOGITLESS_KEPT_INIT;
  Status status;
  logitless_kept_size(&c.op, &e, bytes, kept != nullptr ? &k : nullptr, status.c());
  if (status.ok()) {
    *kept = {
        k.columns, {k.shape[0], k.shape[1]}, {k.rows_shape[0], k.rows_shape[1]}, k.bytes, k.key};
  }
  return status;
}

// Runs `op` in a workspace of at least `minimum` bytes; more memory means fewer and larger chunks,
// never another class of result. Enqueues on asynchronous devices; neither synchronizes nor, except
// for the reference and WebGPU's workspace, allocates. Thread-safe; a workspace serves one call at
// a time. A call that is refused writes no output.
template <class Op>
Status run(const Op& op, const Workspace& workspace, const Execution& execution) {
  const detail::COp<Op> c(op);
  const logitless_execution e = detail::to_c(execution);
  const logitless_workspace_buffer w{sizeof(w), 0, workspace.data, workspace.bytes,
                                     workspace.byte_offset};
  Status status;
  logitless_run(&c.op, &w, &e, status.c());
  return status;
}

// The addresses of an op's tensors in the order of logitless_op, as Plan::run takes them.
template <class Op>
class Addresses {
 public:
  explicit Addresses(const Op& op) {
    logitless_op places{};
    std::array<std::pair<const void*, void*>, tensor_count<Op>> given{};  // (place, address)
    for_each_tensor(op, places,
                    [&](const char*, Access, const TensorView& view, const auto& place) {
                      if (view) given[count_++] = {&place, view.data};
                    });
    std::sort(given.begin(), given.begin() + static_cast<std::ptrdiff_t>(count_));
    for (size_t i = 0; i < count_; ++i) addresses_[i] = given[i].second;
  }
  operator std::span<void* const>() const { return {addresses_.data(), count_}; }  // NOLINT

 private:
  std::array<void*, tensor_count<Op>> addresses_{};
  size_t count_ = 0;
};

// Passed as the `bytes` of Plan::create: the op's recommended number.
inline constexpr uint64_t recommended_bytes = LOGITLESS_RECOMMENDED;

// A call whose rules are checked and whose work is divided once: docs/semantics.md, "Plans".
class Plan {
 public:
  Plan() = default;
  ~Plan() { logitless_plan_destroy(plan_); }
  Plan(Plan&& other) noexcept : plan_(std::exchange(other.plan_, nullptr)) {}
  Plan& operator=(Plan&& other) noexcept {
    std::swap(plan_, other.plan_);
    return *this;
  }

  // Plans `op` for runs in `bytes` of workspace. On an error the plan is unchanged.
  template <class Op>
  Status create(const Op& op, const Execution& execution, uint64_t bytes = recommended_bytes) {
    const detail::COp<Op> c(op);
    const logitless_execution e = detail::to_c(execution);
    logitless_plan* made = nullptr;
    Status status;
    logitless_plan_create(&c.op, &e, bytes, &made, status.c());
    if (status.ok()) logitless_plan_destroy(std::exchange(plan_, made));
    return status;
  }
  // Gives the workspace of a run; its minimum and recommended bytes are equal.
  Status size(WorkspaceSize* size) const {
    logitless_workspace_size s = LOGITLESS_WORKSPACE_SIZE_INIT;
    Status status;
    logitless_plan_size(plan_, size != nullptr ? &s : nullptr, status.c());
    if (status.ok()) *size = {s.minimum, s.recommended, s.alignment};
    return status;
  }
  // Runs on tensors at `addresses`, one for each that the op had at create, in the order of
  // logitless_op, as Addresses(op) lists them. A normalizer other than 0 replaces that of the
  // options. Threads may share a plan, each with its own workspace. A plan of an op with
  // grad_input_first can run in parts 1, 2 and 3, in this order and in the same workspace.
  Status run(std::span<void* const> addresses, const Workspace& workspace, void* stream = nullptr,
             double normalizer = 0, int part = 0) const {
    const logitless_plan_arguments a{sizeof(a),
                                     static_cast<uint32_t>(addresses.size()),
                                     addresses.data(),
                                     stream,
                                     normalizer,
                                     part,
                                     0};
    const logitless_workspace_buffer w{sizeof(w), 0, workspace.data, workspace.bytes,
                                       workspace.byte_offset};
    Status status;
    logitless_plan_run(plan_, &a, &w, status.c());
    return status;
  }

 private:
  logitless_plan* plan_ = nullptr;
};

// Multiplies `values` [n] by `factor` [] on a CUDA device, in place, each element rounded once.
// Writes nothing if the factor is 1.
inline Status scale(const TensorView& values, const TensorView& factor,
                    const Execution& execution) {
  const logitless_tensor v = detail::to_c(values), f = detail::to_c(factor);
  const logitless_execution e = detail::to_c(execution);
  Status status;
  logitless_scale(values ? &v : nullptr, factor ? &f : nullptr, &e, status.c());
  return status;
}

// Loads a CUDA device's kernels before a run needs them (logitless_warmup); else does nothing.
inline Status warmup(const Execution& execution) {
  const logitless_execution e = detail::to_c(execution);
  Status status;
  logitless_warmup(&e, status.c());
  return status;
}

}  // namespace logitless
