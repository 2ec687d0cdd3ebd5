// SPDX-License-Identifier: Apache-2.0
// Where the arrays of a call lie in its workspace.
#include <algorithm>

#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/sm90/forward.h"
#include "src/cuda/linear/sm90/panels.h"
#include "src/cuda/linear/sm90/teams.h"
#include "src/cuda/linear/units.h"

namespace logitless::cuda::sm90 {
namespace {

// The input and the scaled one, where no output's memory holds them: complete in run.cpp.
void place_input(const LinearShape& s, const LinearPlan& p, Arena* arena, LinearMemory* m) {
  const int64_t bytes = panel_rows(p) * p.hidden_pitch * size_of(s.dtype);
  if (!lends_input(s, p) && p.copies_input) m->input = arena->take<char>(bytes);
  m->scaled = m->input;
  if (scales_apart(s, p)) {
    m->scaled = lent_scaled_input(s, p) < 0 ? arena->take<char>(bytes) : nullptr;
  }
}

}  // namespace

LinearMemory HopperEngine::place(const LinearShape& s, const LinearPlan& p, Arena* arena) const {
  LinearMemory m;
  place_first(s, p, arena, &m);
  place_weight(s, p, arena, &m);
  place_input(s, p, arena, &m);
  if (s.bias) m.bias_row = arena->take<float>(s.vocab + column_padding);
  if (s.class_weights) m.class_weights = arena->take<float>(s.vocab + column_padding);
  m.target_logit = arena->take<float>(p.token_chunk);
  if (s.gradients()) {
    m.gradients = arena->take<RowGradient>(p.token_chunk);
    m.target_gradient = arena->take<float>(p.token_chunk);
    m.factors = arena->take<RowFactors>(p.token_chunk);
    m.again = arena->take<int32_t>(1 + p.token_chunk);
  }
  place_stored(s, p, arena, &m);
  // The arrays that only the forward pass needs come here, then in its place what only the
  // gradients do.
  const uint64_t start = arena->used();
  if (s.forward) {
    m.partials.anchored = !finds_maximum(s);
    m.partials.unit_width = p.unit_width;
    m.partials.single_rows = static_cast<int32_t>(std::min<int64_t>(p.token_chunk, unit_rows));
    const int64_t singles = int64_t{p.single_tiles} * m.partials.single_rows;
    if (singles > 0) {
      m.partials.single_maximum = arena->take<float>(singles);
      m.partials.single_sum = arena->take<float>(singles);
    }
    place_partials(s, p, arena, &m);
  }
  const uint64_t forward_end = arena->used();
  arena->back_to(start);
  if (p.stored_columns > 0) {
    m.remade = m.stored;  // once E is used
  } else {
    place_remade(s, p, arena, &m);
  }
  place_input_sums(s, p, arena, &m);
  if (p.slots > 0) m.slots = arena->take<float>(int64_t{p.slots} * slot_rows(p) * sum_columns);
  arena->at_least(forward_end);
  place_weight_sums(s, p, arena, &m);
  place_bias(s, p, std::min(bias_columns, round_up(s.vocab, 64)), arena, &m);
  place_smoothing(s, p, arena, &m);
  return m;
}

}  // namespace logitless::cuda::sm90
