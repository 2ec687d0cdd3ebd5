// SPDX-License-Identifier: Apache-2.0
// Where a linear op's arrays lie in its workspace.
#include "src/cuda/linear/linear.h"

#include <algorithm>

#include "src/cuda/linear/sm90/forward.h"

namespace logitless::cuda {

LinearMemory place_linear(const LinearShape& s, const LinearPlan& p, Arena* arena) {
  const int64_t element = size_of(s.dtype);
  const int64_t row_bytes = p.hidden_pitch * element, rows = panel_rows(s, p);
  const bool stores = p.stored_columns > 0;
  LinearMemory m;
  m.tokens = place_tokens(arena, s.tokens);
  m.losses = arena->take<float>(s.tokens);
  m.rows_finished = arena->take<int32_t>(1);
  if (!s.fused) m.library = arena->take<char>(matrix_library_bytes);
  if (s.copies_weight) m.weight = arena->take<char>(s.vocab * row_bytes);
  if (s.grad_input && s.vocab % 8 != 0 && !s.fused) {
    m.weight_tail = arena->take<char>(8 * row_bytes);
  }
  if (!lends_input(s, p) && p.copies_input) m.input = arena->take<char>(rows * row_bytes);
  m.scaled = m.input;
  if (scales_apart(s, p)) {
    m.scaled = lent_scaled_input(s, p) < 0 ? arena->take<char>(rows * row_bytes) : nullptr;
  }
  if (s.bias) m.bias_row = arena->take<float>(s.vocab + column_padding);
  if (s.class_weights) m.class_weights = arena->take<float>(s.vocab + column_padding);
  m.target_logit = arena->take<float>(p.token_chunk);
  if (s.gradients()) {
    m.gradients = arena->take<RowGradient>(p.token_chunk);
    if (s.fused) m.target_gradient = arena->take<float>(p.token_chunk);
    m.factors = arena->take<RowFactors>(p.token_chunk);
    m.again = arena->take<int32_t>(1 + p.token_chunk);
  }
  if (stores) m.stored = arena->take<char>(rows * stored_pitch(p.stored_columns) * element);
  if (!s.fused) m.logits = arena->take<float>(p.block_rows * p.block_columns);
  // What only the forward pass needs, then in its place what only the gradients do.
  const uint64_t start = arena->used();
  if (s.forward) {
    const int64_t count = p.token_chunk * p.segments;
    m.partials.segments = p.segments;
    m.partials.anchored = s.fused && !s.entropy && !s.argmax;
    m.partials.unit_width = p.unit_width;
    m.partials.single_rows = static_cast<int32_t>(std::min<int64_t>(p.token_chunk, 512));
    const int64_t singles = int64_t{p.single_tiles} * m.partials.single_rows;
    if (singles > 0) {
      m.partials.single_maximum = arena->take<float>(singles);
      m.partials.single_sum = arena->take<float>(singles);
    }
    m.partials.maximum = arena->take<float>(count);
    m.partials.sum = arena->take<float>(count);
    if (s.entropy) m.partials.shifted = arena->take<float>(count);
    if (s.weighted_sum) m.partials.weighted = arena->take<float>(count);
    if (s.argmax) m.partials.argmax = arena->take<int32_t>(count);
  }
  const uint64_t forward_end = arena->used();
  arena->back_to(start);
  if (stores && s.fused) {
    m.remade = m.stored;
  } else if (p.remade_columns > 0) {
    m.remade = arena->take<char>(rows * p.remade_columns * element);
  }
  if (p.grad_input_sum) {
    m.grad_input_sum = arena->take<float>(std::min(p.token_chunk, s.tokens) * p.hidden_pitch);
  }
  if (p.sum_rows > 0) {
    m.row_sums = arena->take<float>(p.sum_rows * p.hidden_pitch);
  }
  if (p.slots > 0) {
    m.slots = arena->take<float>(int64_t{p.slots} * slot_rows(p) * sm90::sum_columns);
  }
  arena->at_least(forward_end);
  if (p.grad_weight_sum) {
    m.grad_weight_sum = arena->take<float>((s.rows_of_weight() - p.lent_sum_rows) * p.hidden_pitch);
  }
  if (s.grad_weight && s.vocab % 8 != 0 && !s.fused) {
    m.weight_tail_sum = arena->take<float>(8 * p.hidden_pitch);
  }
  if (s.grad_bias) {
    const int64_t most = std::max(p.stored_columns, p.remade_columns);
    const int64_t columns = s.fused ? std::min(bias_columns, round_up(s.vocab, 64)) : most;
    m.bias_sum = arena->take<float>(s.vocab);
    m.bias_slabs = arena->take<float>(divide_up(rows, bias_slab_rows) * columns);
  }
  if (multiplies_e(s, p) && s.smoothing) {
    const int64_t slabs =
        std::max(divide_up(s.vocab, vocab_slab_rows), divide_up(p.token_chunk, token_slab_rows));
    m.class_row = arena->take<float>(p.hidden_pitch);
    m.smoothed_row = arena->take<float>(p.hidden_pitch);
    m.slabs = arena->take<float>(slabs * p.hidden_pitch);
  }
  return m;
}

std::array<float*, 2> place_states(const LinearShape& s, Arena* arena) {
  return {arena->take<float>(s.tokens), arena->take<float>(s.tokens)};
}

Panel panel_of(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
               const PanelPlace& at) {
  if (at.columns == 0) return {};
  char* data = at.lent ? call.grad_weight.as<char>() + lent_offset(call.shape, plan, at)
               : at.first < plan.stored_columns ? m.stored
                                                : m.remade;
  return {data, panel_rows(call.shape, plan), at.first, at.columns, true};
}

Operand weight_rows(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                    int64_t column) {
  if (call.shape.copies_weight) {
    return {m.weight + column * plan.hidden_pitch * size_of(call.shape.dtype), plan.hidden_pitch,
            1};
  }
  const TensorView& w = call.weight;
  // One row or one column: the stride that does not matter is made to look like a matrix's.
  const bool along = w.stride[1] == 1 || call.shape.hidden == 1;
  return {w.as<char>() + column * w.stride[0] * size_of(w.dtype), w.stride[0],
          along ? 1 : w.stride[1]};
}

}  // namespace logitless::cuda
