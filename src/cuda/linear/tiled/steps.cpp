// SPDX-License-Identifier: Apache-2.0
// The steps of a plan of tiled kernels: E of the kept columns, in the workspace or `kept` and in
// grad_weight's memory, and dz of the other columns, a panel at a time.
#include "src/cuda/linear/steps.h"

#include <algorithm>

#include "src/cuda/linear/tiled/engine.h"
#include "src/cuda/linear/tiled/panels.h"

namespace logitless::cuda::tiled {
namespace {

class TiledSteps final : public CallSteps {
 public:
  using CallSteps::CallSteps;

 private:
  void logits() override {
    const int64_t kept = kept_columns(p_);
    for (const PanelPlace& panel :
         {stored(), lent(), PanelPlace{.first = kept, .columns = s_.vocab - kept}}) {
      if (panel.columns > 0) visit({.kind = StepKind::logits, .panel = panel});
    }
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
    if (sums_grad_input(s_, p_)) write_grad_input({0, tokens_.count}, others_);
  }

  // The gradients if E of every column is in the workspace.
  void whole_gradients() {
    finish_kept(stored());
    if (s_.input_first) return ordered_gradients();
    scale_input();
    if (tiled_part(p_).input_teams > 0) {
      visit({.kind = StepKind::both_gradients,
             .panel = stored(),
             .to_sums = sums_grad_weight(s_, p_),
             .adds = tokens_.first > 0});
    } else {
      grad_weight(stored());
      // grad_input comes last, because its memory may hold the compacted input.
      whole_input();
    }
    kept_bias(stored());
  }
  void whole_input() {
    if (!s_.kernels.direct_grad_input) return grad_input_by_rows();
    if (s_.grad_input) visit({.kind = StepKind::grad_input, .panel = stored()});
  }

  // grad_input first, so that the caller can use it while grad_weight is made in two halves.
  void ordered_gradients() {
    whole_input();
    scale_input();
    if (p_.first_columns > 0) {
      PanelPlace first = stored(), second = stored();
      first.columns = second.first = p_.first_columns;
      second.columns = s_.vocab - p_.first_columns;
      grad_weight(first);
      grad_weight(second);
    } else {
      grad_weight(stored());
    }
    kept_bias(stored());
  }

  // First everything that needs all kept columns; then grad_weight, whose rows overwrite the E in
  // its memory.
  void kept_gradients() {
    for (const PanelPlace& panel : {stored(), lent()}) {
      if (panel.columns == 0) continue;
      finish_kept(panel);
      kept_bias(panel);
    }
    if (s_.grad_input) {
      visit({.kind = StepKind::grad_input,
             .panel = stored(),
             .lent_behind = p_.lent_columns,
             .to_sums = sums_grad_input(s_, p_)});
    }
    if (!s_.grad_weight) return;
    const int64_t kept = kept_columns(p_);
    PanelPlace at;
    const int64_t most = visitor_->most_parts();
    for (int64_t parts = 0; at.end() < kept && parts < most; ++parts) {
      at = kept_part_at(s_, p_, at.end());
      at.origin = kept_;
      weight_part(at);
    }
    const int64_t width = std::max(p_.stored_columns, p_.remade_columns);
    repeat(visitor_, divide_up(kept - at.end(), width), [&](int64_t) {
      weight_part(
          {.first = at.end(), .columns = width, .origin = kept_, .lent = true, .copied = true});
    });
  }
  void weight_part(const PanelPlace& part) {
    if (part.copied) visit({.kind = StepKind::copy_panel, .panel = part});
    grad_weight(part);
  }

  // The gradients of columns that are not kept, from a panel of dz.
  void remade_gradients(PanelPlace panel) {
    make(&panel);
    if (s_.grad_input) {
      visit(
          {.kind = StepKind::grad_input, .panel = panel, .to_sums = true, .adds = panel.first > 0});
    }
    grad_weight(panel);
    grad_bias(panel);
  }

  // Prepares kept E for the products.
  void finish_kept(const PanelPlace& panel) {
    visit({.kind = is_e(kept_) ? StepKind::finish_panel : StepKind::form_dz,
           .panel = panel,
           .adds = tokens_.first > 0});
  }
  // If dz is computed in place of E, grad_bias is summed there already.
  void kept_bias(const PanelPlace& panel) {
    if (kept_ != Origin::dz_in_place) grad_bias(panel);
  }
};

}  // namespace

void TiledEngine::for_steps(const LinearShape& shape, const LinearPlan& plan,
                            StepVisitor* visitor) const {
  TiledSteps(shape, plan, visitor).enumerate();
}

}  // namespace logitless::cuda::tiled
