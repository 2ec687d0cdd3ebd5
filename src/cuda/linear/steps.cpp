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
  if (smooths_e(s_, p_) && s_.grad_weight) visit({.kind = StepKind::scale_input});
}

void CallSteps::make(PanelPlace* panel) {
  const bool formed = panel->first < formed_columns();
  panel->origin = formed ? Origin::dz_in_panels : others_;
  visit({.kind = formed ? StepKind::form_panel : StepKind::remake, .panel = *panel});
}

void CallSteps::grad_weight(const PanelPlace& panel) {
  if (!s_.grad_weight) return;
  visit({.kind = StepKind::grad_weight,
         .panel = panel,
         .to_sums = sums_grad_weight(s_, p_),
         .adds = tokens_.first > 0});
}

void CallSteps::grad_bias(const PanelPlace& panel) {
  if (!s_.grad_bias) return;
  visit({.kind = StepKind::grad_bias, .panel = panel, .adds = tokens_.first > 0});
}

void CallSteps::grad_input_by_rows() {
  if (!s_.grad_input) return;
  repeat_pieces(visitor_, tokens_.count, p_.sum_rows, [&](const Range& rows) {
    visit({.kind = StepKind::grad_input, .panel = stored(), .rows = rows, .to_sums = true});
    write_grad_input(rows, kept_);
  });
}

void CallSteps::write_grad_input(const Range& rows, Origin origin) {
  if (!s_.grad_input) return;
  visit({.kind = StepKind::write_grad_input, .panel = {.origin = origin}, .rows = rows});
}

void CallSteps::begin() {
  visit({.kind = StepKind::tokens});
  if (s_.targets_only) return;
  if (s_.copies_weight) visit({.kind = StepKind::copy_weight});
  if (s_.bias || s_.class_weights) visit({.kind = StepKind::column_terms});
  if (smooths_e(s_, p_)) visit({.kind = StepKind::class_row});
  if (s_.grad_input && tail_columns(s_) > 0) visit({.kind = StepKind::weight_tail});
  if (arranges(s_)) visit({.kind = StepKind::trade_rows, .panel = callers()});
}

void CallSteps::chunk(const Range& tokens) {
  tokens_ = tokens;
  visit({.kind = StepKind::gather});
  if (s_.targets_only) return visit({.kind = StepKind::targets});
  if (s_.forward) logits();
  PanelPlace kept = stored();
  if (!s_.gradients()) kept.origin = Origin::again_dz;  // a Forward has no factors for E
  visit({.kind = StepKind::states,
         .panel = kept,
         .lent_behind = p_.lent_columns,
         .scales = multiplies_e(s_, p_) && s_.grad_weight && !s_.smoothing});
  if (s_.gradients()) gradients();
}

void CallSteps::end() {
  if (s_.tokens == 0) return visit({.kind = StepKind::no_tokens});
  if (arranges(s_)) visit({.kind = StepKind::trade_back, .panel = callers()});
  if (s_.grad_weight && (sums_grad_weight(s_, p_) || tail_rows(s_) > 0)) {
    visit({.kind = StepKind::write_grad_weight});
  }
  if (s_.grad_bias) visit({.kind = StepKind::write_grad_bias});
}

}  // namespace logitless::cuda
