// SPDX-License-Identifier: Apache-2.0
// Finds the WebGPU device of whichever library was loaded.
#pragma once

#include "tests/support/device.h"

namespace logitless::guards {

// Returns the device, or the reason for its absence.
conformance::Found find_webgpu();

}  // namespace logitless::guards
