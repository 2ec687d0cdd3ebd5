// SPDX-License-Identifier: Apache-2.0
// This file says what a plan does on Hopper: it makes E of the columns that are kept, in the
// workspace and in grad_weight's memory, and dz of the others, a panel at a time.
#include "src/cuda/linear/steps.h"

#include <algorithm>

#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/sm90/panels.h"

namespace logitless::cuda::sm90 {
namespace {

class HopperSteps final : public CallSteps {
 public:
  using CallSteps::CallSteps;

 private:
  void logits() override {
    const int64_t kept = kept_columns(p_);
    const auto pass = [&](const PanelPlace& panel, bool keeps) {
      if (panel.columns == 0) return;
      visit({.kind = StepKind::logits, .panel = panel, .of_e = keeps});
    };
    pass(stored(), true);
    pass(lent(), true);
    pass({.first = kept, .columns = s_.vocab - kept}, false);
  }

  void gradients() override {
    if (p_.stored_columns == s_.vocab) return whole_gradients();
    const int64_t kept = kept_columns(p_);
    scale_input();
    if (kept > 0) kept_gradients();
    for (PanelPlace next{.columns = kept}; next.end() < s_.vocab;) {
      PanelPlace panel = panel_at(s_, p_, next.end());
      const int64_t left = formed_columns() - panel.first;
      if (left > 0) panel.columns = std::min(panel.columns, left);
      int64_t count = panels_like(s_, p_, panel);
      if (left > 0) count = std::min(count, left / panel.columns);
      repeat(visitor_, count, [&](int64_t i) {
        PanelPlace at = panel;
        at.first += i * panel.columns;
        remade_gradients(at);
      });
      next = {.first = panel.first, .columns = count * panel.columns};
    }
    if (p_.grad_input_sum) write_grad_input({0, tokens_.count}, false);
  }

  // Makes the gradients where E of every column lies in the workspace.
  void whole_gradients() {
    const bool of_e = finish_kept(stored());
    scale_input();
    if (p_.input_clusters > 0) {
      visit({.kind = StepKind::both_gradients,
             .panel = stored(),
             .of_e = of_e,
             .to_sums = p_.grad_weight_sum,
             .adds = tokens_.first > 0});
    } else {
      grad_weight(stored(), of_e);
      // grad_input comes last, because its memory may hold the input.
      if (!s_.direct_grad_input) {
        grad_input_by_rows(of_e);
      } else if (s_.grad_input) {
        visit({.kind = StepKind::grad_input, .panel = stored(), .of_e = of_e});
      }
    }
    if (of_e || s_.forms_by_rows()) grad_bias(stored(), of_e);
  }

  // Does first all that needs the whole of what is kept; then makes grad_weight, whose rows take
  // the place of the E that lies there.
  void kept_gradients() {
    bool of_e = false;
    for (const PanelPlace& panel : {stored(), lent()}) {
      if (panel.columns == 0) continue;
      of_e = finish_kept(panel);
      if (of_e || s_.forms_by_rows()) grad_bias(panel, of_e);
    }
    if (s_.grad_input) {
      visit({.kind = StepKind::grad_input,
             .panel = stored(),
             .lent_behind = p_.lent_columns,
             .of_e = of_e,
             .to_sums = p_.grad_input_sum});
    }
    if (!s_.grad_weight) return;
    const int64_t kept = kept_columns(p_);
    PanelPlace at;
    const int64_t most = visitor_->most_parts();
    for (int64_t parts = 0; at.end() < kept && parts < most; ++parts) {
      at = kept_part_at(s_, p_, at.end());
      weight_part(at, of_e);
    }
    const int64_t width = std::max(p_.stored_columns, p_.remade_columns);
    repeat(visitor_, divide_up(kept - at.end(), width), [&](int64_t) {
      weight_part({.first = at.end(), .columns = width, .lent = true, .copied = true}, of_e);
    });
  }
  void weight_part(const PanelPlace& part, bool of_e) {
    if (part.copied) visit({.kind = StepKind::copy_panel, .panel = part});
    grad_weight(part, of_e);
  }

  // Makes the gradients of columns that are not kept, from a panel of dz.
  void remade_gradients(const PanelPlace& panel) {
    visit({.kind = how_made(panel), .panel = panel});
    if (s_.grad_input) {
      visit(
          {.kind = StepKind::grad_input, .panel = panel, .to_sums = true, .adds = panel.first > 0});
    }
    grad_weight(panel, false);
    grad_bias(panel, false);
  }

  // Makes what is kept of E ready for the products. Returns whether they are of E; else they are of
  // dz, whose sums make grad_bias too, except where rows form it.
  bool finish_kept(const PanelPlace& panel) {
    const bool of_e = !s_.forms_dz;
    visit({.kind = of_e ? StepKind::finish_panel : StepKind::form_dz,
           .panel = panel,
           .of_e = of_e,
           .adds = tokens_.first > 0});
    return of_e;
  }
};

}  // namespace

void HopperEngine::for_steps(const LinearShape& shape, const LinearPlan& plan,
                             StepVisitor* visitor) const {
  HopperSteps(shape, plan, visitor).enumerate();
}

}  // namespace logitless::cuda::sm90
