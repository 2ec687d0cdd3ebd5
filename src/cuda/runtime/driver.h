// SPDX-License-Identifier: Apache-2.0
// What is asked of the driver itself. The runtime has calls for it too, but they take away an error
// that the caller has yet to ask for (cudaFuncSetAttribute does, cudaGetDriverEntryPoint may).
#pragma once

#include <cuda.h>

#include "logitless/logitless.h"

namespace logitless::cuda {

struct Driver {
  // In every driver that this library serves with.
  decltype(&cuFuncGetAttribute) get_attribute;
  decltype(&cuFuncSetAttribute) set_attribute;
  decltype(&cuCtxGetId) context_id;
  decltype(&cuTensorMapEncodeTiled) encode_tiled;
  // In drivers for CUDA 12.4 and newer; nullptr where there is none.
  decltype(&cuFuncGetModule) module_of;
  decltype(&cuModuleGetFunctionCount) count_functions;
  decltype(&cuModuleEnumerateFunctions) enumerate_functions;
  decltype(&cuFuncLoad) load_function;
};

// libcuda is not linked: a machine without a driver loads this library too.
Status find_driver(const Driver** driver);

// The driver's function of that name, nullptr where there is none.
void* find_driver_function(const char* name);

// True where this thread has a context; true where there is no driver to ask.
bool has_context();

// Lets the current device launch the kernel with that much dynamic shared memory, which comes
// before the first cache.
Status allow_shared_memory(const void* kernel, int bytes);

}  // namespace logitless::cuda
