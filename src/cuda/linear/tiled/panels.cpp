// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/tiled/panels.h"

#include <algorithm>

#include "src/kept.h"

namespace logitless::cuda::tiled {
namespace {

constexpr int64_t alignment = 128, block_columns = 64;

int64_t row_bytes(const LinearShape& s) {
  return s.hidden * (s.grad_weight_f32 ? int64_t{4} : size_of(s.dtype));
}
int64_t column_bytes(const LinearShape& s, const LinearPlan& p) {
  return p.panel_rows * size_of(s.dtype);
}
int64_t scaled_bytes(const LinearShape& s, const LinearPlan& p) {
  return p.panel_rows * s.hidden_pitch() * size_of(s.dtype);
}
// Only with a single chunk is a row written once and its memory free until then.
bool lends_weight(const LinearShape& s, const LinearPlan& p) {
  return s.kernels.lends_grad_weight && p.chunks == 1;
}
int64_t weight_bytes(const LinearShape& s) { return s.vocab * row_bytes(s); }
// Bytes of `columns` columns, in whole blocks.
int64_t panel_bytes(const LinearShape& s, const LinearPlan& p, int64_t columns) {
  return round_up(columns, block_columns) * column_bytes(s, p);
}
// Rounds down to whole tiles.
int64_t in_tiles(const LinearPlan& p, int64_t columns) {
  return columns / tile_of(p).columns * tile_of(p).columns;
}
// The number of columns, in whole tiles, that fit after `first` if each needs its own row, which is
// still to be written, and its bytes of the panel.
int64_t room_behind(const LinearShape& s, const LinearPlan& p, int64_t first) {
  const int64_t left = weight_bytes(s) - first * row_bytes(s) - 2 * alignment;
  const int64_t columns = left / (row_bytes(s) + column_bytes(s, p));
  return in_tiles(p, std::max<int64_t>(columns, 0));
}
// Where E of the lent columns starts.
int64_t lent_e(const LinearShape& s, const LinearPlan& p) {
  const int64_t end = tiled_part(p).lent_scaled < 0 ? weight_bytes(s) : tiled_part(p).lent_scaled;
  return (end - panel_bytes(s, p, p.lent_columns)) / alignment * alignment;
}
// Columns of E that the workspace holds at a time.
int64_t workspace_columns(const LinearPlan& p) {
  return std::max(p.stored_columns, p.remade_columns);
}

}  // namespace

// When rows up to a column's are written, only E of later columns is still needed. The room between
// the two changes by the same amount with every column, so it is enough to check it before the
// first lent columns and before the last ones.
int64_t most_lent_columns(const LinearShape& s, const LinearPlan& p) {
  if (!lends_weight(s, p) || s.kept_columns > 0 || !s.can_keep() || p.stored_columns >= s.vocab)
    return 0;
  const bool copies = tiled_part(p).copies_lent;
  const int64_t others = s.vocab - p.stored_columns;
  const int64_t last = (others - 1) % tile_of(p).columns + 1;
  const int64_t end = weight_bytes(s) / alignment * alignment;
  // Whether E of the last `columns` stays intact while all rows before theirs are written.
  const auto keeps = [&](int64_t columns) {
    return (s.vocab - columns) * row_bytes(s) + panel_bytes(s, p, columns) <= end;
  };
  if (copies && keeps(others) && keeps(last)) return others;
  const int64_t scaled = forms_dz(s.kernels.kept) || !s.grad_weight ? 0 : scaled_bytes(s, p);
  const int64_t left = end - alignment - p.stored_columns * row_bytes(s) - scaled;
  const int64_t row = row_bytes(s), column = column_bytes(s, p);
  const int64_t columns = left / (copies ? std::max(row, column) : row + column);
  return in_tiles(p, std::clamp<int64_t>(columns, 0, others - 1));
}

int64_t lent_offset(const LinearShape& s, const LinearPlan& p, const PanelPlace& at) {
  if (at.first < kept_columns(p)) {
    return lent_e(s, p) + (at.first - p.stored_columns) * column_bytes(s, p);
  }
  return (weight_bytes(s) - panel_bytes(s, p, at.columns)) / alignment * alignment;
}

int64_t lent_scaled_input(const LinearShape& s, const LinearPlan& p) {
  if (!scales_apart(s, p) || !lends_weight(s, p)) return -1;
  const int64_t at = (weight_bytes(s) - scaled_bytes(s, p)) / alignment * alignment;
  return at >= kept_columns(p) * row_bytes(s) ? at : -1;
}

PanelPlace panel_at(const LinearShape& s, const LinearPlan& p, int64_t first) {
  const int64_t left = s.vocab - first;
  if (p.remade_columns >= left) return {.first = first, .columns = left};
  const int64_t room = lends_weight(s, p) ? room_behind(s, p, first) : 0;
  if (room > p.remade_columns) return {.first = first, .columns = room, .lent = true};
  return {.first = first, .columns = p.remade_columns};
}

int64_t panels_like(const LinearShape& s, const LinearPlan& p, const PanelPlace& at) {
  if (!at.lent) return (s.vocab - at.first) / at.columns;
  // The bytes that must be left after `first`, so that room_behind(first) is at least at.columns.
  const int64_t bytes = at.columns * (row_bytes(s) + column_bytes(s, p)) + 2 * alignment;
  return (s.vocab - divide_up(bytes, row_bytes(s)) - at.first) / at.columns + 1;
}

PanelPlace kept_part_at(const LinearShape& s, const LinearPlan& p, int64_t first) {
  if (first < p.stored_columns) {
    return {.columns = p.stored_columns, .kept = s.kept_columns > 0};
  }
  PanelPlace at{.first = first, .columns = kept_columns(p) - first, .lent = true};
  const int64_t free = lent_offset(s, p, at) - first * row_bytes(s);
  const int64_t in_place = in_tiles(p, free / row_bytes(s));
  if (in_place >= at.columns) return at;
  at.copied = in_place < workspace_columns(p);
  at.columns = std::min(at.columns, at.copied ? workspace_columns(p) : in_place);
  return at;
}

Panel panel_of(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
               const PanelPlace& at) {
  if (at.columns == 0) return {};
  if (at.kept) {
    const int64_t rows = kept_rows_of(call.shape.tokens);
    char* data = call.kept.data + at.first * rows * size_of(call.shape.dtype);
    return {data, rows, at.first, at.columns, true};
  }
  char* data = at.copied ? m.remade
               : at.lent ? call.grad_weight.as<char>() + lent_offset(call.shape, plan, at)
               : at.first < plan.stored_columns ? m.stored
                                                : m.remade;
  return {data, plan.panel_rows, at.first, at.columns, true};
}

}  // namespace logitless::cuda::tiled
