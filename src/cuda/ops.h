// SPDX-License-Identifier: Apache-2.0
// CUDA's implementation of every op: one overload pair each. The device is found and current.
#pragma once

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// softmax.cpp
Status workspace(const Softmax&, const DeviceInfo&, WorkspaceSize*);
Status run(const Softmax&, const Workspace&, const DeviceInfo&, Stream*);

// cross_entropy.cpp
Status workspace(const CrossEntropyForward&, const DeviceInfo&, WorkspaceSize*);
Status run(const CrossEntropyForward&, const Workspace&, const DeviceInfo&, Stream*);
Status workspace(const CrossEntropyBackward&, const DeviceInfo&, WorkspaceSize*);
Status run(const CrossEntropyBackward&, const Workspace&, const DeviceInfo&, Stream*);
Status workspace(const CrossEntropyForwardBackward&, const DeviceInfo&, WorkspaceSize*);
Status run(const CrossEntropyForwardBackward&, const Workspace&, const DeviceInfo&, Stream*);

// linear_cross_entropy.cpp
Status workspace(const LinearCrossEntropyForward&, const DeviceInfo&, WorkspaceSize*);
Status run(const LinearCrossEntropyForward&, const Workspace&, const DeviceInfo&, Stream*);
Status workspace(const LinearCrossEntropyBackward&, const DeviceInfo&, WorkspaceSize*);
Status run(const LinearCrossEntropyBackward&, const Workspace&, const DeviceInfo&, Stream*);
Status workspace(const LinearCrossEntropyForwardBackward&, const DeviceInfo&, WorkspaceSize*);
Status run(const LinearCrossEntropyForwardBackward&, const Workspace&, const DeviceInfo&, Stream*);

// Loads every kernel and the matrix library on this device, so that no later call does.
Status warmup(const DeviceInfo&);

// Describes the matrix library for `info`: a version, or why it is absent.
Status describe_matrix_library(char* text, size_t bytes);

}  // namespace logitless::cuda
