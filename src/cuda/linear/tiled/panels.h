// SPDX-License-Identifier: Apache-2.0
// Where E and dz are, a panel of columns at a time. Beside the workspace there is free memory:
// grad_weight's own rows. A product writes the rows of its panel's columns; those behind them are
// not written yet, and hold the panel itself while there is room. E of the last kept columns is
// there too, and behind it the scaled input that E is multiplied with. If the rows of kept columns
// are about to be written over E of columns behind them, that E is first copied back to the
// workspace, some of it at a time.
#pragma once

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"
#include "src/cuda/linear/tiled/plan.h"

namespace logitless::cuda::tiled {

// The panel of dz that begins at `first`, once all columns before it are done. The panels are
// panel_at(number of kept columns), panel_at(end of that), ... to V.
PanelPlace panel_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);
// The number of panels, from this one of panel_at's on, that are as wide and in the same place.
int64_t panels_like(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
// Of the kept columns from `first` on, those whose rows of grad_weight one product makes.
PanelPlace kept_part_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);

// The most columns that grad_weight's memory can keep behind those in the workspace.
int64_t most_lent_columns(const LinearShape& shape, const LinearPlan& plan);

// Offsets in grad_weight's memory: of a panel there; and of the scaled input behind E, where the
// plan has it apart, negative where it does not fit.
int64_t lent_offset(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
int64_t lent_scaled_input(const LinearShape& shape, const LinearPlan& plan);

// The panel's memory, in blocks; null without columns, so that nothing is kept.
Panel panel_of(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
               const PanelPlace& at);

}  // namespace logitless::cuda::tiled
