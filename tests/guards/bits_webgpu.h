// SPDX-License-Identifier: Apache-2.0
// The WebGPU device of the library that the loader found.
#pragma once

#include "tests/device.h"

namespace logitless::guards {

// Without one, or in a build without WebGPU: the reason.
conformance::Found find_webgpu();

}  // namespace logitless::guards
