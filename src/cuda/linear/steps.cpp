// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

const char* name_of(StepKind kind) {
  constexpr const char* names[] = {
      "tokens",           "copy weight", "column terms", "class row",
      "weight tail",      "trade rows",  "gather",       "targets",
      "logits",           "states",      "finish panel", "form dz",
      "scale input",      "remake",      "form panel",   "copy panel",
      "grad_input",       "grad_weight", "both",         "grad_bias",
      "write grad_input", "trade back",  "no tokens",    "write grad_weight",
      "write grad_bias"};
  return names[static_cast<int>(kind)];
}

void CallSteps::enumerate() {
  begin();
  repeat(visitor_, p_.chunks - 1, [&](int64_t i) { chunk({i * p_.token_chunk, p_.token_chunk}); });
  const int64_t first = (p_.chunks - 1) * p_.token_chunk;
  if (s_.tokens > 0) chunk({first, s_.tokens - first});
  tokens_ = {};
  end();
}

void CallSteps::visit(Step&& step) {
  step.tokens = tokens_;
  if (step.rows.count == 0) step.rows = {0, tokens_.count};
  visitor_->visit(step);
}

void CallSteps::scale_input() {
  if (p_.smooths_e && s_.grad_weight) visit({.kind = StepKind::scale_input});
}

void CallSteps::grad_weight(const PanelPlace& panel, bool of_e) {
  if (!s_.grad_weight) return;
  visit({.kind = StepKind::grad_weight,
         .panel = panel,
         .of_e = of_e,
         .to_sums = p_.grad_weight_sum,
         .adds = tokens_.first > 0});
}

void CallSteps::grad_bias(const PanelPlace& panel, bool of_e) {
  if (!s_.grad_bias) return;
  visit({.kind = StepKind::grad_bias, .panel = panel, .of_e = of_e, .adds = tokens_.first > 0});
}

void CallSteps::grad_input_by_rows(bool of_e) {
  if (!s_.grad_input) return;
  repeat_pieces(visitor_, tokens_.count, p_.sum_rows, [&](const Range& rows) {
    visit({.kind = StepKind::grad_input,
           .panel = stored(),
           .rows = rows,
           .of_e = of_e,
           .to_sums = true});
    write_grad_input(rows, of_e);
  });
}

void CallSteps::write_grad_input(const Range& rows, bool of_e) {
  if (!s_.grad_input) return;
  visit({.kind = StepKind::write_grad_input, .rows = rows, .of_e = of_e});
}

void CallSteps::begin() {
  visit({.kind = StepKind::tokens});
  if (s_.targets_only) return;
  if (s_.copies_weight) visit({.kind = StepKind::copy_weight});
  if (s_.bias || s_.class_weights) visit({.kind = StepKind::column_terms});
  if (p_.smooths_e) visit({.kind = StepKind::class_row});
  if (s_.grad_input && p_.tail_columns > 0) visit({.kind = StepKind::weight_tail});
  if (s_.arranges()) visit({.kind = StepKind::trade_rows, .panel = kept()});
}

void CallSteps::chunk(const Range& tokens) {
  tokens_ = tokens;
  visit({.kind = StepKind::gather});
  if (s_.targets_only) return visit({.kind = StepKind::targets});
  if (s_.forward) logits();
  const bool of_e = p_.multiplies_e;
  visit({.kind = StepKind::states,
         .panel = stored(),
         .lent_behind = p_.lent_columns,
         .of_e = of_e,
         .scales = of_e && s_.grad_weight && !s_.smoothing});
  if (s_.gradients()) gradients();
}

void CallSteps::end() {
  if (s_.tokens == 0) return visit({.kind = StepKind::no_tokens});
  if (s_.arranges()) visit({.kind = StepKind::trade_back, .panel = kept()});
  if (s_.grad_weight && (p_.grad_weight_sum || tail_rows(s_, p_) > 0)) {
    visit({.kind = StepKind::write_grad_weight});
  }
  if (s_.grad_bias) visit({.kind = StepKind::write_grad_bias});
}

}  // namespace logitless::cuda
