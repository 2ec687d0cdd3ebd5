// SPDX-License-Identifier: Apache-2.0
// This is asked of the driver itself. The runtime has calls for it too, but they take away an error
// that the caller has yet to ask for (cudaFuncSetAttribute does, cudaGetDriverEntryPoint may).
#pragma once

#include <cuda.h>

#include "logitless/logitless.h"

namespace logitless::cuda {

struct Driver {
  // Every driver that this library serves with has these.
  decltype(&cuFuncGetAttribute) get_attribute;
  decltype(&cuFuncSetAttribute) set_attribute;
  decltype(&cuCtxGetId) context_id;
  decltype(&cuTensorMapEncodeTiled) encode_tiled;
  // Drivers for CUDA 12.4 and newer have these; else they are nullptr.
  decltype(&cuFuncGetModule) module_of;
  decltype(&cuModuleGetFunctionCount) count_functions;
  decltype(&cuModuleEnumerateFunctions) enumerate_functions;
  decltype(&cuFuncLoad) load_function;
};

// libcuda is not linked, so that a machine without a driver loads this library too.
Status find_driver(const Driver** driver);

// Returns the driver's function of that name, or nullptr where there is none.
void* find_driver_function(const char* name);

// Returns true where this thread has a context, or where there is no driver to ask.
bool has_context();

// Lets the current device launch the kernel with that much dynamic shared memory, which comes
// before the first cache.
Status allow_shared_memory(const void* kernel, int bytes);

}  // namespace logitless::cuda
