// SPDX-License-Identifier: Apache-2.0
// Softmax: p_ij = exp((z_ij - m_i) - log s_i), [R, C] -> [R, C]. No workspace.
#include "src/cuda/ops.h"
#include "src/cuda/rows/logit_rows.h"

namespace logitless::cuda {

Status workspace(const Softmax& op, const DeviceInfo&, WorkspaceSize* size) {
  *size = {};
  return check_row_extents(op.logits);
}

Status run(const Softmax& op, const Workspace&, const DeviceInfo& device, Stream* stream) {
  RowsCall call;
  call.logits = op.logits;
  call.output = op.probabilities;
  launch_rows(call, device, stream);
  return {};
}

}  // namespace logitless::cuda
