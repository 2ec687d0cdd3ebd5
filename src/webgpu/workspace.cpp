// SPDX-License-Identifier: Apache-2.0
#include "src/webgpu/workspace.h"

#include <algorithm>

namespace logitless::webgpu {

void WorkspaceBuffers::release() {
  for (size_t i = 0; i < kRoles; ++i) {
    if (buffers_[i] != 0) device_->destroy_buffer(buffers_[i]);
    buffers_[i] = 0;
    bytes_[i] = 0;
  }
}

bool WorkspaceBuffers::fits(const Plan& plan) const {
  uint64_t total = 0;
  for (size_t i = 0; i < kRoles; ++i) total += std::max(bytes_[i], plan.bytes[i]);
  return total <= budget_;
}

uint64_t WorkspaceBuffers::made() const {
  uint64_t total = 0;
  for (const uint64_t bytes : bytes_) total += bytes;
  return total;
}

bool WorkspaceBuffers::prepare(const Plan& plan) {
  if (!fits(plan)) release();
  for (size_t i = 0; i < kRoles; ++i) {
    if (bytes_[i] >= plan.bytes[i]) continue;
    if (buffers_[i] != 0) device_->destroy_buffer(buffers_[i]);
    buffers_[i] = device_->create_buffer(plan.bytes[i]);
    bytes_[i] = buffers_[i] != 0 ? plan.bytes[i] : 0;
    if (buffers_[i] == 0) return false;
  }
  return true;
}

}  // namespace logitless::webgpu
