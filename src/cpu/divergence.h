// SPDX-License-Identifier: Apache-2.0
// LinearDivergence ops on the CPU.
#pragma once

#include "src/backend.h"

namespace logitless::cpu {

struct DivergencePlan {
  int64_t unused = 0;
};
Status divergence_workspace(const Call& call, uint64_t given, WorkspaceSize* size);
// Plans a call in so many bytes of workspace, the minimum or more.
DivergencePlan divergence_plan(const Call& call, uint64_t bytes);
Status run_divergence(const Call& call, const DivergencePlan& plan, const Workspace& workspace);

}  // namespace logitless::cpu
