// SPDX-License-Identifier: Apache-2.0
// Where a linear op's arrays are in its workspace.
#include "src/cuda/linear/linear.h"

#include "src/cuda/linear/engine.h"

#include <algorithm>

namespace logitless::cuda {

namespace {

void place_tokens_in(Arena* arena, const LinearShape& s, LinearMemory* memory) {
  LinearMemory& m = *memory;
  m.tokens = place_tokens(arena, s.tokens, {s.screens_gradients, s.maps, arranges(s)});
  if (arranges(s)) {
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
  Partials made{.segments = p.segments};
  take(true, &made.maximum, sums);
  take(true, &made.sum, sums);
  take(s.sums.has(SumKind::shifted), &made.shifted, sums);
  take(s.sums.has(SumKind::weighted), &made.weighted, sums);
  take(s.sums.has(SumKind::argmax), &made.argmax, sums);
  take(s.sums.has(SumKind::logits), &made.logits, sums);
  take(s.sums.has(SumKind::squares), &made.squared, sums);
  const bool has_mass = s.sums.has(SumKind::mass);
  take(s.sums.has(SumKind::above), &made.above, has_mass ? 2 * sums : sums);
  if (has_mass) made.mass_rows = static_cast<int32_t>(p.token_chunk);
  return made;
}

LinearMemory place_in(Arena* arena, const Engine& engine, const LinearShape& s,
                      const LinearPlan& p) {
  const int64_t element = size_of(s.dtype), pitch = s.hidden_pitch(), row = pitch * element;
  const int64_t chunk = p.token_chunk, rows = p.panel_rows;
  const bool remakes_dz = s.kernels.others == Origin::again_dz;
  LinearMemory m;
  const auto take = [&]<class T>(bool is_there, T** array, int64_t count) {
    if (is_there) *array = arena->take<T>(count);
  };
  place_tokens_in(arena, s, &m);
  take(true, &m.losses, s.tokens);
  take(true, &m.rows_finished, 1);
  take(s.copies_weight, &m.weight, s.vocab * row);
  take(s.grad_input && tail_columns(s) > 0, &m.weight_tail, 8 * row);
  take(p.copies_input && !lends_input(s, p), &m.input, rows * row);
  take(true, &m.target_logit, chunk);
  take(s.maps, &m.slope, chunk);
  take(s.gradients(), &m.gradients, chunk);
  take(s.gradients() && (remakes_dz || forms_dz(s.kernels.kept) || s.chosen > 0),
       &m.target_gradient, chunk);
  take(s.gradients(), &m.factors, chunk);
  take(s.gradients(), &m.again, 1 + chunk);
  take(s.chosen > 0, &m.chosen_sizes, s.tokens);
  take(s.chooses, &m.lists.first, s.tokens);
  take(s.chooses, &m.lists.count, s.tokens);
  take(s.chosen > 0, &m.chosen.column, s.chosen);
  take(s.chosen > 0, &m.chosen.gradient, s.chosen);
  take(s.chosen > 0, &m.chosen.logit, s.chosen);
  const bool stores = p.stored_columns > 0 && s.kept_columns == 0;
  take(stores, &m.stored, rows * stored_pitch(p.stored_columns) * element);
  engine.place(Lifetime::call, s, p, arena, &m);
  // The forward pass's arrays are placed first; those of the gradients reuse their memory.
  const uint64_t start = arena->used();
  if (s.forward) {
    m.partials = place_partials(arena, s, p);
    engine.place(Lifetime::forward, s, p, arena, &m);
  }
  const uint64_t forward_end = arena->used();
  arena->back_to(start);
  if (remakes_dz && stores) {
    m.remade = m.stored;  // E is no longer used when columns are computed again
  } else {
    take(p.remade_columns > 0, &m.remade, rows * p.remade_columns * element);
  }
  take(sums_grad_input(s, p), &m.grad_input_sum, std::min(chunk, s.tokens) * pitch);
  take(p.sum_rows > 0, &m.row_sums, p.sum_rows * pitch);
  engine.place(Lifetime::gradients, s, p, arena, &m);
  arena->at_least(forward_end);
  take(sums_grad_weight(s, p), &m.grad_weight_sum, (s.rows_of_weight() - p.lent_sum_rows) * pitch);
  take(tail_rows(s) > 0, &m.weight_tail_sum, 8 * pitch);
  take(s.grad_bias, &m.bias_sum, s.vocab);
  take(smooths_e(s, p), &m.class_row, pitch);
  take(smooths_e(s, p), &m.smoothed_row, pitch);
  take(smooths_e(s, p), &m.slabs,
       std::max(divide_up(s.vocab, vocab_slab_rows), divide_up(chunk, token_slab_rows)) * pitch);
  return m;
}

}  // namespace

uint64_t bytes_of(const Engine& engine, const LinearShape& shape, const LinearPlan& plan) {
  Arena arena;
  place_in(&arena, engine, shape, plan);
  return arena.used();
}

LinearMemory place(const Engine& engine, const LinearCall& call, const LinearPlan& plan,
                   char* workspace) {
  Arena arena(workspace);
  LinearMemory m = place_in(&arena, engine, call.shape, plan);
  if (call.ids) m.lists.set(call.ids, call.id_offsets);
  if (call.shape.kept_columns > 0) m.stored = call.kept.data;
  if (lends_input(call.shape, plan)) m.input = call.grad_input.as<char>();
  if (!scales_apart(call.shape, plan)) m.scaled = m.input;
  return m;
}

Status check_linear_extents(std::initializer_list<int64_t> extents) {
  constexpr int64_t most = (int64_t{1} << 31) - 65536;
  for (const int64_t extent : extents) {
    if (extent <= most) continue;
    return error(StatusCode::not_supported, "cuda: an extent is %lld; allowed: up to %lld",
                 static_cast<long long>(extent), static_cast<long long>(most));
  }
  return {};
}

Operand weight_rows(const LinearCall& call, const LinearMemory& m, int64_t column) {
  if (call.shape.copies_weight) {
    return {m.weight + column * call.shape.hidden_pitch() * size_of(call.shape.dtype),
            call.shape.hidden_pitch(), 1};
  }
  const TensorView& w = call.weight;
  // cuBLASLt checks the stride even of a single row or column, so it is set to a valid one.
  const bool along = w.stride[1] == 1 || call.shape.hidden == 1;
  return {w.as<char>() + column * w.stride[0] * size_of(w.dtype), w.stride[0],
          along ? 1 : w.stride[1]};
}

}  // namespace logitless::cuda
