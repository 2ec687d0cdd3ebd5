// SPDX-License-Identifier: Apache-2.0
// LinearDivergence ops on CUDA devices. cuBLASLt computes the products, except that on Hopper our
// own kernel may compute the logits. Row kernels compute everything between the products
// (docs/kernels/divergence.md).
#pragma once

#include "src/backend.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// How the gradients are computed. Products are counted for calls that compute both heads' logits.
enum class DivergenceWay : int32_t {
  none,    // no gradients; a Forward may keep dz
  whole,   // dz of all tokens before either product: four products
  chunks,  // dz of a chunk of tokens at a time, grad_weight summed in f32: four products
  // The states of all tokens together with dz of the first columns, then dz of groups of other
  // columns: four products, and two more for the columns whose logits are computed again.
  columns,
  from_kept,  // dz that a Forward kept: two products
};
const char* name_of(DivergenceWay way);

struct DivergencePlan {
  DivergenceWay way = DivergenceWay::none;
  int64_t chunk = 0;    // tokens whose logits are in memory at a time
  int64_t columns = 0;  // columns whose dz is in memory at a time, if not all
  int64_t stored = 0;   // columns whose dz is made together with the states
  // Columns per partial sum if the device's engine computes the logits; else 0.
  int64_t sum_columns = 0;
  uint64_t bytes = 0;
  double seconds = 0;  // predicted
};

Status divergence_workspace(const Call& call, const DeviceInfo& device, uint64_t given,
                            WorkspaceSize* size);
// Plans a call in `bytes` of workspace, at least the minimum.
DivergencePlan divergence_plan(const Call& call, uint64_t bytes, const DeviceInfo& device);
Status run_divergence(const Call& call, const DivergencePlan& plan, const Workspace& workspace,
                      const DeviceInfo& device, Stream* stream);

}  // namespace logitless::cuda
