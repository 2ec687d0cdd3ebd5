// SPDX-License-Identifier: Apache-2.0
// What the first call on CUDA costs a process once the driver is up: `logitless bench --device cuda
// --first-call`.
#pragma once

#include "cli/commands.h"
#include "cli/op_shape.h"

namespace logitless::cli {

// Throws Failure with the reason where there is no CUDA.
void run_first_call(const Context& context, const OpShape& shape, bool warmed);

}  // namespace logitless::cli
