// SPDX-License-Identifier: Apache-2.0
// What is asked of the driver itself. The runtime has calls for it too, but they take away an error
// that the caller has yet to ask for (cudaFuncSetAttribute does, cudaGetDriverEntryPoint may).
#pragma once

#include "logitless/logitless.h"

namespace logitless::cuda {

// The driver's function of that name, nullptr where there is none. libcuda is not linked: a machine
// without a driver loads this library too.
void* find_driver_function(const char* name);

// Lets the current device launch the kernel with that much dynamic shared memory, which comes
// before the first cache.
Status allow_shared_memory(const void* kernel, int bytes);

}  // namespace logitless::cuda
