// SPDX-License-Identifier: Apache-2.0
// What is behind the C entry points.
#pragma once

#include <span>

#include "src/call.h"

namespace logitless {

Status workspace_of(const Call& call, WorkspaceSize* size);
Status run(const Call& call, const Workspace& workspace);
inline constexpr int most_scaled = 4;  // vectors of one call
Status scale_values(std::span<const TensorView> values, const TensorView& factor,
                    const Execution& execution);

}  // namespace logitless
