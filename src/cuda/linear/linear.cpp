// SPDX-License-Identifier: Apache-2.0
// Where a linear op's arrays lie in its workspace.
#include "src/cuda/linear/linear.h"

#include <algorithm>

namespace logitless::cuda {

namespace {
int64_t row_bytes(const LinearShape& s, const LinearPlan& p) {
  return p.hidden_pitch * size_of(s.dtype);
}
}  // namespace

void place_first(const LinearShape& s, const LinearPlan&, Arena* arena, LinearMemory* m) {
  m->tokens = place_tokens(arena, s.tokens);
  m->losses = arena->take<float>(s.tokens);
  m->rows_finished = arena->take<int32_t>(1);
}

void place_weight(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  if (s.copies_weight) m->weight = arena->take<char>(s.vocab * row_bytes(s, p));
}

void place_stored(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  if (p.stored_columns == 0) return;
  m->stored = arena->take<char>(panel_rows(p) * stored_pitch(p.stored_columns) * size_of(s.dtype));
}

void place_partials(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  const int64_t count = p.token_chunk * p.segments;
  m->partials.segments = p.segments;
  m->partials.maximum = arena->take<float>(count);
  m->partials.sum = arena->take<float>(count);
  if (s.entropy) m->partials.shifted = arena->take<float>(count);
  if (s.weighted_sum) m->partials.weighted = arena->take<float>(count);
  if (s.argmax) m->partials.argmax = arena->take<int32_t>(count);
}

void place_remade(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  if (p.remade_columns == 0) return;
  m->remade = arena->take<char>(panel_rows(p) * p.remade_columns * size_of(s.dtype));
}

void place_input_sums(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  if (p.grad_input_sum) {
    m->grad_input_sum = arena->take<float>(std::min(p.token_chunk, s.tokens) * p.hidden_pitch);
  }
  if (p.sum_rows > 0) m->row_sums = arena->take<float>(p.sum_rows * p.hidden_pitch);
}

void place_weight_sums(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  if (!p.grad_weight_sum) return;
  m->grad_weight_sum = arena->take<float>((s.rows_of_weight() - p.lent_sum_rows) * p.hidden_pitch);
}

void place_bias(const LinearShape& s, const LinearPlan& p, int64_t columns, Arena* arena,
                LinearMemory* m) {
  if (!s.grad_bias) return;
  m->bias_sum = arena->take<float>(s.vocab);
  m->bias_slabs = arena->take<float>(divide_up(panel_rows(p), bias_slab_rows) * columns);
}

void place_smoothing(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  if (!smooths_e(s, p)) return;
  const int64_t slabs =
      std::max(divide_up(s.vocab, vocab_slab_rows), divide_up(p.token_chunk, token_slab_rows));
  m->class_row = arena->take<float>(p.hidden_pitch);
  m->smoothed_row = arena->take<float>(p.hidden_pitch);
  m->slabs = arena->take<float>(slabs * p.hidden_pitch);
}

std::array<float*, 2> place_states(const LinearShape& s, Arena* arena) {
  return {arena->take<float>(s.tokens), arena->take<float>(s.tokens)};
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
