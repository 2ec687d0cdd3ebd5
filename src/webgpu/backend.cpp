// SPDX-License-Identifier: Apache-2.0
// The WebGPU backend of native programs: finds the device, and runs the op while no other thread
// records on it.
#include "src/backend.h"

#include <cstdio>

#include "src/webgpu/native.h"
#include "src/webgpu/run.h"

namespace logitless {
namespace {

struct WebGpuBackend final : Backend {
  const char* name() const override { return "webgpu"; }
  Status workspace(const Call& call, uint64_t, WorkspaceSize* size) const override {
    Status status;
    const webgpu::NativeDevice* device = webgpu::find_device(call.execution.device.index, &status);
    if (device == nullptr) return status;
    const webgpu::Problem problem = webgpu::problem_of(call);
    *size = {.alignment = 1};
    return webgpu::workspace_sizes(problem, device->limits(), &size->minimum, &size->recommended);
  }
  Status run(const Call& call, const Decisions&, const Workspace& workspace) const override {
    Status status;
    webgpu::NativeDevice* device = webgpu::find_device(call.execution.device.index, &status);
    if (device == nullptr) return status;
    auto* buffers = static_cast<webgpu::WorkspaceBuffers*>(workspace.data);
    auto* maker = static_cast<webgpu::NativeDevice*>(buffers->device());
    if (maker != device && maker->is_lost()) return maker->loss();
    if (maker != device || buffers->budget() < workspace.bytes) {
      return error(StatusCode::invalid_argument,
                   "workspace: %llu bytes are not this webgpu_workspace's; "
                   "allowed: one of the "
                   "execution's device, of at most its budget",
                   static_cast<unsigned long long>(workspace.bytes));
    }
    const std::lock_guard lock(device->mutex());
    status = webgpu::run(call, workspace.bytes, buffers);
    const Status loss = status.ok() ? Status() : device->loss_after_failure();
    return loss.ok() ? status : loss;
  }
  Status describe(char* text, size_t bytes) const override {
    Status status;
    const webgpu::NativeDevice* device = webgpu::find_device(0, &status);
    if (device == nullptr) return status;
    const webgpu::Limits& limits = device->limits();
    std::snprintf(text, bytes, "%s, bindings of %llu MiB, buffers of %llu MiB",
                  device->description().c_str(),
                  static_cast<unsigned long long>(limits.storage_binding_bytes >> 20),
                  static_cast<unsigned long long>(limits.buffer_bytes >> 20));
    return status;
  }
};

}  // namespace

const Backend* webgpu_backend(Status* status) {
  // A caller may have registered a device even if the library finds none.
  if (webgpu::find_library(status) == nullptr) return nullptr;
  if (!webgpu::has_registered_device() && webgpu::find_device(0, status) == nullptr) return nullptr;
  *status = {};
  static const WebGpuBackend backend;
  return &backend;
}

}  // namespace logitless
