// SPDX-License-Identifier: Apache-2.0
// Finds the WebGPU device of the library that the loader found.
#pragma once

#include "tests/support/device.h"

namespace logitless::guards {

// Returns the device, or the reason why there is none.
conformance::Found find_webgpu();

}  // namespace logitless::guards
