// SPDX-License-Identifier: Apache-2.0
// The devices of this process. Each is checked alone: a device that is too old, or does not answer,
// is refused when it is used and does not affect others. Without a driver the library works, and
// says why CUDA is not available.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "src/cuda/runtime/remembered.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {
namespace {

struct Machine {
  int driver = 0, count = 0;
  std::unique_ptr<Remembered<DeviceInfo>[]> devices;
};

// Never destroyed: the process may still make calls while it exits.
Remembered<Machine>& remembered_machine() {
  static auto& machine = *new Remembered<Machine>;
  return machine;
}

const char* named_kernels() {
  const char* name = std::getenv("LOGITLESS_CUDA_KERNELS");
  return name == nullptr ? "" : name;
}

Status ask_driver(Machine* machine) {
  int& driver = machine->driver;
  int& count = machine->count;
  cudaError_t code = api().driver_version(&driver);
  if (code == cudaSuccess && driver == 0) {
    return error(StatusCode::backend_unavailable,
                 "cuda: no NVIDIA driver found; needed: one for CUDA %d.%d or newer",
                 driver_floor / 1000, driver_floor % 1000 / 10);
  }
  if (code == cudaSuccess) code = api().device_count(&count);
  if (code != cudaSuccess) {
    (void)api().take_error();  // clears our own error: the caller must not see it
    return error(StatusCode::backend_unavailable,
                 "cuda: %s (the driver is for CUDA %d.%d; needed: %d.%d or newer)",
                 cudaGetErrorString(code), driver / 1000, driver % 1000 / 10, driver_floor / 1000,
                 driver_floor % 1000 / 10);
  }
  if (count == 0) return error(StatusCode::backend_unavailable, "cuda: no device");
  machine->devices = std::make_unique<Remembered<DeviceInfo>[]>(static_cast<size_t>(count));
  return {};
}

Status find_machine(Machine** machine) { return remembered_machine().get(machine, ask_driver); }

Status ask_device(int index, int driver, DeviceInfo* info) {
  cudaDeviceProp properties;
  const cudaError_t code = api().device_properties(&properties, index);
  if (code != cudaSuccess) {
    (void)api().take_error();
    return error(StatusCode::backend_unavailable, "cuda: device %d does not answer: %s", index,
                 cudaGetErrorString(code));
  }
  *info = {.index = index,
           .major = properties.major,
           .minor = properties.minor,
           .multiprocessors = properties.multiProcessorCount,
           .shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin),
           .launches_early = driver >= 12030};
  std::snprintf(info->name, sizeof(info->name), "%.60s", properties.name);
  std::snprintf(info->kernels, sizeof(info->kernels), "%s", named_kernels());
  return {};
}

// `index` is in range.
Status find_device_of(Machine* machine, int index, const DeviceInfo** info) {
  DeviceInfo* found;
  const Status status = machine->devices[index].get(
      &found, [&](DeviceInfo* own) { return ask_device(index, machine->driver, own); });
  if (!status.ok()) return status;
  *info = found;
  if (found->major >= 8) return {};
  return error(StatusCode::backend_unavailable,
               "cuda: device %d (%s) has compute capability %d.%d; needed: 8.0 or newer", index,
               found->name, found->major, found->minor);
}

}  // namespace

Status find_device(int index, const DeviceInfo** info) {
  Machine* machine;
  const Status status = find_machine(&machine);
  if (!status.ok()) return status;
  if (index < 0 || index >= machine->count) {
    return error(StatusCode::wrong_device, "execution.device.index is %d; allowed: 0 to %d", index,
                 machine->count - 1);
  }
  return find_device_of(machine, index, info);
}

Status find_first_device(const DeviceInfo** info) {
  Machine* machine;
  Status status = find_machine(&machine);
  if (!status.ok()) return status;
  status = find_device_of(machine, 0, info);
  for (int index = 1; !status.ok() && index < machine->count; ++index) {
    if (find_device_of(machine, index, info).ok()) return {};
  }
  return status;
}

Status count_devices(int* count) {
  Machine* machine;
  const Status status = find_machine(&machine);
  *count = status.ok() ? machine->count : 0;
  return status;
}

void forget_devices() { remembered_machine().forget(); }

}  // namespace logitless::cuda
