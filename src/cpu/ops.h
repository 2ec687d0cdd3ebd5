// SPDX-License-Identifier: Apache-2.0
// The CPU's implementation of every op: one overload pair each.
#pragma once

#include "logitless/logitless.h"

namespace logitless::cpu {

// softmax.cpp
Status workspace(const Softmax&, const Execution&, WorkspaceSize*);
Status run(const Softmax&, const Workspace&, const Execution&);

// cross_entropy.cpp
Status workspace(const CrossEntropyForward&, const Execution&, WorkspaceSize*);
Status run(const CrossEntropyForward&, const Workspace&, const Execution&);
Status workspace(const CrossEntropyBackward&, const Execution&, WorkspaceSize*);
Status run(const CrossEntropyBackward&, const Workspace&, const Execution&);
Status workspace(const CrossEntropyForwardBackward&, const Execution&, WorkspaceSize*);
Status run(const CrossEntropyForwardBackward&, const Workspace&, const Execution&);

// linear_cross_entropy.cpp
Status workspace(const LinearCrossEntropyForward&, const Execution&, WorkspaceSize*);
Status run(const LinearCrossEntropyForward&, const Workspace&, const Execution&);
Status workspace(const LinearCrossEntropyBackward&, const Execution&, WorkspaceSize*);
Status run(const LinearCrossEntropyBackward&, const Workspace&, const Execution&);
Status workspace(const LinearCrossEntropyForwardBackward&, const Execution&, WorkspaceSize*);
Status run(const LinearCrossEntropyForwardBackward&, const Workspace&, const Execution&);

}  // namespace logitless::cpu
