// SPDX-License-Identifier: Apache-2.0
// LinearDivergence ops on CUDA.
#pragma once

#include "src/backend.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

struct DivergencePlan {
  int64_t unused = 0;
};
Status divergence_workspace(const Call& call, const DeviceInfo& device, uint64_t given,
                            WorkspaceSize* size);
// Plans a call in so many bytes of workspace, the minimum or more.
DivergencePlan divergence_plan(const Call& call, uint64_t bytes, const DeviceInfo& device);
Status run_divergence(const Call& call, const DivergencePlan& plan, const Workspace& workspace,
                      const DeviceInfo& device, Stream* stream);

}  // namespace logitless::cuda
