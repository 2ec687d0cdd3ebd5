// SPDX-License-Identifier: Apache-2.0
// Every rule about shapes, dtypes, devices, options and overlaps, once, for all backends and
// bindings.
#pragma once

#include "src/call.h"

namespace logitless {

// The device alone; the backend says whether there is one of that index.
Status validate(const Execution& execution);

// The op alone: what `workspace` and `run` both ask. Data pointers are not looked at.
Status validate(const Call& call);

// What kept_size asks of an op: a linear Forward, valid but for the outputs that it may not have
// yet.
Status validate_keeping(const Call& call);

// Checks what only `run` asks: data pointers, alignment, overlaps, the workspace's size and place.
Status validate_data(const Call& call, const Workspace& workspace, const WorkspaceSize& size);

}  // namespace logitless
