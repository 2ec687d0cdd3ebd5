// SPDX-License-Identifier: Apache-2.0
// Runs a plan: launches the kernels of each step.
#pragma once

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

// Runs the steps that all engines share; an engine adds its products.
class LinearRun : public StepVisitor {
 public:
  LinearRun(const LinearCall& call, const LinearPlan& plan, const LinearMemory& memory,
            const DeviceInfo& device, Stream* stream)
      : work_{call, plan, memory, device, stream, {memory.tokens}} {}

  void visit(const Step& step) final {
    work_.chunk.first = step.tokens.first;
    work_.chunk.rows = static_cast<int32_t>(step.tokens.count);
    switch (step.kind) {
      case StepKind::tokens:
        return prepare();
      case StepKind::trade_rows:
        return trade_rows(work_, panel_of(step.panel), true, whole_rows());
      case StepKind::trade_back:
        if (!work_.call.kept.consumes) {
          trade_rows(work_, panel_of(step.panel), false, whole_rows());
        }
        return;
      case StepKind::copy_weight:
        return copy_weight(work_);
      case StepKind::class_row:
        return class_row(work_);
      case StepKind::weight_tail:
        return copy_weight_tail(work_);
      case StepKind::gather:
        return gather_input(work_, work_.call.shape.grad_input && !lends_input(), joined_);
      case StepKind::targets:
        return write_targets(work_);
      case StepKind::states:
        return finish_rows(work_, step.of_e(), {panel_of(step.panel), panel_of(step.behind())},
                           step.scales);
      case StepKind::scale_input:
        return scale_input(work_);
      case StepKind::form_panel:
        form_panel(work_, kept_panel(step.panel), panel_of(step.panel), whole_rows());
        return add_to_dz(step);
      case StepKind::grad_bias:
        return grad_bias(panel_of(step.panel), step.of_e(), step.adds);
      case StepKind::write_grad_input:
        return write_grad_input(work_, input_sums(), step.rows.first, step.rows.count, step.of_e(),
                                lends_input());
      case StepKind::no_tokens:
        write_loss(work_.call.in, work_.m.tokens, work_.m.losses, work_.call.outputs.loss,
                   work_.stream);
        return clear_grad_weight(work_);
      case StepKind::write_grad_weight:
        return write_weight_sums();
      case StepKind::write_grad_bias:
        return write_grad_bias(work_);
      case StepKind::form_dz:
      case StepKind::remake:
        run(step);
        return add_to_dz(step);
      default:
        return run(step);
    }
  }

 protected:
  // Runs a step that only the engine has.
  virtual void run(const Step& step) = 0;
  // Where these columns of E or dz are.
  virtual Panel panel_of(const PanelPlace& at) const = 0;
  // Products read a panel's rows up to a multiple of this; if 0, all rows of the chunk.
  virtual int whole_rows() const { return 0; }

  // Where kept E of these columns is.
  Panel kept_panel(PanelPlace at) const {
    at.lent = false, at.kept = true;
    return panel_of(at);
  }
  // The rows by which E, or dz, is multiplied for grad_weight.
  const char* factor_rows(bool of_e) const { return of_e ? work_.m.scaled : work_.m.input; }
  bool lends_input() const { return cuda::lends_input(work_.call.shape, work_.plan); }
  bool sums_grad_weight() const { return cuda::sums_grad_weight(work_.call.shape, work_.plan); }
  // grad_input's sums: of some rows at a time if E is whole, else of the chunk.
  float* input_sums() const {
    return work_.plan.sum_rows > 0 ? work_.m.row_sums : work_.m.grad_input_sum;
  }

  LinearWork work_;
  bool joined_ = false;  // the last launch only added up slices, so the gather may overlap it

 private:
  void prepare() {
    const LinearCall& call = work_.call;
    const LinearMemory& m = work_.m;
    TokenInput in = call.in;
    if (call.shape.chooses) find_lists(m.lists, call.shape.tokens, call.in.fault, work_.stream);
    if (call.shape.chosen > 0 && call.shape.tokens > 0) {
      chosen_sizes(call, m, work_.stream);
      in.chosen_sizes = m.chosen_sizes;
    }
    prepare_tokens(in, arranges(call.shape) ? m.compacted : m.tokens, call.outputs, work_.stream);
    if (arranges(call.shape)) arrange_tokens(m.compacted, m.tokens, work_.stream);
    if (call.logits_at) chosen_logits(call, m, work_.stream);
    if (static_cast<bool>(call.top)) clear_lists(call.top, work_.stream);
    if (call.shape.chosen > 0) merge_chosen(call, m, work_.stream);
  }

  void add_to_dz(const Step& step) {
    if (work_.call.shape.chosen > 0) add_chosen(work_, panel_of(step.panel));
  }

  void grad_bias(const Panel& panel, bool of_e, bool adds) {
    const auto add = [&](const Panel& some) { add_to_bias(work_, some, of_e, !adds); };
    if (!panel.blocks) return add(panel);
    for_bias_columns(work_.call.shape.dtype, panel, add);
  }

  void write_weight_sums() {
    const LinearShape& s = work_.call.shape;
    const int64_t tail = tail_rows(s);
    if (sums_grad_weight()) {
      const int64_t lent = work_.plan.lent_sum_rows;
      write_lent_sums(work_);
      write_grad_weight(work_, work_.m.grad_weight_sum, lent, s.rows_of_weight() - tail - lent);
    }
    if (tail > 0) {
      write_grad_weight(work_, work_.m.weight_tail_sum, s.vocab - tail, tail);
    }
  }
};

}  // namespace logitless::cuda
