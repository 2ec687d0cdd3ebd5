// SPDX-License-Identifier: Apache-2.0
// The WebGPU backend in the suite: the library's own device, used through its handles.
#include "device_webgpu.h"

#include "src/webgpu/workspace.h"

namespace logitless::conformance {
namespace {

class OwnWebGpuDevice final : public WebGpuTestDevice {
 public:
  using WebGpuTestDevice::WebGpuTestDevice;
  uint64_t bytes_of_workspace(const void* workspace) const override {
    return static_cast<const webgpu::WorkspaceBuffers*>(workspace)->made();
  }
};

}  // namespace

Found find_webgpu_device() {
  Status status;
  webgpu::NativeDevice* found = webgpu::find_device(0, &status);
  if (found == nullptr) return {"webgpu", nullptr, status.message()};
  static const OwnWebGpuDevice device(found);
  return {"webgpu", &device, ""};
}

}  // namespace logitless::conformance
