// SPDX-License-Identifier: Apache-2.0
// Loads all kernels at once, ahead of time. Otherwise each is loaded at its first launch, which may
// wait for the device.
#pragma once

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

struct LoadedKernels {
  int files = 0;
  int kernels = 0;
};

// Loads the kernels of every .cu file on the current device. With a driver before CUDA 12.4 it
// loads only the files and counts no kernels: each is loaded at its first launch.
Status load_kernels(LoadedKernels* loaded);

}  // namespace logitless::cuda
