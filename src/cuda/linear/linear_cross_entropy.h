// SPDX-License-Identifier: Apache-2.0
// The engine and plan of a linear op are decided once; the op can then run many times.
#pragma once

#include <array>

#include "src/cuda/linear/engine.h"

namespace logitless::cuda {

// An op runs as one pass over the vocabulary, or as two passes one after the other.
struct LinearPass {
  LinearCall call;
  LinearPlan plan;
  char* workspace = nullptr;
};
struct LinearPasses {
  const Engine* engine = nullptr;
  int count = 0;
  std::array<LinearPass, 2> pass{};
};
// The decisions about a linear op for a number of bytes: the engine, and the plan of each pass.
struct LinearDecisions {
  const Engine* engine = nullptr;
  LinearPlan plan;
  std::array<LinearPlan, 2> pass{};  // if `plan` has two passes
};
LinearDecisions decide_linear(const Call& call, uint64_t bytes, const DeviceInfo& device);
LinearPasses linear_passes(const Call& call, const LinearDecisions& decided,
                           const Workspace& workspace, const DeviceInfo& device);

}  // namespace logitless::cuda
