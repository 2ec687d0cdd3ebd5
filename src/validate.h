// SPDX-License-Identifier: Apache-2.0
// Checks every rule about shapes, dtypes, devices, options and overlaps once, for all backends and
// bindings.
#pragma once

#include "src/call.h"

namespace logitless {

// The errors for an unknown device and an unknown op.
Status unknown_device(int32_t type);
Status unknown_op(int32_t kind);

// Checks the device type alone; the backend says whether it has that index.
Status validate(const Execution& execution);

// Checks what `workspace` and `run` both ask of an op. Does not look at data pointers.
Status validate(const Call& call);

// Checks what kept_size asks of an op: a linear Forward, valid except for outputs that it may not
// have yet.
Status validate_keeping(const Call& call);

// Checks what only `run` asks: data pointers, alignment, overlaps, the workspace's size and place.
Status validate_data(const Call& call, const Workspace& workspace, const WorkspaceSize& size);

}  // namespace logitless
