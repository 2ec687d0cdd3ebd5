// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/plan.h"

#include <algorithm>

#include "src/cuda/linear/engine.h"
#include "src/cuda/linear/plan_search.h"

namespace logitless::cuda {
namespace {

// The last few answers of each thread: planning takes longer than enqueuing a small call.
struct Question {
  const Engine* engine = nullptr;
  int kind = -1;
  LinearShape shape;
  DeviceSpeed speed;
  uint64_t bytes = 0;
  bool operator==(const Question&) const = default;
};
template <class F>
LinearPlan remembered(const Question& question, F&& plan) {
  constexpr int most = 24;
  thread_local Question questions[most];
  thread_local LinearPlan answers[most];
  thread_local int next = 0;
  for (int i = 0; i < most; ++i) {
    if (questions[i] == question) return answers[i];
  }
  const LinearPlan answer = plan();
  questions[next] = question;
  answers[next] = answer;
  next = (next + 1) % most;
  return answer;
}

}  // namespace

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
  p->kind = !s.gradients()               ? PlanKind::loss_only
            : kept_columns(*p) == 0      ? PlanKind::frugal
            : kept_columns(*p) < s.vocab ? PlanKind::mixed
            : p->chunks > 1              ? PlanKind::chunks
                                         : PlanKind::whole;
  p->grad_weight_sum =
      s.grad_weight && (!s.direct_grad_weight || (p->chunks > 1 && !s.grad_weight_f32));
  // In its own memory, of half as many bytes, as many rows as it holds; a row at least can leave it
  // by way of E's.
  const bool lends_sum = p->grad_weight_sum && p->kind == PlanKind::chunks && s.lends_grad_weight &&
                         rows_in_place_of_e(s, *p) > 0;
  p->lent_sum_rows = lends_sum ? std::min(s.vocab / 2, s.rows_of_weight()) : 0;
  p->grad_input_sum = s.grad_input && p->stored_columns < s.vocab && !writes_input_first(s, *p);
  p->sum_rows = 0;
  if (s.grad_input && !p->grad_input_sum && !s.direct_grad_input) {
    p->sum_rows =
        std::clamp<int64_t>(p->block_rows * p->block_columns / p->hidden_pitch / 128 * 128,
                            std::min<int64_t>(p->token_chunk, 128), p->token_chunk);
  }
}

void set_block(const LinearShape& s, int64_t bytes, LinearPlan* p) {
  constexpr int64_t most_block_rows = 8192;
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

// As of Backward on a shard of the vocabulary, with the rows' states given.
LinearShape second_pass(const LinearShape& shape, int64_t first_rows) {
  LinearShape s = shape;
  s.vocab -= first_rows;
  s.forward = s.grad_input = s.can_store = s.forms_dz = false;
  s.direct_grad_input = s.lends_grad_input = false;
  s.entropy = s.weighted_sum = s.argmax = false;
  s.class_weights &= s.smoothing;
  return s;
}

uint64_t state_bytes(const LinearShape& shape) {
  Arena arena;
  place_states(shape, &arena);
  return arena.used();
}

std::vector<Planned> passes(const Asked& asked, uint64_t bytes) {
  const auto& [engine, s, speed] = asked;
  const LinearPlan p = asked.plan(bytes);
  if (p.kind != PlanKind::two_passes) return {{engine, s, p}};
  std::vector<Planned> both;
  for (const LinearShape& pass : {first_pass(s, p.first_rows), second_pass(s, p.first_rows)}) {
    both.push_back({engine, pass, plan_linear(engine, pass, speed, bytes - state_bytes(s))});
  }
  return both;
}

LinearPlan smallest_plan(const Engine& engine, const LinearShape& shape, const DeviceSpeed& speed) {
  return remembered({&engine, 0, shape, speed, 0}, [&] { return engine.smallest(shape, speed); });
}

LinearPlan plan_linear(const Engine& engine, const LinearShape& shape, const DeviceSpeed& speed,
                       uint64_t bytes) {
  return remembered({&engine, 1, shape, speed, bytes},
                    [&] { return engine.fastest(shape, speed, bytes); });
}

LinearPlan recommended_plan(const Engine& engine, const LinearShape& shape,
                            const DeviceSpeed& speed) {
  const uint64_t logits = uint64_t(shape.tokens) * shape.vocab;  // a quarter of them in f32
  uint64_t sums = 0;
  if (shape.grad_input) sums += uint64_t(shape.tokens) * shape.hidden * 4;
  if (shape.grad_weight && !(shape.direct_grad_weight && shape.grad_weight_f32)) {
    sums += uint64_t(shape.vocab) * shape.hidden * 4;
  }
  if (shape.copies_weight) sums += uint64_t(shape.vocab) * (shape.hidden + 8) * 4;
  LinearPlan plan = plan_linear(engine, shape, speed, logits + sums + (uint64_t{16} << 20));
  // Whoever brings exactly these bytes gets this plan, or one as quick.
  for (int tries = 0; tries < 4; ++tries) {
    const LinearPlan again = plan_linear(engine, shape, speed, plan.bytes);
    if (again.seconds <= plan.seconds) break;
    plan = again;
  }
  return plan;
}

}  // namespace logitless::cuda
