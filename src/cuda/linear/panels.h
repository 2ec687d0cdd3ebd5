// SPDX-License-Identifier: Apache-2.0
// Where E and dz lie, a panel of columns at a time. Beside the workspace there is memory that
// nobody pays for: grad_weight's own rows. A product writes the rows of its panel's columns; those
// behind them are still free, and hold the panel itself while there is room. E of the last columns
// that are kept lies there too, and behind it the scaled input that E is multiplied with. Kept
// columns whose rows lie where E of columns behind them is come back to the workspace, some at a
// time.
#pragma once

#include "src/cuda/linear/plan.h"

namespace logitless::cuda {

// Columns [first, first + columns) of E or dz.
struct PanelPlace {
  int64_t first = 0, columns = 0;
  bool lent = false;    // lies in grad_weight's memory
  bool copied = false;  // and is copied from there to the workspace for its rows' product
  int64_t end() const { return first + columns; }
};
// The panel of dz that begins at `first`, once all columns before it are done with. Those of
// Hopper's kernels are panel_at(columns that are kept), panel_at(end of that), ... to V.
PanelPlace panel_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);
// How many panels from this one on, which panel_at gave, are as wide and lie in the same place.
int64_t panels_like(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
// Of the columns that are kept, those from `first` on that one product makes rows of grad_weight
// of.
PanelPlace kept_part_at(const LinearShape& shape, const LinearPlan& plan, int64_t first);

// Columns of E that are there when the gradients begin.
inline int64_t kept_columns(const LinearPlan& p) { return p.stored_columns + p.lent_columns; }
// E of every column is kept, part of it in grad_weight's memory, and one product makes grad_input
// of it, before there is anything of grad_weight.
inline bool writes_input_first(const LinearShape& s, const LinearPlan& p) {
  return p.input_first && p.lent_columns > 0 && kept_columns(p) == s.vocab && s.direct_grad_input;
}
// Products of E times each row's factor: there is something of E, and it is not made dz before.
inline bool multiplies_e(const LinearShape& s, const LinearPlan& p) {
  return kept_columns(p) > 0 && !s.forms_dz;
}
// The input itself is asked for again after the scaled one.
inline bool scales_apart(const LinearShape& s, const LinearPlan& p) {
  return s.grad_weight && multiplies_e(s, p) && kept_columns(p) < s.vocab;
}
// The most that grad_weight's memory can keep behind those in the workspace.
int64_t most_lent_columns(const LinearShape& shape, const LinearPlan& plan);

// Offsets in grad_weight's memory: of a panel that lies there, and of the scaled input behind E;
// negative where it does not fit there.
int64_t lent_offset(const LinearShape& shape, const LinearPlan& plan, const PanelPlace& at);
int64_t lent_scaled_input(const LinearShape& shape, const LinearPlan& plan);

// Rows of a panel, and of the compacted input.
inline int64_t panel_rows(const LinearPlan& p) {
  return round_up(p.token_chunk, p.panel_row_block) + p.extra_rows;
}

}  // namespace logitless::cuda
