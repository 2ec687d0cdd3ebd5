// SPDX-License-Identifier: Apache-2.0
// Measures the cost of a process's first call on CUDA, after the driver's initialization:
// `logitless bench --device cuda --first-call`.
#pragma once

#include "cli/commands.h"
#include "cli/op_shape.h"

namespace logitless::cli {

// Throws Failure with the reason if CUDA is unavailable.
void run_first_call(const Context& context, const OpShape& shape, bool warmed);

}  // namespace logitless::cli
