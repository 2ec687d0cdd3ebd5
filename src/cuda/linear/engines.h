// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "src/cuda/linear/engine.h"

namespace logitless::cuda {

// In the order in which a call tries them; the last one serves every call. Some are used only if
// they are named.
std::span<const Engine* const> engines();
// For tests, while no call is running: replaces the library's list, or restores it with an empty
// one.
void replace_engines(std::span<const Engine* const> replacement);
// Returns invalid_argument if LOGITLESS_CUDA_KERNELS names no engine that serves this device, with
// the names of those that do, the default ones first. Every op checks this before it chooses its
// engine.
Status check_named_engine(const DeviceInfo& device);
// Returns the best engine that serves any call on this device, or this op. The list must end with
// one that serves every op. If LOGITLESS_CUDA_KERNELS names an engine, only it and the last one are
// considered.
const Engine& engine_for(const DeviceInfo& device);
const Engine& engine_for(std::span<const Engine* const> engines, const Call& op,
                         const LinearShape& shape, const DeviceInfo& device);

// An op, its engine, and the properties of the call that its kernels need.
struct EngineCall {
  const Engine* engine;
  LinearCall call;
};
EngineCall make_call(std::span<const Engine* const> engines, const Call& call,
                     const DeviceInfo& device);

}  // namespace logitless::cuda
