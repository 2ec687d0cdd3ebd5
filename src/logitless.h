// SPDX-License-Identifier: Apache-2.0
// What is behind the C entry points.
#pragma once

#include "logitless/logitless.h"

namespace logitless {

template <class Op>
Status workspace_of(const Op& op, const Execution& execution, WorkspaceSize* size);
template <class Op>
Status run_op(const Op& op, const Workspace& workspace, const Execution& execution);
Status scale_values(const TensorView& values, const TensorView& factor, const Execution& execution);

}  // namespace logitless
