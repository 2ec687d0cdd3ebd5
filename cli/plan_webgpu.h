// SPDX-License-Identifier: Apache-2.0
// logitless plan --device webgpu makes the plan of an op at the limits that every device has, from
// its sizes and a workspace alone.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "cli/op_shape.h"

namespace logitless::cli {

// Throws Failure where this library was built without WebGPU, and BadInput for a workspace below
// the minimum.
nlohmann::json webgpu_plan(const OpShape& shape, std::optional<uint64_t> memory);
// Prints the lines of the plan itself.
void print_webgpu_plan(const nlohmann::json& out);

}  // namespace logitless::cli
