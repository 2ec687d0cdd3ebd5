// SPDX-License-Identifier: Apache-2.0
// This file says what a plan does on every GPU: it makes E of the columns that are kept, in the
// workspace; of the others it makes E again, or dz where nothing is kept.
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
           .panel = {.columns = s_.vocab, .kept = s_.kept_columns > 0},
           .of_e = p_.stored_columns > 0});
  }

  void gradients() override {
    const bool of_e = p_.multiplies_e;
    if (p_.stored_columns > 0 && s_.forms_dz) visit({.kind = StepKind::form_dz, .panel = stored()});
    if (p_.stored_columns == s_.vocab) {
      visit({.kind = StepKind::finish_panel, .panel = stored(), .of_e = of_e});
      scale_input();
      grad_weight(stored(), of_e);
      grad_input_by_rows(of_e);
      return grad_bias(stored(), of_e);
    }
    scale_input();
    if (p_.stored_columns > 0) panel_gradients(stored(), of_e);
    other_gradients({p_.stored_columns, formed_columns()}, of_e);
    const int64_t first = p_.stored_columns + formed_columns();
    other_gradients({first, s_.vocab - first}, of_e);
    write_grad_input({0, tokens_.count}, of_e);
  }

  // Makes the gradients of columns that are not kept, a panel at a time, all in the same way.
  void other_gradients(const Range& others, bool of_e) {
    repeat_pieces(visitor_, others.count, p_.remade_columns, [&](const Range& columns) {
      const PanelPlace panel{.first = others.first + columns.first, .columns = columns.count};
      visit({.kind = how_made(panel), .panel = panel, .of_e = of_e});
      panel_gradients(panel, of_e);
    });
  }

  void panel_gradients(const PanelPlace& panel, bool of_e) {
    visit({.kind = StepKind::finish_panel, .panel = panel, .of_e = of_e});
    if (s_.grad_input) {
      visit({.kind = StepKind::grad_input,
             .panel = panel,
             .of_e = of_e,
             .to_sums = true,
             .adds = panel.first > 0});
    }
    grad_weight(panel, of_e);
    grad_bias(panel, of_e);
  }
};

}  // namespace

void PortableEngine::for_steps(const LinearShape& shape, const LinearPlan& plan,
                               StepVisitor* visitor) const {
  PortableSteps(shape, plan, visitor).enumerate();
}

}  // namespace logitless::cuda
