// SPDX-License-Identifier: Apache-2.0
// The softmax, without a workspace: p_ij = exp((z_ij - m_i) - log s_i), [R, C] -> [R, C].
#include "src/cuda/ops.h"
#include "src/cuda/rows/logit_rows.h"

namespace logitless::cuda {

Status softmax_workspace(const Call& call, const DeviceInfo&, WorkspaceSize* size) {
  *size = {};
  return check_row_extents(call.logits);
}

Status run_softmax(const Call& call, const Workspace&, const DeviceInfo& device, Stream* stream) {
  RowsCall rows;
  rows.logits = call.logits;
  rows.output = call.probabilities;
  launch_rows(rows, device, stream);
  return {};
}

}  // namespace logitless::cuda
