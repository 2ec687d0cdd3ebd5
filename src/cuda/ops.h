// SPDX-License-Identifier: Apache-2.0
// The families of ops on CUDA except divergences, and warmup. The caller has found the device; for
// run_*, scale, add and warmup the device is also current.
#pragma once

#include <span>

#include "src/call.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// rows/softmax.cpp
Status softmax_workspace(const Call&, const DeviceInfo&, WorkspaceSize*);
Status run_softmax(const Call&, const Workspace&, const DeviceInfo&, Stream*);

// rows/cross_entropy.cpp
Status logits_loss_workspace(const Call&, const DeviceInfo&, WorkspaceSize*);
Status run_logits_loss(const Call&, const Workspace&, const DeviceInfo&, Stream*);

// tokens/combine.cu
Status combine_workspace(const Call&, const DeviceInfo&, WorkspaceSize*);
Status run_combine(const Call&, const Workspace&, const DeviceInfo&, Stream*);

// linear/linear_cross_entropy.cpp
Status linear_workspace(const Call&, const DeviceInfo&, uint64_t given, WorkspaceSize*);

// linear/only_chosen.cu
Status only_chosen_workspace(const Call&, WorkspaceSize*);
Status run_only_chosen(const Call&, const Workspace&, const DeviceInfo&, Stream*);

// scale.cu: multiplies each of up to most_scaled values [n] by factor [], in place.
void scale(std::span<const TensorView> values, const TensorView& factor, const DeviceInfo&,
           Stream*);

// add.cu: sum [n] = parts[0] + parts[1] + ..., up to most_added f32 vectors, in this order.
void add(std::span<const TensorView> parts, const TensorView& sum, const DeviceInfo&, Stream*);

// Loads the kernels and cuBLASLt on this device, as c.h says of logitless_warmup.
Status warmup(const DeviceInfo&);

// Describes cuBLASLt for `info`: its version, or why it is absent.
Status describe_matrix_library(char* text, size_t bytes);

}  // namespace logitless::cuda
