// SPDX-License-Identifier: Apache-2.0
// Where E and dz are, a panel of columns at a time. Apart from the workspace, grad_weight's own
// rows are free memory until they are written. A product writes the rows of its panel's columns;
// later rows hold the panel itself while there is room. E of the last kept columns is there too,
// followed by the scaled input that E is multiplied by. Before rows of kept columns overwrite E of
// later columns, that E is copied back to the workspace, a part at a time.
#pragma once

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"
#include "src/cuda/linear/tiled/plan.h"

namespace logitless::cuda::tiled {

// The panel of dz that starts at `first`, once all columns before it are done. The panels are
// panel_at(number of kept columns), panel_at(end of that), ... up to V.
PanelPlace panel_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);
// The number of panels, from this one of panel_at's on, that have the same width and are in the
// same memory.
int64_t panels_like(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
// The kept columns from `first` on whose rows of grad_weight a single product writes.
PanelPlace kept_part_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);

// The most columns of E that grad_weight's memory can keep in addition to those in the workspace.
int64_t most_lent_columns(const LinearShape& shape, const LinearPlan& plan);

// Offsets in grad_weight's memory: of a panel there; and of the scaled input after E, if the plan
// has it separately, negative if it does not fit.
int64_t lent_offset(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
int64_t lent_scaled_input(const LinearShape& shape, const LinearPlan& plan);

// The panel's memory, in blocks; null if it has no columns, so that nothing is kept.
Panel panel_of(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
               const PanelPlace& at);

}  // namespace logitless::cuda::tiled
