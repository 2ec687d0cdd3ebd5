// SPDX-License-Identifier: Apache-2.0
// The families of ops on the CPU.
#pragma once

#include "src/call.h"

namespace logitless::cpu {

// softmax.cpp
Status softmax_workspace(const Call& call, WorkspaceSize* size);
Status run_softmax(const Call& call, const Workspace& workspace);

// cross_entropy.cpp
Status logits_loss_workspace(const Call& call, WorkspaceSize* size);
Status run_logits_loss(const Call& call, const Workspace& workspace);

// linear_run.cpp; the first two also serve the ops of two heads.
struct LinearPlan;
Status linear_workspace(const Call& call, uint64_t given, WorkspaceSize* size);
LinearPlan linear_plan(const Call& call, uint64_t bytes);
Status run_linear(const Call& call, const LinearPlan& plan, const Workspace& workspace);

// only_chosen.cpp
Status only_chosen_workspace(const Call& call, WorkspaceSize* size);
Status run_only_chosen(const Call& call, const Workspace& workspace);

// divergence_run.cpp
Status run_divergence(const Call& call, const LinearPlan& plan, const Workspace& workspace);

// combine.cpp
Status combine_workspace(const Call& call, WorkspaceSize* size);
Status run_combine(const Call& call, const Workspace& workspace);

}  // namespace logitless::cpu
