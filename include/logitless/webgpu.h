// SPDX-License-Identifier: Apache-2.0
// WebGPU in native programs, on wgpu-native found at run time. A tensor's data is a WGPUBuffer with
// usage Storage | CopySrc | CopyDst and a size that is a multiple of 4; its byte_offset is any
// multiple of the element's size, of `kept` of 256. A workspace is several buffers:
//
//   WorkspaceSize size;
//   Status status = workspace(op, {.device = {DeviceType::webgpu}}, &size);
//   WebGpuWorkspace scratch(0, size.recommended);
//   if (status.ok()) status = run(op, scratch.workspace(), {.device = {DeviceType::webgpu}});
#pragma once

#include "logitless/logitless.h"

namespace logitless {

// At most `bytes` of buffers on a device, created by the first call that needs them and reused.
class WebGpuWorkspace {
 public:
  WebGpuWorkspace(int32_t device_index, uint64_t bytes) : bytes_(bytes) {
    logitless_webgpu_create_workspace(device_index, bytes, &data_, status_.c());
  }
  ~WebGpuWorkspace() { logitless_webgpu_destroy_workspace(data_); }
  WebGpuWorkspace(const WebGpuWorkspace&) = delete;
  WebGpuWorkspace& operator=(const WebGpuWorkspace&) = delete;

  Workspace workspace() const { return {.data = data_, .bytes = bytes_}; }
  const Status& status() const { return status_; }

 private:
  void* data_ = nullptr;
  uint64_t bytes_;
  Status status_;
};

}  // namespace logitless
