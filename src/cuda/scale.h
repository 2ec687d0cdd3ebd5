// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// Multiplies each of up to most_scaled values [n] by factor [], in place.
void scale(std::span<const TensorView> values, const TensorView& factor, const DeviceInfo& device,
           Stream* stream);

}  // namespace logitless::cuda
