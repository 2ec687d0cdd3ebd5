// SPDX-License-Identifier: Apache-2.0
// A call is settled once: its backend is found, its rules are checked, and decisions that do not
// depend on addresses are made. Then it runs, once or, if a plan owns it, many times.
#pragma once

#include <array>
#include <span>

#include "src/backend.h"

namespace logitless {

// Finds the workspace of `call`. The backend is looked up first: a device that this library lacks
// is reported before errors of the op.
Status ask_workspace(const Call& call, WorkspaceSize* size);

Status run(const Call& call, const Workspace& workspace);

// logitless_plan: docs/semantics.md, "Plans".
class PlannedCall {
 public:
  PlannedCall() = default;
  PlannedCall(const PlannedCall&) = delete;
  PlannedCall& operator=(const PlannedCall&) = delete;

  // Settles `call` for `bytes` of workspace, or for the recommended size.
  Status create(const Call& call, uint64_t bytes);
  WorkspaceSize size() const { return {bytes_, bytes_, alignment_}; }
  // Runs on tensors at `addresses`. A `normalizer` other than 0 replaces that of the options.
  // `part`: see logitless_plan_arguments.
  Status run(std::span<void* const> addresses, const Workspace& workspace, void* stream,
             double normalizer, int32_t part) const;

 private:
  Status place(std::span<void* const> addresses, Call* call) const;

  Call call_;
  Executor executor_{};  // a copy: the caller's may be gone when the plan runs
  const Backend* backend_ = nullptr;
  Decisions decided_;
  uint64_t bytes_ = 0, alignment_ = 1;
  // The call's tensors at creation, in the order of logitless_op.
  std::array<const TensorField*, 32> given_{};
  size_t count_ = 0;
};

}  // namespace logitless
