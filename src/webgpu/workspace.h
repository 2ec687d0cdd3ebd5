// SPDX-License-Identifier: Apache-2.0
// The buffers of a call, one per role: created when a plan first needs them, reused by later calls,
// and together never larger than the budget.
#pragma once

#include "src/webgpu/plan.h"

namespace logitless::webgpu {

class WorkspaceBuffers {
 public:
  WorkspaceBuffers(Device* device, uint64_t budget) : device_(device), budget_(budget) {}
  ~WorkspaceBuffers() { release(); }
  WorkspaceBuffers(const WorkspaceBuffers&) = delete;
  WorkspaceBuffers& operator=(const WorkspaceBuffers&) = delete;

  Device* device() const { return device_; }
  uint64_t budget() const { return budget_; }
  // Makes each role's buffer at least as large as the plan needs. Returns false if memory runs out.
  bool prepare(const Plan& plan);
  Buffer operator[](Role role) const { return buffers_[static_cast<size_t>(role)]; }
  uint64_t made() const;
  uint64_t bytes(Role role) const { return bytes_[static_cast<size_t>(role)]; }

 private:
  void release();
  bool fits(const Plan& plan) const;

  Device* const device_;
  const uint64_t budget_;
  std::array<Buffer, kRoles> buffers_{};
  std::array<uint64_t, kRoles> bytes_{};
};

}  // namespace logitless::webgpu
