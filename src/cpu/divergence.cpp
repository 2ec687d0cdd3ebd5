// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/divergence.h"

namespace logitless::cpu {

Status divergence_workspace(const Call& call, uint64_t, WorkspaceSize*) {
  return error(StatusCode::not_supported, "%s: not on the CPU yet", call.op_name());
}
DivergencePlan divergence_plan(const Call&, uint64_t) { return {}; }
Status run_divergence(const Call&, const DivergencePlan&, const Workspace&) { return {}; }

}  // namespace logitless::cpu
