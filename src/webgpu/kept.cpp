// SPDX-License-Identifier: Apache-2.0
// Kept state, which Forward writes for Backward: raw logits of the vocabulary's first columns as
// f32 or, for a divergence, the gradient of all columns in the input's dtype. Each token has its
// own row, whatever the chunks and windows:
//   kept       slabs of up to 4096 columns, each [rows (kept.h), columns], one after the other
//   kept_rows  [N, 8]  KeptRow
// A chunk's rows of a slab fit in one binding of every device that keeps state.
#include "src/kept.h"

#include <algorithm>
#include <bit>

#include "src/webgpu/run.h"

namespace logitless::webgpu {
namespace {

constexpr int64_t kSlabColumns = 4096;
// A slab's width is a multiple of this: the f32 columns that fit into a block of 16-bit ones.
constexpr int64_t kRowUnit = 32;
// This backend's values of KeptRow::layout.
constexpr float kLayout = 3, kDivergenceLayout = 4;

}  // namespace

// All columns, or as many whole blocks as fit, so that the next window starts at a valid offset of
// a binding. None for a shard, because Backward's kernels expect the row's state to be Forward's.
int64_t columns_kept(const Call& call) {
  if (!call.kept || call.tokens() <= 0 || call.shard()) return 0;
  const int64_t blocks = call.kept.shape[0] / kept_rows_of(call.tokens());
  // A divergence keeps elements of the input's dtype, others f32.
  const int64_t room = blocks * kept_block * (call.diverges ? 4 : size_of(call.kept.dtype)) / 4;
  return room < call.vocab() ? room / kept_block * kept_block : call.vocab();
}

// The bytes of a chunk's rows in a slab, and up to 256 before the first row.
uint64_t slab_binding_bytes(int64_t tokens) {
  return static_cast<uint64_t>(4 * tokens * kSlabColumns) + 256;
}

// Calls f(view, part, rows) for the window's kept columns, a slab at a time: their place in `kept`,
// and in the block. Returns the window's first column that is not kept.
template <class F>
int64_t Run::each_slab(const Chunk& chunk, const Window& window, F&& f) const {
  const int64_t end = std::min(window.first + window.columns, plan_.kept_columns);
  int64_t column = window.first;
  while (column < end) {
    const int64_t slab = column / kSlabColumns * kSlabColumns;
    const int64_t columns = std::min(slab + kSlabColumns, end) - column;
    const int64_t width = round_up(std::min(kSlabColumns, plan_.kept_columns - slab), kRowUnit);
    TensorView view = call_["kept"];
    if (!problem_.diverges) view.dtype = DType::f32;
    view.shape = {problem_.tokens, width};
    view.stride = {width, 1};
    view.byte_offset +=
        static_cast<uint64_t>(size_of(view.dtype) * slab * kept_rows_of(problem_.tokens));
    const Part part{chunk.first, chunk.tokens, column - slab, columns};
    const int64_t in_block = column - window.index * plan_.window;
    f(view, part,
      dense(Role::block, static_cast<int64_t>(block(window).offset / 4) + in_block, plan_.window));
    column += columns;
  }
  return column;
}

// Copies the window's logits from the block to `kept`, as far as they are kept.
void Run::keep_logits(const Chunk& chunk, const Window& window) {
  each_slab(chunk, window, [&](const TensorView& view, const Part& part, const Dense& rows) {
    scatter(rows, view, part, true);
  });
}

// Copies the window's kept logits to the block; returns the columns that must be computed again.
Run::Window Run::take_logits(const Chunk& chunk, const Window& window) {
  const int64_t first =
      each_slab(chunk, window, [&](const TensorView& view, const Part& part, const Dense& rows) {
        gather(view, part, rows, round_up(part.columns, 4), true);
      });
  return {window.index, first, window.first + window.columns - first};
}

// Forward writes the rows' state to `kept_rows`; Backward compares it with the given state.
void Run::keep_or_check_rows(const Chunk& chunk) {
  if (!given("kept") || chunk.tokens == 0) return;
  int64_t base;
  const Binding kept_rows =
      bound(call_["kept_rows"],
            {.first_row = chunk.first, .rows = chunk.tokens, .columns = kept_row_width}, &base);
  const auto columns = static_cast<float>(plan_.kept_columns);
  KeptParams p{.tokens = u32(chunk.tokens),
               .base = u32(base),
               .engine = std::bit_cast<uint32_t>(problem_.diverges ? kDivergenceLayout : kLayout),
               .columns = std::bit_cast<uint32_t>(columns),
               .consumes = call_.consume_kept ? 1u : 0u,
               .diverges = problem_.diverges ? 1u : 0u};
  const uint32_t groups = blocks(chunk.tokens, 256);
  if (call_.forward) {
    recorder_.dispatch("keep", "keep", {}, p, {role(Role::rows), {}, kept_rows}, groups);
    return;
  }
  recorder_.dispatch("keep", "check", {}, p, {role(Role::rows), role(Role::inputs), kept_rows},
                     groups);
  if (!given("fault")) return;
  // The fault has its own dispatch, because a dispatch writes at most one of the caller's tensors.
  const Binding fault = bound(call_["fault"], {}, &base);
  p.fault = u32(base);
  recorder_.dispatch("keep", "report", {}, p, {role(Role::rows), {}, {}, fault}, groups);
}

}  // namespace logitless::webgpu
