// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// sum [n] = parts[0] + parts[1] + ..., up to most_added f32 vectors, in this order.
void add(std::span<const TensorView> parts, const TensorView& sum, const DeviceInfo& device,
         Stream* stream);

}  // namespace logitless::cuda
