// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/runtime/api.h"

#include <dlfcn.h>

namespace logitless::cuda {
namespace {

cudaError_t launch(const cudaLaunchConfig_t* config, const void* kernel, void** values,
                   const Parameter*, int) {
  return cudaLaunchKernelExC(config, kernel, values);
}

// Some of these functions are overloaded by templates, so the member's type selects the overload.
constexpr Api machine{.driver_version = cudaDriverGetVersion,
                      .device_count = cudaGetDeviceCount,
                      .device_properties = cudaGetDeviceProperties,
                      .current_device = cudaGetDevice,
                      .set_device = cudaSetDevice,
                      .take_error = cudaGetLastError,
                      .function = cudaGetFuncBySymbol,
                      .attributes = cudaFuncGetAttributes,
                      .launch = launch,
                      .copy = cudaMemcpyAsync,
                      .open = dlopen,
                      .symbol = dlsym,
                      .close = dlclose};

}  // namespace

constinit const Api* current_api = &machine;

void replace_api(const Api* replacement) {
  current_api = replacement != nullptr ? replacement : &machine;
  forget_devices();
  forget_driver();
  forget_matrix_library();
}

}  // namespace logitless::cuda
