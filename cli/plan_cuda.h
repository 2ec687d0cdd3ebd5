// SPDX-License-Identifier: Apache-2.0
// logitless plan --device cuda makes the plan of a linear op from its sizes and a workspace alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "cli/op_shape.h"

namespace logitless::cli {

// Throws Failure where this library was built without CUDA, and BadInput for a workspace below the
// minimum. With `steps` there is plan.steps, what the plan does in its order, alike steps once with
// their count.
nlohmann::json cuda_plan(const OpShape& shape, std::optional<uint64_t> memory, bool steps);
// Prints the lines of the plan itself; the other function prints those of its steps, where it has
// them.
void print_cuda_plan(const nlohmann::json& out);
void print_cuda_steps(const nlohmann::json& out);

}  // namespace logitless::cli
