// SPDX-License-Identifier: Apache-2.0
// Measurements on WebGPU, timed from the call until the queue is empty.
#pragma once

#include <memory>

#include "cli/bench_gpu.h"

namespace logitless::cli {

// Throws Failure with the reason if WebGPU is unavailable.
std::unique_ptr<GpuBench> make_webgpu_bench();

}  // namespace logitless::cli
