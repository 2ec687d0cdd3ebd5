// SPDX-License-Identifier: Apache-2.0
// This file decides where a linear op's arrays lie in its workspace.
#include "src/cuda/linear/linear.h"

#include <algorithm>

namespace logitless::cuda {

namespace {

void place_tokens_in(Arena* arena, const LinearShape& s, LinearMemory* memory) {
  LinearMemory& m = *memory;
  m.tokens = place_tokens(arena, s.tokens, {s.screens_gradients, s.maps, s.arranges()});
  if (s.arranges()) {
    m.compacted = m.tokens;
    const Tokens own = place_tokens(arena, s.tokens, {});
    m.compacted.row = own.row, m.compacted.target = own.target;
    m.compacted.target_weight = own.target_weight, m.compacted.token_weight = own.token_weight;
  }
}

Partials place_partials(Arena* arena, const LinearShape& s, const LinearPlan& p) {
  const int64_t sums = p.token_chunk * p.segments;
  const auto take = [&]<class T>(bool is_there, T** array, int64_t count) {
    if (is_there) *array = arena->take<T>(count);
  };
  const int64_t singles = int64_t{p.single_tiles} * p.single_rows;
  Partials made{.segments = p.segments, .unit_width = p.unit_width, .single_rows = p.single_rows};
  take(singles > 0, &made.single_maximum, singles);
  take(singles > 0, &made.single_sum, singles);
  take(true, &made.maximum, sums);
  take(true, &made.sum, sums);
  take(s.sums.has(SumKind::shifted), &made.shifted, sums);
  take(s.sums.has(SumKind::weighted), &made.weighted, sums);
  take(s.sums.has(SumKind::argmax), &made.argmax, sums);
  take(s.sums.has(SumKind::logits), &made.logits, sums);
  take(s.sums.has(SumKind::squares), &made.squared, sums);
  take(s.sums.has(SumKind::above), &made.above, sums);
  return made;
}

LinearMemory place_in(Arena* arena, const LinearShape& s, const LinearPlan& p) {
  const int64_t element = size_of(s.dtype), pitch = p.hidden_pitch, row = pitch * element;
  const int64_t chunk = p.token_chunk, rows = panel_rows(p);
  LinearMemory m;
  const auto take = [&]<class T>(bool is_there, T** array, int64_t count) {
    if (is_there) *array = arena->take<T>(count);
  };
  place_tokens_in(arena, s, &m);
  take(true, &m.losses, s.tokens);
  take(true, &m.rows_finished, 1);
  take(p.holds_logits, &m.library, matrix_library_bytes);
  take(s.copies_weight, &m.weight, s.vocab * row);
  take(s.grad_input && p.tail_columns > 0, &m.weight_tail, 8 * row);
  take(p.copies_input && !p.lends_input, &m.input, rows * row);
  take(p.scales_apart && p.lent_scaled < 0, &m.scaled, rows * row);
  take(s.bias, &m.bias_row, s.vocab + column_padding);
  take(s.class_weights, &m.class_weights, s.vocab + column_padding);
  take(true, &m.target_logit, chunk);
  take(s.maps, &m.slope, chunk);
  take(s.gradients(), &m.gradients, chunk);
  take(s.gradients() && (s.remakes_dz || s.forms_dz), &m.target_gradient, chunk);
  take(s.gradients(), &m.factors, chunk);
  take(s.gradients(), &m.again, 1 + chunk);
  const bool stores = p.stored_columns > 0 && s.kept_columns == 0;
  take(stores, &m.stored, rows * stored_pitch(p.stored_columns) * element);
  take(p.holds_logits, &m.logits, p.block_rows * p.block_columns);
  // The arrays that only the forward pass needs come first; those that only the gradients need then
  // take the same memory.
  const uint64_t start = arena->used();
  if (s.forward) {
    m.partials = place_partials(arena, s, p);
  }
  const uint64_t forward_end = arena->used();
  arena->back_to(start);
  if (s.remakes_dz && stores) {
    m.remade = m.stored;  // the chunk's E is used up when columns are made again
  } else {
    take(p.remade_columns > 0, &m.remade, rows * p.remade_columns * element);
  }
  take(p.grad_input_sum, &m.grad_input_sum, std::min(chunk, s.tokens) * pitch);
  take(p.sum_rows > 0, &m.row_sums, p.sum_rows * pitch);
  take(p.slots > 0, &m.slots, p.slots * p.slot_size);
  arena->at_least(forward_end);
  take(p.grad_weight_sum, &m.grad_weight_sum, (s.rows_of_weight() - p.lent_sum_rows) * pitch);
  take(tail_rows(s, p) > 0, &m.weight_tail_sum, 8 * pitch);
  take(s.grad_bias, &m.bias_sum, s.vocab);
  take(s.grad_bias, &m.bias_slabs, divide_up(rows, bias_slab_rows) * p.slab_columns);
  take(p.smooths_e, &m.class_row, pitch);
  take(p.smooths_e, &m.smoothed_row, pitch);
  take(p.smooths_e, &m.slabs,
       std::max(divide_up(s.vocab, vocab_slab_rows), divide_up(chunk, token_slab_rows)) * pitch);
  return m;
}

}  // namespace

uint64_t bytes_of(const LinearShape& shape, const LinearPlan& plan) {
  Arena arena;
  place_in(&arena, shape, plan);
  return arena.used();
}

LinearMemory place(const LinearCall& call, const LinearPlan& plan, char* workspace) {
  Arena arena(workspace);
  LinearMemory m = place_in(&arena, call.shape, plan);
  if (call.shape.kept_columns > 0) m.stored = call.kept.data;
  if (plan.lends_input) m.input = call.grad_input.as<char>();
  if (plan.lent_scaled >= 0) m.scaled = call.grad_weight.as<char>() + plan.lent_scaled;
  if (!plan.scales_apart) m.scaled = m.input;
  return m;
}

Operand weight_rows(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                    int64_t column) {
  if (call.shape.copies_weight) {
    return {m.weight + column * plan.hidden_pitch * size_of(call.shape.dtype), plan.hidden_pitch,
            1};
  }
  const TensorView& w = call.weight;
  // The stride of a single row or column does not matter, but cuBLASLt checks it: it is made to
  // look like a matrix's.
  const bool along = w.stride[1] == 1 || call.shape.hidden == 1;
  return {w.as<char>() + column * w.stride[0] * size_of(w.dtype), w.stride[0],
          along ? 1 : w.stride[1]};
}

}  // namespace logitless::cuda
