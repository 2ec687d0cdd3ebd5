// SPDX-License-Identifier: Apache-2.0
// logitless plan --device webgpu: plans from sizes and a workspace alone, at WebGPU's default
// limits.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "cli/op_shape.h"

namespace logitless::cli {

// Throws Failure if this library was built without WebGPU, and BadInput for a workspace below the
// minimum.
nlohmann::json webgpu_plan(const OpShape& shape, std::optional<uint64_t> memory);
void print_webgpu_plan(const nlohmann::json& out);

}  // namespace logitless::cli
