// SPDX-License-Identifier: Apache-2.0
// Checks the rules about shapes, dtypes, devices, options and overlaps that all backends share,
// once for all bindings.
#pragma once

#include "src/call.h"

namespace logitless {

// The errors for an unknown device and an unknown op.
Status unknown_device(int32_t type);
Status unknown_op(int32_t kind);

// Checks the device's type and that its index is >= 0, on the host 0; the backend checks the rest.
Status validate(const Execution& execution);

// Checks what `workspace` and `run` both require of an op. Does not check data pointers.
Status validate(const Call& call);

// Checks what kept_size requires of an op: a linear Forward, valid except for outputs that may
// still be missing.
Status validate_keeping(const Call& call);

// Checks what only `run` requires: data pointers, alignment, overlaps, and the workspace.
Status validate_data(const Call& call, const Workspace& workspace, const WorkspaceSize& size);

}  // namespace logitless
