// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/panels.h"

#include <algorithm>

#include "src/cuda/sm90/forward.h"

namespace logitless::cuda {
namespace {

constexpr int64_t alignment = 128, block_columns = 64;

int64_t row_bytes(const LinearShape& s) {
  return s.hidden * (s.grad_weight_f32 ? int64_t{4} : size_of(s.dtype));
}
int64_t column_bytes(const LinearShape& s, const LinearPlan& p) {
  return panel_rows(s, p) * size_of(s.dtype);
}
int64_t scaled_bytes(const LinearShape& s, const LinearPlan& p) {
  return panel_rows(s, p) * p.hidden_pitch * size_of(s.dtype);
}
// One chunk, so that a row is written once and free till then.
bool lends_weight(const LinearShape& s, const LinearPlan& p) {
  return s.lends_grad_weight && p.chunks == 1;
}
// Whole tiles of columns behind `first` of which each takes its own row, to be written, and its
// bytes of the panel, in memory that ends with `taken` bytes of something else.
int64_t room_behind(const LinearShape& s, const LinearPlan& p, int64_t first, int64_t taken) {
  const int64_t left = (s.vocab - first) * row_bytes(s) - taken - 2 * alignment;
  const int64_t columns = left / (row_bytes(s) + column_bytes(s, p));
  return std::max<int64_t>(columns, 0) / sm90::sum_columns * sm90::sum_columns;
}

}  // namespace

int64_t most_lent_columns(const LinearShape& s, const LinearPlan& p) {
  if (!lends_weight(s, p) || !s.can_store || p.stored_columns == s.vocab) return 0;
  return room_behind(s, p, p.stored_columns, s.forms_dz ? 0 : scaled_bytes(s, p));
}

int64_t lent_panel(const LinearShape& s, const LinearPlan& p, int64_t columns) {
  const int64_t bytes = round_up(columns, block_columns) * column_bytes(s, p);
  return (s.vocab * row_bytes(s) - bytes) / alignment * alignment;
}

int64_t lent_scaled_input(const LinearShape& s, const LinearPlan& p) {
  if (!lends_weight(s, p)) return -1;
  const int64_t end =
      p.lent_columns > 0 ? lent_panel(s, p, p.lent_columns) : s.vocab * row_bytes(s);
  const int64_t at = (end - scaled_bytes(s, p)) / alignment * alignment;
  return at >= kept_columns(p) * row_bytes(s) ? at : -1;
}

PanelPlace panel_at(const LinearShape& s, const LinearPlan& p, int64_t first) {
  if (first < p.stored_columns) return {0, p.stored_columns, false};
  if (first < kept_columns(p)) return {first, p.lent_columns, true};
  const int64_t left = s.vocab - first;
  if (p.remade_columns >= left) return {first, left, false};
  const int64_t room = lends_weight(s, p) ? room_behind(s, p, first, 0) : 0;
  if (room > p.remade_columns) return {first, room, true};
  return {first, p.remade_columns, false};
}

int64_t panels_like(const LinearShape& s, const LinearPlan& p, const PanelPlace& at) {
  if (at.first < kept_columns(p)) return 1;
  if (!at.lent) return (s.vocab - at.first) / at.columns;
  // room_behind(first) is at least as wide up to this column.
  const int64_t bytes = at.columns * (row_bytes(s) + column_bytes(s, p)) + 2 * alignment;
  return (s.vocab - divide_up(bytes, row_bytes(s)) - at.first) / at.columns + 1;
}

}  // namespace logitless::cuda
