// SPDX-License-Identifier: Apache-2.0
// Finds the devices: the library's own, created at its first use, and the callers'.
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
  WGPUInstance instance = nullptr;                 // for the library's own devices
  std::vector<std::unique_ptr<NativeDevice>> all;  // [0] is the library's own
  // Lost devices are kept, because workspaces may still refer to them.
  std::vector<std::unique_ptr<NativeDevice>> lost;
};

// Never destroyed, because the driver may be unloaded earlier.
Devices& devices() {
  static Devices* const all = [] {
    auto* made = new Devices;
    made->all.emplace_back();
    return made;
  }();
  return *all;
}

// The result of a request; `why` is the reason if `made` is nullptr.
template <class Handle>
struct Wanted {
  Handle made = nullptr;
  char why[160] = {};
};
template <class Handle, class RequestStatus>
void deliver(RequestStatus, Handle made, WGPUStringView text, void* userdata, void*) {
  Awaited<Wanted<Handle>>::deliver(userdata, [&](Wanted<Handle>& wanted) {
    wanted.made = made;
    copy_text(text, wanted.why);
  });
}

template <class Handle>
Handle wait_for(const Library& call, WGPUInstance instance, Awaited<Wanted<Handle>>* wanted,
                const char* what, Status* status) {
  const Wanted<Handle>* answer = wanted->wait(call, instance);
  if (answer != nullptr && answer->made != nullptr) return answer->made;
  *status = error(StatusCode::backend_unavailable, "webgpu: no %s: %s", what,
                  answer != nullptr ? answer->why : "the request was not answered");
  return nullptr;
}

WGPUAdapter request_adapter(const Library& call, WGPUInstance instance, Status* status) {
  WGPURequestAdapterOptions options = WGPU_REQUEST_ADAPTER_OPTIONS_INIT;
  options.powerPreference = WGPUPowerPreference_HighPerformance;
  Awaited<Wanted<WGPUAdapter>> wanted;
  WGPURequestAdapterCallbackInfo info = WGPU_REQUEST_ADAPTER_CALLBACK_INFO_INIT;
  info.mode = WGPUCallbackMode_AllowProcessEvents;
  info.callback = deliver<WGPUAdapter, WGPURequestAdapterStatus>;
  info.userdata1 = wanted.userdata();
  call.InstanceRequestAdapter(instance, &options, info);
  return wait_for(call, instance, &wanted, "adapter", status);
}

// Requests a device with the adapter's limits or, with LOGITLESS_WEBGPU_LIMITS=default, those that
// every device has.
WGPUDevice request_device(const Library& call, WGPUInstance instance, WGPUAdapter adapter,
                          Loss* loss, Status* status) {
  WGPULimits limits = WGPU_LIMITS_INIT;
  WGPUDeviceDescriptor descriptor = WGPU_DEVICE_DESCRIPTOR_INIT;
  const char* wish = std::getenv("LOGITLESS_WEBGPU_LIMITS");
  const bool defaults = wish != nullptr && std::strcmp(wish, "default") == 0;
  if (!defaults && call.AdapterGetLimits(adapter, &limits) == WGPUStatus_Success) {
    descriptor.requiredLimits = &limits;
  }
  // Without this callback, an error that no scope caught would end the process.
  descriptor.uncapturedErrorCallbackInfo.callback = [](const WGPUDevice*, WGPUErrorType,
                                                       WGPUStringView, void*, void*) {};
  descriptor.deviceLostCallbackInfo.mode = WGPUCallbackMode_AllowSpontaneous;
  descriptor.deviceLostCallbackInfo.userdata1 = loss;
  descriptor.deviceLostCallbackInfo.callback = [](const WGPUDevice*, WGPUDeviceLostReason,
                                                  WGPUStringView text, void* userdata, void*) {
    auto* loss = static_cast<Loss*>(userdata);
    if (loss->is) return;
    copy_text(text, loss->why);
    loss->is = true;
  };
  Awaited<Wanted<WGPUDevice>> wanted;
  WGPURequestDeviceCallbackInfo info = WGPU_REQUEST_DEVICE_CALLBACK_INFO_INIT;
  info.mode = WGPUCallbackMode_AllowProcessEvents;
  info.callback = deliver<WGPUDevice, WGPURequestDeviceStatus>;
  info.userdata1 = wanted.userdata();
  call.AdapterRequestDevice(adapter, &descriptor, info);
  return wait_for(call, instance, &wanted, "device", status);
}

std::unique_ptr<NativeDevice> make_in(const Library& call, WGPUInstance instance, Status* status) {
  const WGPUAdapter adapter = request_adapter(call, instance, status);
  if (adapter == nullptr) return nullptr;
  auto* loss = new Loss;
  const WGPUDevice device = request_device(call, instance, adapter, loss, status);
  std::unique_ptr<NativeDevice> made;
  if (device != nullptr) {
    made = std::make_unique<NativeDevice>(call, instance, adapter, device,
                                          call.DeviceGetQueue(device), loss);
  }
  call.AdapterRelease(adapter);
  return made;
}

// Creates the library's own device. After the first success the same instance is used, because one
// instance cannot use another's handles; before that a new one each time, because an instance only
// sees the drivers that existed when it was created.
std::unique_ptr<NativeDevice> make_own(Devices* d, Status* status) {
  const Library* call = find_library(status);
  if (call == nullptr) return nullptr;
  if (d->instance == nullptr) d->instance = call->CreateInstance(nullptr);
  if (d->instance == nullptr) {
    *status = Status(StatusCode::backend_unavailable, "webgpu: wgpuCreateInstance gave nothing");
    return nullptr;
  }
  std::unique_ptr<NativeDevice> made = make_in(*call, d->instance, status);
  if (made == nullptr && d->lost.empty()) {
    call->InstanceRelease(d->instance);
    d->instance = nullptr;
  }
  return made;
}

}  // namespace

NativeDevice* find_device(int32_t index, Status* status) {
  Devices& d = devices();
  const std::lock_guard lock(d.mutex);
  if (index < 0 || index >= static_cast<int32_t>(d.all.size())) {
    *status = error(StatusCode::wrong_device,
                    "execution.device.index is %d; allowed: 0 and those of "
                    "logitless_webgpu_use_device",
                    index);
    return nullptr;
  }
  std::unique_ptr<NativeDevice>& found = d.all[static_cast<size_t>(index)];
  if (index > 0) return found.get();
  if (found != nullptr && found->is_loss_told()) d.lost.push_back(std::move(found));
  // A failure is not remembered, so that the next call asks again.
  if (found == nullptr) found = make_own(&d, status);
  if (found == nullptr) return nullptr;
  *status = found->loss();
  return status->ok() ? found.get() : nullptr;
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
  for (size_t i = 1; i < d.all.size(); ++i) {
    if (d.all[i]->wgpu_device() == device) return static_cast<int32_t>(i);
  }
  auto made = std::make_unique<NativeDevice>(*call, instance, nullptr, device, queue);
  d.all.push_back(std::move(made));
  call->DeviceAddRef(device);
  call->QueueAddRef(queue);
  return static_cast<int32_t>(d.all.size() - 1);
}

}  // namespace logitless::webgpu
