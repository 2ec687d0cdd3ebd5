// SPDX-License-Identifier: Apache-2.0
// What runs a plan: it launches what each step asks for.
#pragma once

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

// Runs the steps that every engine runs alike; an engine adds its products.
class LinearRun {
 public:
  LinearRun(const LinearCall& call, const LinearPlan& plan, const LinearMemory& memory,
            const DeviceInfo& device, Stream* stream)
      : call_(call),
        plan_(plan),
        m_(memory),
        device_(device),
        stream_(stream),
        lends_(lends_input(call.shape, plan)) {}

  virtual ~LinearRun() = default;

  void visit(const Step& step) {
    chunk_ = {m_.tokens, step.tokens.first, static_cast<int32_t>(step.tokens.count)};
    switch (step.kind) {
      case StepKind::tokens:
        return prepare_tokens(call_.in, m_.tokens, call_.outputs, stream_);
      case StepKind::copy_weight:
        return copy_weight(call_, plan_, m_, stream_);
      case StepKind::column_terms:
        return column_terms(call_, m_, stream_);
      case StepKind::class_row:
        return class_row(call_, plan_, m_, stream_);
      case StepKind::weight_tail:
        return copy_weight_tail(call_, plan_, m_, stream_);
      case StepKind::gather:
        return gather_input(call_, plan_, m_, chunk_, call_.shape.grad_input && !lends_, joined_,
                            stream_);
      case StepKind::states:
        return finish_rows(call_, plan_, m_, chunk_, step.of_e,
                           {panel_of(step.panel), panel_of(step.behind())}, step.scales, stream_);
      case StepKind::scale_input:
        return scale_input(call_, plan_, m_, chunk_, stream_);
      case StepKind::grad_bias:
        return grad_bias(panel_of(step.panel), step.of_e, step.adds);
      case StepKind::write_grad_input:
        return write_grad_input(call_, plan_, m_, chunk_, input_sums(), step.rows.first,
                                step.rows.count, step.of_e, lends_, stream_);
      case StepKind::no_tokens:
        write_loss(call_.in, m_.tokens, m_.losses, call_.outputs.loss, stream_);
        return clear_grad_weight(call_, stream_);
      case StepKind::write_grad_weight:
        return write_weight_sums();
      case StepKind::write_grad_bias:
        return write_grad_bias(call_, m_, stream_);
      default:
        return run(step);
    }
  }
  int64_t begin_repeat(int64_t count) { return count; }
  void end_repeat(int64_t) {}
  int64_t most_parts() const { return INT64_MAX; }

 protected:
  // The steps that are the engine's own.
  virtual void run(const Step& step) = 0;
  // Where these columns of E or dz lie.
  virtual Panel panel_of(const PanelPlace& at) const = 0;

  // What grad_weight multiplies E, or dz, with.
  const char* factor_rows(bool of_e) const { return of_e ? m_.scaled : m_.input; }
  // Of grad_input: some rows at a time, where E is whole; else of the chunk.
  float* input_sums() const { return plan_.sum_rows > 0 ? m_.row_sums : m_.grad_input_sum; }

  const LinearCall& call_;
  const LinearPlan& plan_;
  const LinearMemory& m_;
  const DeviceInfo& device_;
  Stream* stream_;
  Chunk chunk_;
  bool joined_ = false;  // what was last adds slices up, no more
  bool lends_;           // grad_input's memory holds the input: its other rows are cleared last

 private:
  void grad_bias(const Panel& panel, bool of_e, bool adds) {
    const auto add = [&](const Panel& some) {
      add_to_bias(call_, m_, chunk_, some, of_e, !adds, stream_);
    };
    if (!panel.blocks) return add(panel);
    for_bias_columns(call_.shape.dtype, panel, add);
  }

  void write_weight_sums() {
    const LinearShape& s = call_.shape;
    const int64_t tail = m_.weight_tail_sum != nullptr ? s.vocab % 8 : 0;
    if (plan_.grad_weight_sum) {
      const int64_t lent = plan_.lent_sum_rows;
      write_lent_sums(call_, plan_, m_, stream_);
      write_grad_weight(call_, plan_, m_, m_.grad_weight_sum, lent,
                        s.rows_of_weight() - tail - lent, stream_);
    }
    if (tail > 0) {
      write_grad_weight(call_, plan_, m_, m_.weight_tail_sum, s.vocab - tail, tail, stream_);
    }
  }
};

}  // namespace logitless::cuda
