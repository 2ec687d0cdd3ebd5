// SPDX-License-Identifier: Apache-2.0
// This lists the engines, best first, and finds the one that a call takes.
#pragma once

#include <span>

#include "src/cuda/linear/engine.h"

namespace logitless::cuda {

// Returns all engines, best first; the last one serves every call.
std::span<const Engine* const> engines();
// Tests call this while no call is running, with a list in the place of the library's own or, with
// none, to have that again.
void replace_engines(std::span<const Engine* const> replacement);
// Returns invalid_argument where LOGITLESS_CUDA_KERNELS names no engine that serves this device.
// Every op asks this before it looks for its engine.
Status check_named_engine(const DeviceInfo& device);
// Returns the best engine that serves some call on this device, or this op, of a list that ends
// with one that serves every op. If LOGITLESS_CUDA_KERNELS names an engine, only it and the last
// one are considered.
const Engine& engine_for(const DeviceInfo& device);
const Engine& engine_for(std::span<const Engine* const> engines, const Call& op,
                         const LinearShape& shape, const DeviceInfo& device);

// An engine takes an op like this: with what its kernels need to know of the call.
struct EngineCall {
  const Engine* engine;
  LinearCall call;
};
EngineCall make_call(std::span<const Engine* const> engines, const Call& call,
                     const DeviceInfo& device);

}  // namespace logitless::cuda
