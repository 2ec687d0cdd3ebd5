// SPDX-License-Identifier: Apache-2.0
// What is behind the C entry points.
#pragma once

#include <span>

#include "logitless/logitless.h"

namespace logitless {

template <class Op>
Status workspace_of(const Op& op, const Execution& execution, WorkspaceSize* size);
template <class Op>
Status run_op(const Op& op, const Workspace& workspace, const Execution& execution);
inline constexpr int most_scaled = 4;  // vectors of one call
Status scale_values(std::span<const TensorView> values, const TensorView& factor,
                    const Execution& execution);

}  // namespace logitless
