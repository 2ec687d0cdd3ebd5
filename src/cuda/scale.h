// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "src/cuda/runtime.h"

namespace logitless::cuda {

// values [n] *= factor [], in place.
void scale(const TensorView& values, const TensorView& factor, const DeviceInfo& device,
           Stream* stream);

}  // namespace logitless::cuda
