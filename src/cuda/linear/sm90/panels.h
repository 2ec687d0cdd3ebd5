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

namespace logitless::cuda::sm90 {

// These fields are this engine's part of a plan.
struct TiledPart {
  // E is copied before its rows are written, so that as many columns are lent as fit
  bool copies_lent = true;
  int32_t slots = 0;        // so many slots take the sums of sliced tiles: cut.h
  int32_t slot_size = 0;    // a slot has so many floats
  int32_t input_teams = 0;  // so many teams make grad_input, where both products run at once
  // The scaled input lies at this byte of grad_weight's memory, or not there (-1).
  int64_t lent_scaled = -1;
  int32_t unit_width = 0;    // a segment has so many tiles, or is none (0): units.h
  int32_t single_tiles = 0;  // at most so many tiles have sums that lie apart
  int32_t single_rows = 0;   // each of these tiles has so many rows
};
inline TiledPart& tiled_part(LinearPlan& p) { return p.own.as<TiledPart>(); }
inline const TiledPart& tiled_part(const LinearPlan& p) { return p.own.as<TiledPart>(); }

// Returns the panel of dz that begins at `first`, once all columns before it are done with. The
// panels of Hopper's kernels are panel_at(columns that are kept), panel_at(end of that), ... to V.
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
// copy_panel.cu copies the rows that count of a panel to `to`, which is as wide.
void copy_panel(const LinearWork& work, const Panel& panel, char* to);
// form_dz.cu makes dz in the place of E, since a softcap under smoothing leaves the products no
// other way. It also adds dz to bias_sum, if grad_bias is asked for (`first`: it overwrites it).
void form_dz(const LinearWork& work, const Panel& panel, bool first);

}  // namespace logitless::cuda::sm90
