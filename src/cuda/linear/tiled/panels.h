// SPDX-License-Identifier: Apache-2.0
// This header says where E and dz lie, a panel of columns at a time. Beside the workspace there is
// memory that nobody pays for: grad_weight's own rows. A product writes the rows of its panel's
// columns; those behind them are still free, and hold the panel itself while there is room. E of
// the last columns that are kept lies there too, and behind it the scaled input that E is
// multiplied with. If the rows of kept columns are to be written where E of columns behind them
// lies, that E first comes back to the workspace, some of it at a time.
#pragma once

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"
#include "src/cuda/linear/tiled/plan.h"

namespace logitless::cuda::tiled {

// Returns the panel of dz that begins at `first`, once all columns before it are done with. They
// are panel_at(columns that are kept), panel_at(end of that), ... to V.
PanelPlace panel_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);
// Returns how many panels from this one on, which panel_at gave, are as wide and lie in the same
// place.
int64_t panels_like(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
// Returns those of the kept columns, from `first` on, whose rows of grad_weight one product makes.
PanelPlace kept_part_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);

// Returns the most columns that grad_weight's memory can keep behind those in the workspace.
int64_t most_lent_columns(const LinearShape& shape, const LinearPlan& plan);

// Return offsets in grad_weight's memory: that of a panel that lies there; and that of the scaled
// input behind E, where the plan has it apart, negative where it does not fit there.
int64_t lent_offset(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
int64_t lent_scaled_input(const LinearShape& shape, const LinearPlan& plan);

// Returns the panel's memory, in blocks; it is null where there are no columns, so that nothing is
// kept.
Panel panel_of(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
               const PanelPlace& at);

}  // namespace logitless::cuda::tiled
