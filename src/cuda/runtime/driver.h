// SPDX-License-Identifier: Apache-2.0
// Functions called in the driver itself: the runtime lacks them, or would clear an error that the
// caller has not read yet (cudaFuncSetAttribute does, cudaGetDriverEntryPoint may).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "logitless/logitless.h"

namespace logitless::cuda {

// CUDA's version as cudart encodes it; any driver of the same major version works. With drivers
// before 12.4 warmup loads less; before 12.3 there are no early launches.
inline constexpr int driver_floor = CUDART_VERSION / 1000 * 1000;

struct Driver {
  // In every driver that this library supports.
  decltype(&cuFuncGetAttribute) get_attribute;
  decltype(&cuFuncSetAttribute) set_attribute;
  decltype(&cuCtxGetId) context_id;
  decltype(&cuTensorMapEncodeTiled) encode_tiled;
  // In drivers for CUDA 12.4 and later, else nullptr.
  decltype(&cuFuncGetModule) module_of;
  decltype(&cuModuleGetFunctionCount) count_functions;
  decltype(&cuModuleEnumerateFunctions) enumerate_functions;
  decltype(&cuFuncLoad) load_function;
};

// libcuda is not linked, so that this library also loads on a machine without a driver.
Status find_driver(const Driver** driver);

// Returns nullptr if the driver has no function of that name.
void* find_driver_function(const char* name);

// Also returns true if there is no driver to ask.
bool has_context();

// Allows the current device to launch the kernel with this much dynamic shared memory, which is
// taken from the L1 cache.
Status allow_shared_memory(const void* kernel, int bytes);

}  // namespace logitless::cuda
