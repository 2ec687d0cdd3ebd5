// SPDX-License-Identifier: Apache-2.0
// Every rule about shapes, dtypes, devices, options and overlaps is checked once here, for all
// backends and bindings.
#pragma once

#include "src/call.h"

namespace logitless {

// These are the messages of a device and of an op that are none.
Status unknown_device(int32_t type);
Status unknown_op(int32_t kind);

// Checks the device alone; the backend says whether there is one of that index.
Status validate(const Execution& execution);

// Checks the op alone, as `workspace` and `run` both ask. It does not look at data pointers.
Status validate(const Call& call);

// Checks what kept_size asks of an op: that it is a linear Forward, valid but for the outputs that
// it may not have yet.
Status validate_keeping(const Call& call);

// Checks what only `run` asks: data pointers, alignment, overlaps, the workspace's size and place.
Status validate_data(const Call& call, const Workspace& workspace, const WorkspaceSize& size);

}  // namespace logitless
