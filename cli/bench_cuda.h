// SPDX-License-Identifier: Apache-2.0
// Measurements on CUDA, timed by the device's own clock.
#pragma once

#include <memory>

#include "cli/bench_gpu.h"

namespace logitless::cli {

// Throws Failure with the reason if CUDA is unavailable.
std::unique_ptr<GpuBench> make_cuda_bench();

}  // namespace logitless::cli
