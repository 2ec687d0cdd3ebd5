// SPDX-License-Identifier: Apache-2.0
// The devices of this process. The driver is asked once; without one the library works, and says
// why CUDA does not.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "src/cuda/runtime.h"

namespace logitless::cuda {
namespace {

struct Devices {
  Status status;
  std::vector<DeviceInfo> info;
};

bool asked_for_portable() {
  const char* kernels = std::getenv("LOGITLESS_CUDA_KERNELS");
  return kernels != nullptr && std::strcmp(kernels, "portable") == 0;
}

Devices ask_driver() {
  Devices all;
  int driver = 0, count = 0;
  cudaError_t code = cudaDriverGetVersion(&driver);
  if (code == cudaSuccess && driver == 0) {
    all.status = error(StatusCode::backend_unavailable,
                       "cuda: no NVIDIA driver found; needed: one for CUDA %d.%d or newer",
                       CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    return all;
  }
  if (code == cudaSuccess) code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess) {
    (void)cudaGetLastError();  // ours: the caller must not find it
    all.status = error(StatusCode::backend_unavailable,
                       "cuda: %s (the driver is for CUDA %d.%d; needed: %d.%d or newer)",
                       cudaGetErrorString(code), driver / 1000, driver % 1000 / 10,
                       CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    return all;
  }
  if (count == 0) all.status = error(StatusCode::backend_unavailable, "cuda: no device");
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
      all.status = error(StatusCode::backend_unavailable, "cuda: device %d does not answer", index);
      (void)cudaGetLastError();
      break;
    }
    DeviceInfo info{
        .index = index,
        .major = properties.major,
        .minor = properties.minor,
        .multiprocessors = properties.multiProcessorCount,
        .shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin),
        .portable = asked_for_portable(),
        .launches_early = driver >= 12030};
    std::snprintf(info.name, sizeof(info.name), "%.60s", properties.name);
    all.info.push_back(info);
  }
  return all;
}

const Devices& devices() {
  static const Devices all = ask_driver();
  return all;
}

}  // namespace

Status find_device(int index, const DeviceInfo** info) {
  const Devices& all = devices();
  if (!all.status.ok()) return all.status;
  const int count = static_cast<int>(all.info.size());
  if (index < 0 || index >= count) {
    return error(StatusCode::wrong_device, "execution.device.index is %d; allowed: 0 to %d", index,
                 count - 1);
  }
  *info = &all.info[index];
  if ((*info)->major < 8) {
    return error(StatusCode::backend_unavailable,
                 "cuda: device %d (%s) has compute capability %d.%d; needed: 8.0 or newer", index,
                 (*info)->name, (*info)->major, (*info)->minor);
  }
  return {};
}

}  // namespace logitless::cuda
