// SPDX-License-Identifier: Apache-2.0
// Where the arrays of a call lie in its workspace.
#include <algorithm>

#include "src/cuda/linear/portable/engine.h"

namespace logitless::cuda {

LinearMemory PortableEngine::place(const LinearShape& s, const LinearPlan& p, Arena* arena) const {
  const int64_t row_bytes = p.hidden_pitch * size_of(s.dtype);
  const bool has_tail = s.vocab % 8 != 0;
  LinearMemory m;
  place_first(s, p, arena, &m);
  m.library = arena->take<char>(matrix_library_bytes);
  place_weight(s, p, arena, &m);
  if (s.grad_input && has_tail) m.weight_tail = arena->take<char>(8 * row_bytes);
  const int64_t input_bytes = panel_rows(p) * p.hidden_pitch * size_of(s.dtype);
  m.input = arena->take<char>(input_bytes);
  m.scaled = scales_apart(s, p) ? arena->take<char>(input_bytes) : m.input;
  m.target_logit = arena->take<float>(p.token_chunk);
  if (s.gradients()) {
    m.gradients = arena->take<RowGradient>(p.token_chunk);
    m.factors = arena->take<RowFactors>(p.token_chunk);
    m.again = arena->take<int32_t>(1 + p.token_chunk);
  }
  place_stored(s, p, arena, &m);
  m.logits = arena->take<float>(p.block_rows * p.block_columns);
  // The arrays that only the forward pass needs come here, then in its place what only the
  // gradients do.
  const uint64_t start = arena->used();
  if (s.forward) place_partials(s, p, arena, &m);
  const uint64_t forward_end = arena->used();
  arena->back_to(start);
  place_remade(s, p, arena, &m);
  place_input_sums(s, p, arena, &m);
  arena->at_least(forward_end);
  place_weight_sums(s, p, arena, &m);
  if (s.grad_weight && has_tail) m.weight_tail_sum = arena->take<float>(8 * p.hidden_pitch);
  place_bias(s, p, std::max(p.stored_columns, p.remade_columns), arena, &m);
  place_smoothing(s, p, arena, &m);
  return m;
}

}  // namespace logitless::cuda
