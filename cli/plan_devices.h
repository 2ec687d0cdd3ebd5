// SPDX-License-Identifier: Apache-2.0
// logitless plan --device cuda and --device webgpu: plans from sizes and a workspace alone,
// WebGPU's at its default limits.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "cli/op_shape.h"

namespace logitless::cli {

// These throw Failure if this library was built without the backend, and BadInput for a workspace
// below the minimum. With `steps`, plan.steps lists what the plan does in order; equal steps are
// listed once, with their count.
nlohmann::json cuda_plan(const OpShape& shape, std::optional<uint64_t> memory, bool steps);
nlohmann::json webgpu_plan(const OpShape& shape, std::optional<uint64_t> memory);
// Print the lines of the plan, and those of its steps if it lists them.
void print_cuda_plan(const nlohmann::json& out);
void print_cuda_steps(const nlohmann::json& out);
void print_webgpu_plan(const nlohmann::json& out);

}  // namespace logitless::cli
