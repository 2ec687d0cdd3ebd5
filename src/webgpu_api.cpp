// SPDX-License-Identifier: Apache-2.0
// The part of the C interface for WebGPU only: workspaces of several buffers, and the caller's own
// device.
#include "src/backend.h"
#include "src/c_status.h"

#ifdef LOGITLESS_WITH_WEBGPU
#include "src/webgpu/native.h"
#include "src/webgpu/workspace.h"
#endif

using namespace logitless;

namespace {

#ifndef LOGITLESS_WITH_WEBGPU
Status absent() {
  return Status(StatusCode::backend_unavailable, "webgpu: this library was built without it");
}
#endif

}  // namespace

extern "C" {

#ifdef LOGITLESS_WITH_WEBGPU

int32_t logitless_webgpu_create_workspace(int32_t device_index, uint64_t bytes, void** workspace,
                                          logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    if (workspace == nullptr) return Status(StatusCode::invalid_argument, "workspace is NULL");
    Status found;
    webgpu::NativeDevice* device = webgpu::find_device(device_index, &found);
    if (device != nullptr) *workspace = new webgpu::WorkspaceBuffers(device, bytes);
    return found;
  });
  return report(result, status);
}

void logitless_webgpu_destroy_workspace(void* workspace) {
  if (workspace == nullptr) return;
  (void)guarded([&] {
    auto* buffers = static_cast<webgpu::WorkspaceBuffers*>(workspace);
    auto* device = static_cast<webgpu::NativeDevice*>(buffers->device());
    const std::lock_guard lock(device->mutex());
    delete buffers;
    return Status();
  });
}

int32_t logitless_webgpu_use_device(void* instance, void* device, void* queue,
                                    int32_t* device_index, logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    if (instance == nullptr || device == nullptr || queue == nullptr || device_index == nullptr) {
      return Status(StatusCode::invalid_argument,
                    "instance, device, queue or device_index is NULL; all are wanted");
    }
    Status made;
    const int32_t index = webgpu::register_device(static_cast<WGPUInstance>(instance),
                                                  static_cast<WGPUDevice>(device),
                                                  static_cast<WGPUQueue>(queue), &made);
    if (made.ok()) *device_index = index;
    return made;
  });
  return report(result, status);
}

int32_t logitless_webgpu_device(int32_t device_index, void** instance, void** device, void** queue,
                                logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Status found;
    const webgpu::NativeDevice* own = webgpu::find_device(device_index, &found);
    if (own == nullptr) return found;
    if (instance != nullptr) *instance = own->instance();
    if (device != nullptr) *device = own->wgpu_device();
    if (queue != nullptr) *queue = own->queue();
    return found;
  });
  return report(result, status);
}

#else

int32_t logitless_webgpu_create_workspace(int32_t, uint64_t, void**, logitless_status* status) {
  return report(absent(), status);
}
void logitless_webgpu_destroy_workspace(void*) {}
int32_t logitless_webgpu_use_device(void*, void*, void*, int32_t*, logitless_status* status) {
  return report(absent(), status);
}
int32_t logitless_webgpu_device(int32_t, void**, void**, void**, logitless_status* status) {
  return report(absent(), status);
}

#endif

}  // extern "C"
