// SPDX-License-Identifier: Apache-2.0
// LinearDivergence ops on every CUDA device: cuBLASLt makes the products, and on Hopper a kernel of
// our own those of the logits; kernels of the rows make what lies between them
// (docs/kernels/divergence.md).
#pragma once

#include "src/backend.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// How the gradients come to be.
enum class DivergenceWay : int32_t {
  none,    // there are none; a Forward may keep dz
  whole,   // dz of all tokens is there before either product is made: four products
  chunks,  // dz of a chunk of tokens at a time, grad_weight summed in f32: four products
  // States of all tokens first, with dz of the first columns, then dz of some others at a time:
  // four products, and two for the share of the columns whose logits are made again.
  columns,
  from_kept,  // a Forward has kept dz: two products
};
const char* name_of(DivergenceWay way);

struct DivergencePlan {
  DivergenceWay way = DivergenceWay::none;
  int64_t chunk = 0;    // logits of so many tokens are there at a time
  int64_t columns = 0;  // and dz of so many columns, where not of all
  int64_t stored = 0;   // dz of so many columns is made with the states
  // The device's engine makes the logits, with sums of so many columns; or nobody does.
  int64_t sum_columns = 0;
  uint64_t bytes = 0;
  double seconds = 0;  // it is predicted
};

Status divergence_workspace(const Call& call, const DeviceInfo& device, uint64_t given,
                            WorkspaceSize* size);
// Plans a call in so many bytes of workspace, the minimum or more.
DivergencePlan divergence_plan(const Call& call, uint64_t bytes, const DeviceInfo& device);
Status run_divergence(const Call& call, const DivergencePlan& plan, const Workspace& workspace,
                      const DeviceInfo& device, Stream* stream);

}  // namespace logitless::cuda
