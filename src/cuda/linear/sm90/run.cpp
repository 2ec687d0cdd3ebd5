// SPDX-License-Identifier: Apache-2.0
// The linear ops on Hopper: kernels of its own for the logits' product and the gradients'.
#include "src/cuda/linear/linear_run.h"
#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/sm90/forward.h"
#include "src/cuda/linear/sm90/panels.h"
#include "src/cuda/linear/sm90/product.h"
#include "src/cuda/linear/sm90/teams.h"

namespace logitless::cuda::sm90 {
namespace {

class HopperRun final : public LinearRun {
 public:
  using LinearRun::LinearRun;

 private:
  Panel stored_panel() const override {
    return panel_of(call_, plan_, m_, {0, plan_.stored_columns, false});
  }
  Panel lent_panel() const override {
    return panel_of(call_, plan_, m_, {plan_.stored_columns, plan_.lent_columns, true});
  }

  // The sums of every column, and E of those that are kept.
  void forward() override {
    const int64_t kept = kept_columns(plan_);
    const auto pass = [&](int64_t first, int64_t columns, const Panel& panel) {
      if (columns == 0) return;
      sm90::forward(call_, plan_, m_, chunk_, first, columns, panel, device_, stream_);
    };
    pass(0, plan_.stored_columns, stored_panel());
    pass(plan_.stored_columns, plan_.lent_columns, lent_panel());
    pass(kept, call_.shape.vocab - kept, {});
  }

  // What is kept of E, then dz of the other columns, a panel at a time.
  void gradients_by_panels() {
    const int64_t kept = kept_columns(plan_);
    scale_apart();
    if (kept > 0) kept_gradients();
    for (PanelPlace at{.columns = kept}; at.end() < call_.shape.vocab;) {
      at = panel_at(call_.shape, plan_, at.end());
      const Panel panel = panel_of(call_, plan_, m_, at);
      sm90::gradients(call_, plan_, m_, chunk_, panel, device_, stream_);
      if (call_.shape.grad_input) {
        input_sums(call_, plan_, m_, chunk_, {panel}, 0, chunk_.rows, m_.grad_input_sum, false,
                   at.first > 0, device_, stream_);
      }
      weight_rows_of(panel, false);
      bias(panel, false);
    }
    if (plan_.grad_input_sum) write_sums(false);
  }

  // All that needs the whole of what is kept; then grad_weight, whose rows take the place of the E
  // that lies there.
  void kept_gradients() {
    const Kept kept{stored_panel(), lent_panel()};
    bool of_e = false;
    for (const Panel& panel : {kept.panel, kept.behind}) {
      if (panel.columns == 0) continue;
      of_e = finish_kept(panel);
      if (of_e) bias(panel, of_e);
    }
    if (plan_.grad_input_sum) {
      input_sums(call_, plan_, m_, chunk_, kept, 0, chunk_.rows, m_.grad_input_sum, of_e, false,
                 device_, stream_);
    } else if (call_.shape.grad_input) {
      sm90::grad_input(call_, plan_, m_, chunk_, kept, of_e, device_, stream_);
    }
    for (PanelPlace at; call_.shape.grad_weight && at.end() < kept_columns(plan_);) {
      at = kept_part_at(call_.shape, plan_, at.end());
      Panel panel = panel_of(call_, plan_, m_, at);
      if (at.copied) {
        copy_panel(chunk_, panel, m_.remade, device_, stream_);
        panel.data = m_.remade;
      }
      weight_rows_of(panel, of_e);
    }
  }

  void gradients() override {
    if (plan_.stored_columns < call_.shape.vocab) {
      gradients_by_panels();
    } else {
      whole_gradients();
    }
  }

  // E of every column lies in the workspace.
  void whole_gradients() {
    const Panel stored = stored_panel();
    const bool of_e = finish_kept(stored);
    scale_apart();
    if (plan_.input_clusters > 0) {
      both_gradients(call_, plan_, m_, chunk_, stored, factor_rows(of_e), of_e, adds_weight(),
                     device_, stream_);
      joined_ = plan_.slots > 0 && !call_.shape.grad_bias;
    } else {
      weight_rows_of(stored, of_e);
      whole_grad_input(stored, of_e);  // last: its memory may hold the input
    }
    if (of_e) bias(stored, of_e);
  }

  // Some rows of grad_input at a time, where no product can write it.
  void whole_grad_input(const Panel& stored, bool of_e) {
    if (!call_.shape.grad_input) return;
    if (call_.shape.direct_grad_input) {
      sm90::grad_input(call_, plan_, m_, chunk_, {stored}, of_e, device_, stream_);
      if (lends_) clear_other_rows(m_.tokens, call_.grad_input, stream_);
      return;
    }
    for (int64_t row = 0; row < chunk_.rows; row += plan_.sum_rows) {
      const int64_t rows = std::min<int64_t>(plan_.sum_rows, chunk_.rows - row);
      input_sums(call_, plan_, m_, chunk_, {stored}, row, rows, m_.row_sums, false, false, device_,
                 stream_);
      write_grad_input(call_, plan_, m_, chunk_, m_.row_sums, row, rows, of_e, lends_, stream_);
    }
  }

  // What is kept of E, made ready for the products: whether they are of E, or of dz, whose sums are
  // then grad_bias's.
  bool finish_kept(const Panel& panel) {
    const bool of_e = !call_.shape.forms_dz;
    if (of_e) {
      finish_panel(call_, m_, chunk_, panel, false, device_, stream_);
    } else {
      form_dz(call_, m_, chunk_, panel, first_chunk_, stream_);
    }
    return of_e;
  }

  // To what is there.
  bool adds_weight() const { return !first_chunk_ || (call_.accumulate && !plan_.grad_weight_sum); }

  // The panel's rows of grad_weight.
  void weight_rows_of(const Panel& panel, bool of_e) {
    if (!call_.shape.grad_weight) return;
    sm90::grad_weight(call_, plan_, m_, chunk_, panel, factor_rows(of_e), of_e, adds_weight(),
                      device_, stream_);
  }
};

// With what lies in the outputs' memory, the input and the scaled one, and what the device decides.
LinearMemory complete(const LinearCall& call, const LinearPlan& plan, LinearMemory m,
                      const DeviceInfo& device) {
  const LinearShape& s = call.shape;
  m.units = {static_cast<int32_t>(divide_up(s.vocab, sum_columns)),
             teams_of(plan, device.multiprocessors / 2)};
  if (lends_input(s, plan)) m.input = call.grad_input.as<char>();
  if (m.scaled != nullptr) return m;
  m.scaled =
      scales_apart(s, plan) ? call.grad_weight.as<char>() + lent_scaled_input(s, plan) : m.input;
  return m;
}

}  // namespace

void HopperEngine::run(const LinearCall& call, const LinearPlan& plan, const LinearMemory& memory,
                       const DeviceInfo& device, Stream* stream) const {
  const LinearMemory completed = complete(call, plan, memory, device);
  HopperRun(call, plan, completed, device, stream).run();
}

}  // namespace logitless::cuda::sm90
