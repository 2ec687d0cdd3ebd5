// SPDX-License-Identifier: Apache-2.0
// These are the buffers of one call: one a role, made when a plan first wants them and kept for the
// next call, never more than the budget together.
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
  // Makes every role's buffer at least as large as the plan wants it; it returns false where there
  // is no memory.
  bool prepare(const Plan& plan);
  Buffer operator[](Role role) const { return buffers_[static_cast<size_t>(role)]; }
  // Counts the bytes of the buffers there are.
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
