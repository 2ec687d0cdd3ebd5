// SPDX-License-Identifier: Apache-2.0
#include "src/run.h"

#include <algorithm>

#include "src/message.h"
#include "src/rules.h"
#include "src/validate.h"

namespace logitless {

const Backend* find_backend(DeviceType type, Status* status) {
  switch (type) {
    case DeviceType::cpu:
      return &cpu_backend();
    case DeviceType::reference:
      return &reference_backend();
    case DeviceType::cuda:
#ifdef LOGITLESS_WITH_CUDA
      return cuda_backend(status);
#else
      *status = error(StatusCode::backend_unavailable, "cuda: this library was built without it");
      return nullptr;
#endif
    case DeviceType::webgpu:
#ifdef LOGITLESS_WITH_WEBGPU
      return webgpu_backend(status);
#else
      *status = error(StatusCode::backend_unavailable, "webgpu: this library was built without it");
      return nullptr;
#endif
  }
  *status = unknown_device(static_cast<int32_t>(type));
  return nullptr;
}

bool keeps(DeviceType type, DType dtype, const LossOptions& options) {
  switch (type) {
    case DeviceType::cpu:
      return cpu_keeps(dtype, options);
#ifdef LOGITLESS_WITH_CUDA
    case DeviceType::cuda:
      return cuda_keeps(dtype, options);
#endif
#ifdef LOGITLESS_WITH_WEBGPU
    case DeviceType::webgpu:  // it keeps logits, which serve all options
      return true;
#endif
    default:
      return false;
  }
}

namespace {

Status check(const Call& call, const Backend** backend) {
  Status status;
  *backend = find_backend(call.execution.device.type, &status);
  return status.ok() ? validate(call) : status;
}

}  // namespace

Status ask_workspace(const Call& call, WorkspaceSize* size) {
  const Backend* backend = nullptr;
  const Status status = check(call, &backend);
  return status.ok() ? backend->workspace(call, 0, size) : status;
}

Status run(const Call& call, const Workspace& workspace) {
  const Backend* backend = nullptr;
  WorkspaceSize size;
  Decisions decided;
  Status status = check(call, &backend);
  if (status.ok()) status = backend->workspace(call, workspace.bytes, &size);
  if (status.ok()) status = validate_data(call, workspace, size);
  if (status.ok()) status = backend->decide(call, workspace.bytes, &decided);
  if (status.ok()) status = backend->run(call, decided, workspace);
  return status;
}

Status PlannedCall::create(const Call& call, uint64_t bytes) {
  call_ = call;
  if (call.execution.executor != nullptr) {
    executor_ = *call.execution.executor;
    call_.execution.executor = &executor_;
  }
  Status status = check(call_, &backend_);
  if (!status.ok()) return status;
  count_ = 0;
  for (const TensorField& field : tensor_fields(call.kind)) {
    Tensor& tensor = tensor_at(call_, field);
    if (!tensor) continue;
    given_[count_++] = &field;
    // An unknown address may be any multiple of the element's size.
    if (tensor.alignment == 0) tensor.alignment = static_cast<uint32_t>(size_of(tensor.dtype));
  }
  std::sort(given_.begin(), given_.begin() + static_cast<int64_t>(count_),
            [](const TensorField* a, const TensorField* b) { return a->in_c < b->in_c; });
  const bool recommended = bytes == recommended_bytes;
  WorkspaceSize size;
  status = backend_->workspace(call_, recommended ? 0 : bytes, &size);
  if (!status.ok()) return status;
  bytes_ = recommended ? size.recommended : bytes;
  alignment_ = size.alignment;
  if (bytes_ < size.minimum) {
    return error(
        StatusCode::workspace_too_small, "bytes is %llu; allowed: >= %llu (recommended: %llu)",
        static_cast<unsigned long long>(bytes_), static_cast<unsigned long long>(size.minimum),
        static_cast<unsigned long long>(size.recommended));
  }
  return backend_->decide(call_, bytes_, &decided_);
}

// Sets the addresses of `call`'s tensors, which must be aligned as the plan assumes.
Status PlannedCall::place(std::span<void* const> addresses, Call* call) const {
  if (addresses.size() != count_) {
    return error(StatusCode::invalid_argument,
                 "addresses: %zu are given; allowed: %zu, one for each tensor that the plan's %s "
                 "was created with",
                 addresses.size(), count_, call_.op_name());
  }
  for (size_t i = 0; i < count_; ++i) {
    Tensor& tensor = tensor_at(*call, *given_[i]);
    tensor.data = addresses[i];
    const uint32_t found = alignment_of(tensor),
                   least = static_cast<uint32_t>(size_of(tensor.dtype));
    // An address that is no multiple of the element's size gets another status, later.
    if (!has_addresses(*call) || elements(tensor) == 0 || found < least ||
        found >= tensor.alignment) {
      continue;
    }
    return error(StatusCode::invalid_argument,
                 "%s is at address %p + %llu; allowed: multiples of %u, as when the plan was "
                 "created",
                 given_[i]->name, tensor.data, static_cast<unsigned long long>(tensor.byte_offset),
                 tensor.alignment);
  }
  return {};
}

Status PlannedCall::run(std::span<void* const> addresses, const Workspace& workspace, void* stream,
                        double normalizer, int32_t part) const {
  Call call = call_;
  Status status;
  if (part < 0 || part > (call.grad_input_first ? 3 : 0)) {
    return error(
        StatusCode::invalid_argument, "part is %d; allowed: %s", part,
        call.grad_input_first ? "0 to 3" : "0, since the plan's op has no grad_input_first");
  }
  call.part = part;
  if (normalizer != 0) {
    if (call.options.normalizer == 0) {
      return error(StatusCode::invalid_argument,
                   "normalizer is %g; allowed: 0, since the plan was created without one",
                   normalizer);
    }
    call.options.normalizer = normalizer;
    status = check_normalizer(call);
  }
  call.execution.stream = stream;
  if (status.ok()) status = place(addresses, &call);
  if (!status.ok()) return status;
  WorkspaceSize needed = size();
  if (!has_addresses(call)) {
    // Tensors that share a buffer may need copies, for which the plan's bytes may not suffice.
    WorkspaceSize own;
    status = backend_->workspace(call, bytes_, &own);
    needed.minimum = std::max(needed.minimum, own.minimum);
  }
  if (status.ok()) status = validate_data(call, workspace, needed);
  if (!status.ok() || (part > 1 && !backend_->divides(call))) return status;
  return backend_->run(call, decided_, {workspace.data, bytes_, workspace.byte_offset});
}

}  // namespace logitless
