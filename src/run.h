// SPDX-License-Identifier: Apache-2.0
// A call is settled once: its backend is found, its rules are checked, and what does not depend on
// addresses is decided. Then it runs, once or, owned by a plan, any number of times.
#pragma once

#include <array>
#include <span>

#include "src/backend.h"

namespace logitless {

// Finds how much workspace `call` wants. The backend comes first: a device that this library does
// not have is reported before what is wrong with the op.
Status ask_workspace(const Call& call, WorkspaceSize* size);

// Runs `call` once.
Status run(const Call& call, const Workspace& workspace);

// This is logitless_plan: docs/semantics.md, "Plans".
class PlannedCall {
 public:
  PlannedCall() = default;
  PlannedCall(const PlannedCall&) = delete;
  PlannedCall& operator=(const PlannedCall&) = delete;

  // Settles `call` for so many bytes of workspace, or for what is recommended.
  Status create(const Call& call, uint64_t bytes);
  // Returns what a run's workspace must have.
  WorkspaceSize size() const { return {bytes_, bytes_, alignment_}; }
  // Runs on tensors at `addresses`. A `normalizer` other than 0 replaces that of the options.
  Status run(std::span<void* const> addresses, const Workspace& workspace, void* stream,
             double normalizer) const;

 private:
  Status place(std::span<void* const> addresses, Call* call) const;

  Call call_;
  Executor executor_{};  // the caller's own may be gone by the time of a run
  const Backend* backend_ = nullptr;
  Decisions decided_;
  uint64_t bytes_ = 0, alignment_ = 1;
  // The tensors that the call was created with, in the order of logitless_op.
  std::array<const TensorField*, 32> given_{};
  size_t count_ = 0;
};

}  // namespace logitless
