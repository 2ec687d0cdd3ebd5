// SPDX-License-Identifier: Apache-2.0
// Which devices there are: the library's own, made when it is first asked for,
// and the callers'.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "src/message.h"
#include "src/webgpu/library.h"
#include "src/webgpu/native.h"

namespace logitless::webgpu {
namespace {

struct Devices {
  std::mutex mutex;
  bool tried = false;
  Status own_status;
  std::vector<std::unique_ptr<NativeDevice>> all;  // [0] the library's own
  std::vector<WGPUDevice> handles;
};

// Never destroyed: the driver may be gone before.
Devices& devices() {
  static Devices* const all = new Devices;
  return *all;
}

// Fills *made; the callback comes from within the call or from the events after
// it.
template <class Handle>
struct Wanted {
  Handle made = nullptr;
  bool done = false;
  char why[160] = {};
};
template <class Handle, class RequestStatus>
void deliver(RequestStatus, Handle made, WGPUStringView text, void* userdata, void*) {
  auto* wanted = static_cast<Wanted<Handle>*>(userdata);
  wanted->made = made;
  wanted->done = true;
  if (text.data != nullptr) {
    const size_t length = text.length == WGPU_STRLEN ? std::strlen(text.data) : text.length;
    std::snprintf(wanted->why, sizeof(wanted->why), "%.*s", static_cast<int>(length), text.data);
  }
}

WGPUAdapter request_adapter(const Library& call, WGPUInstance instance, Status* status) {
  WGPURequestAdapterOptions options = WGPU_REQUEST_ADAPTER_OPTIONS_INIT;
  options.powerPreference = WGPUPowerPreference_HighPerformance;
  Wanted<WGPUAdapter> wanted;
  WGPURequestAdapterCallbackInfo info = WGPU_REQUEST_ADAPTER_CALLBACK_INFO_INIT;
  info.mode = WGPUCallbackMode_AllowProcessEvents;
  info.callback = deliver<WGPUAdapter, WGPURequestAdapterStatus>;
  info.userdata1 = &wanted;
  call.InstanceRequestAdapter(instance, &options, info);
  for (int i = 0; !wanted.done && i < 1000; ++i) call.InstanceProcessEvents(instance);
  if (wanted.made == nullptr) {
    *status = error(StatusCode::backend_unavailable, "webgpu: no adapter: %s", wanted.why);
  }
  return wanted.made;
}

// The adapter's own limits, or with LOGITLESS_WEBGPU_LIMITS=default those every
// device has.
WGPUDevice request_device(const Library& call, WGPUInstance instance, WGPUAdapter adapter,
                          Status* status) {
  WGPULimits limits = WGPU_LIMITS_INIT;
  WGPUDeviceDescriptor descriptor = WGPU_DEVICE_DESCRIPTOR_INIT;
  const char* wish = std::getenv("LOGITLESS_WEBGPU_LIMITS");
  const bool defaults = wish != nullptr && std::strcmp(wish, "default") == 0;
  if (!defaults && call.AdapterGetLimits(adapter, &limits) == WGPUStatus_Success) {
    descriptor.requiredLimits = &limits;
  }
  // What no scope caught would end the process.
  descriptor.uncapturedErrorCallbackInfo.callback = [](const WGPUDevice*, WGPUErrorType,
                                                       WGPUStringView, void*, void*) {};
  Wanted<WGPUDevice> wanted;
  WGPURequestDeviceCallbackInfo info = WGPU_REQUEST_DEVICE_CALLBACK_INFO_INIT;
  info.mode = WGPUCallbackMode_AllowProcessEvents;
  info.callback = deliver<WGPUDevice, WGPURequestDeviceStatus>;
  info.userdata1 = &wanted;
  call.AdapterRequestDevice(adapter, &descriptor, info);
  for (int i = 0; !wanted.done && i < 1000; ++i) call.InstanceProcessEvents(instance);
  if (wanted.made == nullptr) {
    *status = error(StatusCode::backend_unavailable, "webgpu: no device: %s", wanted.why);
  }
  return wanted.made;
}

std::unique_ptr<NativeDevice> make_own(Status* status) {
  const Library* call = find_library(status);
  if (call == nullptr) return nullptr;
  const WGPUInstance instance = call->CreateInstance(nullptr);
  if (instance == nullptr) {
    *status = Status(StatusCode::backend_unavailable, "webgpu: wgpuCreateInstance gave nothing");
    return nullptr;
  }
  const WGPUAdapter adapter = request_adapter(*call, instance, status);
  if (adapter == nullptr) return nullptr;
  const WGPUDevice device = request_device(*call, instance, adapter, status);
  if (device == nullptr) return nullptr;
  return std::make_unique<NativeDevice>(*call, instance, adapter, device,
                                        call->DeviceGetQueue(device));
}

}  // namespace

NativeDevice* find_device(int32_t index, Status* status) {
  Devices& d = devices();
  const std::lock_guard lock(d.mutex);
  if (d.all.empty()) {
    d.all.emplace_back();
    d.handles.push_back(nullptr);
  }
  if (index == 0 && !d.tried) {
    d.tried = true;
    d.all[0] = make_own(&d.own_status);
  }
  if (index == 0) *status = d.own_status;
  if (index < 0 || index >= static_cast<int32_t>(d.all.size())) {
    *status = error(StatusCode::wrong_device,
                    "execution.device.index is %d; allowed: 0 and those of "
                    "logitless_webgpu_device",
                    index);
    return nullptr;
  }
  return d.all[static_cast<size_t>(index)].get();
}

bool has_registered_device() {
  Devices& d = devices();
  const std::lock_guard lock(d.mutex);
  return d.all.size() > 1;
}

int32_t register_device(WGPUInstance instance, WGPUDevice device, WGPUQueue queue, Status* status) {
  const Library* call = find_library(status);
  if (call == nullptr) return -1;
  Devices& d = devices();
  const std::lock_guard lock(d.mutex);
  if (d.all.empty()) {
    d.all.emplace_back();
    d.handles.push_back(nullptr);
  }
  for (size_t i = 1; i < d.handles.size(); ++i) {
    if (d.handles[i] == device) return static_cast<int32_t>(i);
  }
  call->DeviceAddRef(device);
  call->QueueAddRef(queue);
  d.all.push_back(std::make_unique<NativeDevice>(*call, instance, nullptr, device, queue));
  d.handles.push_back(device);
  return static_cast<int32_t>(d.all.size() - 1);
}

}  // namespace logitless::webgpu
