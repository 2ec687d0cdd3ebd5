// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/plan.h"

#include <algorithm>

#include "src/cuda/linear/plan_search.h"

namespace logitless::cuda {

const char* name_of(PlanKind kind) {
  constexpr const char* names[] = {
      "loss only", "whole", "token chunks", "stored and recomputed", "frugal", "two passes"};
  return names[static_cast<int>(kind)];
}

void settle(const LinearShape& s, LinearPlan* p) {
  p->stored_columns = std::min(p->stored_columns, s.vocab);
  p->remade_columns = s.gradients() && p->stored_columns < s.vocab
                          ? std::min(p->remade_columns, round_up(s.vocab, 64))
                          : 0;
  const int64_t kept = kept_columns(*p);
  p->kind = !s.gradients()   ? PlanKind::loss_only
            : kept == 0      ? PlanKind::frugal
            : kept < s.vocab ? PlanKind::mixed
            : p->chunks > 1  ? PlanKind::chunks
                             : PlanKind::whole;
  // grad_weight's own memory, with half as many bytes, takes the f32 sums of half its rows. At
  // least one row must fit in E's memory when the sums are rounded.
  const bool lends_sum = sums_grad_weight(s, *p) && p->kind == PlanKind::chunks &&
                         s.kernels.lends_grad_weight && rows_in_place_of_e(s, *p) > 0;
  p->lent_sum_rows = lends_sum ? std::min(s.vocab / 2, s.rows_of_weight()) : 0;
  // If all of E is kept, a part of it in grad_weight's memory, one product can write grad_input of
  // all columns before anything of grad_weight is written.
  p->input_first &= p->lent_columns > 0 && kept == s.vocab && s.kernels.direct_grad_input;
  p->sum_rows = 0;
  if (s.grad_input && !sums_grad_input(s, *p) && !s.kernels.direct_grad_input) {
    // On the CUDA cores a product of half as many rows would idle a tenth of the multiprocessors.
    const int64_t sums = p->block_rows * p->block_columns * (s.on_cuda_cores ? 2 : 1);
    p->sum_rows = std::clamp<int64_t>(sums / s.hidden_pitch() / 128 * 128,
                                      std::min<int64_t>(p->token_chunk, 128), p->token_chunk);
  }
}

void set_block(const LinearShape& s, int64_t bytes, LinearPlan* p) {
  // A row's list is read and written once per block, so blocks have many columns and few rows.
  const int64_t most_block_rows = s.listed > 0 ? 1024 : 8192;
  p->block_rows = std::min({p->token_chunk, most_block_rows,
                            std::max<int64_t>(bytes / (4 * segment_columns) / 128 * 128, 128)});
  p->block_columns = std::clamp(bytes / (4 * p->block_rows) / segment_columns * segment_columns,
                                segment_columns, round_up(s.vocab, segment_columns));
}

LinearShape first_pass(const LinearShape& shape, int64_t first_rows) {
  LinearShape s = shape;
  s.grad_bias = false;
  s.grad_weight = first_rows > 0;
  s.weight_rows = first_rows;
  return s;
}

// The second pass is a Backward on a shard of the vocabulary, with given row states.
LinearShape second_pass(const LinearShape& shape, int64_t first_rows) {
  LinearShape s = shape;
  s.vocab -= first_rows;
  s.forward = s.grad_input = false;
  s.kernels.kept = Origin::again_dz;
  s.kernels.direct_grad_input = s.kernels.lends_grad_input = false;
  s.sums = {};
  s.class_weights &= s.smoothing;
  return s;
}

uint64_t state_bytes(const LinearShape& shape) {
  Arena arena;
  for (int states = 0; states < 2; ++states) arena.take<float>(shape.tokens);
  return arena.used();
}

}  // namespace logitless::cuda
