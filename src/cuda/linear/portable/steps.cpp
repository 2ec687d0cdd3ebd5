// SPDX-License-Identifier: Apache-2.0
// The steps of a plan on every GPU: E of the kept columns; E of the others is computed again, or dz
// if products multiply no kept E.
#include "src/cuda/linear/steps.h"

#include "src/cuda/linear/portable/engine.h"

namespace logitless::cuda {
namespace {

class PortableSteps final : public CallSteps {
 public:
  using CallSteps::CallSteps;

 private:
  void logits() override {
    visit({.kind = StepKind::logits,
           .panel = {.columns = s_.vocab, .origin = kept_, .kept = s_.kept_columns > 0}});
  }

  void gradients() override {
    if (forms_dz(kept_)) visit({.kind = StepKind::form_dz, .panel = stored()});
    if (p_.stored_columns == s_.vocab) {
      visit({.kind = StepKind::finish_panel, .panel = stored()});
      if (s_.input_first) grad_input_by_rows();
      scale_input();
      grad_weight(stored());
      if (!s_.input_first) grad_input_by_rows();
      return grad_bias(stored());
    }
    scale_input();
    if (p_.stored_columns > 0) panel_gradients(stored());
    other_gradients({p_.stored_columns, formed_columns()});
    const int64_t first = p_.stored_columns + formed_columns();
    other_gradients({first, s_.vocab - first});
    write_grad_input({0, tokens_.count}, others_);
  }

  // The gradients of columns that are not kept, a panel at a time.
  void other_gradients(const Range& others) {
    repeat_pieces(visitor_, others.count, p_.remade_columns, [&](const Range& columns) {
      PanelPlace panel{.first = others.first + columns.first, .columns = columns.count};
      make(&panel);
      panel_gradients(panel);
    });
  }

  void panel_gradients(const PanelPlace& panel) {
    visit({.kind = StepKind::finish_panel, .panel = panel});
    if (s_.grad_input) {
      visit(
          {.kind = StepKind::grad_input, .panel = panel, .to_sums = true, .adds = panel.first > 0});
    }
    grad_weight(panel);
    grad_bias(panel);
  }
};

}  // namespace

void PortableEngine::for_steps(const LinearShape& shape, const LinearPlan& plan,
                               StepVisitor* visitor) const {
  PortableSteps(shape, plan, visitor).enumerate();
}

}  // namespace logitless::cuda
