// SPDX-License-Identifier: Apache-2.0
// Kernels are loaded at their first launch, which may wait for the device, or all of them at once
// here, before anything is in a hurry.
#pragma once

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

struct LoadedKernels {
  int files = 0;
  int kernels = 0;
};

// Loads the kernels of every .cu file on the current device. If the driver is older than that for
// CUDA 12.4 no kernel is counted: it loads the files, and each kernel at its first launch.
Status load_kernels(LoadedKernels* loaded);

}  // namespace logitless::cuda
