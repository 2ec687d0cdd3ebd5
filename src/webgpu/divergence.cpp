// SPDX-License-Identifier: Apache-2.0
// A chunk of tokens of a divergence: the raw logits of both heads, each in its own block that holds
// all windows, both heads' row states, the sums over their columns, and the gradient in place of
// the student's logits. docs/semantics.md has the formulas.
#include "src/row/divergence.h"
#include "src/webgpu/run.h"

namespace logitless::webgpu {
namespace {

const TensorView absent{};

}  // namespace

Head Run::student() const {
  return {
      .input = call_.input,
      .weight = call_.weight,
      .bias = call_.bias,
      .logits = call_.logits,
      .temperature = call_.combines ? absent : call_.temperature,  // included in the shards' states
      .options = options_,
      .factors = factors_of(options_),
      .is_head = problem_.linear,
      .hidden = problem_.hidden,
      .weight_bound = problem_.weight_bound,
      .bias_bound = problem_.bias_bound,
      .rows = Role::rows,
      .extras = problem_.extras() ? Role::extras : Role::more_sums,
      .bias_copy = Role::bias,
      .hidden_rows = Role::hidden,
      .block = Role::block};
}

Head Run::teacher() const {
  const LossOptions options = call_.teacher_options();
  const TeacherProblem& t = problem_.teacher;
  return {.input = call_.teacher_input,
          .weight = call_.teacher_weight,
          .bias = call_.teacher_bias,
          .logits = call_.teacher_logits,
          .temperature = call_.teacher_temperature,
          .options = options,
          .factors = factors_of(options),
          .is_head = t.is_head,
          .hidden = t.hidden,
          .weight_bound = t.weight_bound,
          .bias_bound = t.bias_bound,
          .rows = Role::teacher_rows,
          .extras = t.temperatures ? Role::teacher_extras : Role::more_sums,
          .bias_copy = Role::teacher_bias,
          .hidden_rows = Role::teacher_hidden,
          .block = Role::teacher_block};
}

RowParams Run::pair_params(const Chunk& chunk, const Window& window) const {
  RowParams p = row_params(chunk, window);
  const MapFactors& teacher = teacher_.factors;
  p.teacher_slope = teacher.slope;
  p.teacher_cap_in = teacher.cap_in;
  p.teacher_cap_in_low = teacher.cap_in_low;
  p.teacher_cap_out = teacher.cap_out;
  p.teacher_cap_out_low = teacher.cap_out_low;
  p.beta = call_.divergence.beta;
  p.rest = 1 - call_.divergence.beta;
  p.label_weight = call_.divergence.label_weight;
  if (call_.kept) p.flags |= kWantsGradient;
  if (capped(teacher_.options)) p.flags |= kHasTeacherSoftcap;
  if (teacher_.temperature) p.flags |= kHasTeacherTemperature;
  return p;
}

Constant Run::divergence_kind() const {
  return {"divergence", static_cast<double>(effective_kind(call_.divergence))};
}

// Computes a head's raw logits, and the states of its rows.
void Run::make_states(const Chunk& chunk, const Head& head) {
  for (int64_t w = 0; w < plan_.windows; ++w) {
    make_logits(chunk, window_of(w), head);
    make_partials(chunk, window_of(w), head);
  }
  combine(chunk, head);
}

// Computes the sums of each slot of 1024 columns.
void Run::sum_slots(const Chunk& chunk, const Window& window) {
  const RowParams p = pair_params(chunk, window);
  recorder_.dispatch(
      "divergence", "sums", {is_capped(), is_scaled(), own_temperature(), divergence_kind()}, p,
      {role(Role::counted), block(window), block(window, Role::teacher_block), role(Role::rows),
       role(Role::teacher_rows), extras(), extras(teacher_), role(Role::partials)},
      blocks(window.columns, kSlotColumns), p.rows);
}

// Computes each row's loss from its sums, and the factor of its gradient.
void Run::finish_rows(const Chunk& chunk, bool summed) {
  const Constant keeps{"keeps", call_.forward && call_.kept ? 1.0 : 0.0},
      is_kept{"is_kept", reads_kept() ? 1.0 : 0.0};
  recorder_.dispatch("divergence_rows", "finish",
                     {{"scaled", 1},
                      own_temperature(),
                      divergence_kind(),
                      {"summed", summed ? 1.0 : 0.0},
                      keeps,
                      is_kept},
                     pair_params(chunk, {}),
                     {role(Role::counted), role(Role::partials), role(Role::rows),
                      reads_kept() ? zeros() : role(Role::teacher_rows), role(Role::inputs),
                      role(Role::scalars), extras()},
                     blocks(chunk.tokens, 64));
}

// Turns the student's logits of a window, or what Forward kept instead, into their gradient.
void Run::make_difference(const Chunk& chunk, const Window& window) {
  const RowParams p = pair_params(chunk, window);
  const uint32_t groups = blocks(window.columns, kSlotColumns);
  const Binding counted = role(Role::counted), rows = role(Role::rows);
  if (reads_kept()) {
    take_logits(chunk, window);
    recorder_.dispatch("divergence", "scale_kept", {}, p,
                       {counted, {}, {}, rows, {}, {}, {}, {}, block(window)}, groups, p.rows);
    return;
  }
  recorder_.dispatch("divergence", "gradient",
                     {is_capped(), is_scaled(), own_temperature(), divergence_kind()}, p,
                     {counted,
                      {},
                      block(window, Role::teacher_block),
                      rows,
                      role(Role::teacher_rows),
                      extras(),
                      extras(teacher_),
                      {},
                      block(window)},
                     groups, p.rows);
}

void Run::run_divergence(const Chunk& chunk) {
  begin_chunk(chunk);
  const bool has_mean = effective_kind(call_.divergence) != DivergenceKind::forward_kl;
  const bool keeps = call_.forward && call_.kept;
  if (!call_.forward) keep_or_check_rows(chunk);
  bool summed = false;
  if (!reads_kept()) {
    // The teacher's rows are of the same tokens.
    recorder_.copy(workspace_[Role::rows], 0, workspace_[Role::teacher_rows], 0,
                   static_cast<uint64_t>(chunk.tokens) * 4 * kStateWords);
    begin_head(chunk, teacher_);
    make_states(chunk, teacher_);
    make_states(chunk, student_);
    summed = call_.forward || has_mean;
    for (int64_t w = 0; w < plan_.windows && summed; ++w) sum_slots(chunk, window_of(w));
  }
  finish_rows(chunk, summed);
  if (keeps) keep_or_check_rows(chunk);
  for (int64_t w = 0; w < plan_.windows && (problem_.gradients || keeps); ++w) {
    make_difference(chunk, window_of(w));
    if (keeps) keep_logits(chunk, window_of(w));
    if (problem_.gradients) add_products(chunk, window_of(w));
  }
  emit_outputs(chunk);
  emit_grad_input(chunk);
}

}  // namespace logitless::webgpu
