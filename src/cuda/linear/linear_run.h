// SPDX-License-Identifier: Apache-2.0
// What every engine does in one call of a linear op, chunk by chunk of tokens: the tokens, the
// rows' states and what is written last. An engine adds the products: its run.cpp.
#pragma once

#include <algorithm>

#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

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

  void run() {
    begin();
    for (int64_t first = 0; first < call_.shape.tokens; first += plan_.token_chunk) {
      begin_chunk(first, std::min(plan_.token_chunk, call_.shape.tokens - first));
      if (call_.shape.forward) forward();
      rows();
      if (call_.shape.gradients()) gradients();
      first_chunk_ = false;
    }
    finish();
  }

 protected:
  // The partial sums of the chunk's rows, and E of the columns that are kept.
  virtual void forward() = 0;
  // The chunk's gradients, from E or from logits that are made again.
  virtual void gradients() = 0;
  // Where the workspace holds E of the first columns.
  virtual Panel stored_panel() const = 0;
  // Where another memory holds E of the columns behind them: plan.lent_columns.
  virtual Panel lent_panel() const { return {}; }

  // The smoothing's term of E's products is rows of its own, and the scaled input a pass.
  bool smooths_apart() const { return m_.smoothed_row != nullptr; }
  void scale_apart() {
    if (smooths_apart() && call_.shape.grad_weight) scale_input(call_, plan_, m_, chunk_, stream_);
  }

  // What grad_weight multiplies E, or dz, with.
  const char* factor_rows(bool of_e) const { return of_e ? m_.scaled : m_.input; }

  void bias(const Panel& panel, bool of_e) {
    if (!call_.shape.grad_bias) return;
    const auto add = [&](const Panel& some) {
      add_to_bias(call_, m_, chunk_, some, of_e, first_chunk_, stream_);
    };
    if (!panel.blocks) return add(panel);
    for_bias_columns(call_.shape.dtype, panel, add);
  }

  void write_sums(bool scaled) {
    if (!call_.shape.grad_input) return;
    write_grad_input(call_, plan_, m_, chunk_, m_.grad_input_sum, 0, chunk_.rows, scaled, lends_,
                     stream_);
  }

  const LinearCall& call_;
  const LinearPlan& plan_;
  const LinearMemory& m_;
  const DeviceInfo& device_;
  Stream* stream_;
  Chunk chunk_;
  bool first_chunk_ = true, joined_ = false;  // joined_: what was last adds slices up, no more
  bool lends_;  // grad_input's memory holds the input: its other rows are cleared last

 private:
  void begin() {
    prepare_tokens(call_.in, m_.tokens, call_.outputs, stream_);
    copy_weight(call_, plan_, m_, stream_);
    column_terms(call_, m_, stream_);
    if (!call_.shape.gradients()) return;
    class_row(call_, plan_, m_, stream_);
    if (m_.weight_tail != nullptr) copy_weight_tail(call_, plan_, m_, stream_);
  }

  // Rows [first, first + rows) of the compacted tokens.
  void begin_chunk(int64_t first, int64_t rows) {
    chunk_ = {m_.tokens, first, static_cast<int32_t>(rows)};
    gather_input(call_, plan_, m_, chunk_, call_.shape.grad_input && !lends_, joined_, stream_);
  }

  // From what forward has found, or the state that was given.
  void rows() {
    const bool of_e = multiplies_e(call_.shape, plan_);
    const bool scales = of_e && call_.shape.grad_weight && !smooths_apart();
    finish_rows(call_, plan_, m_, chunk_, of_e, {stored_panel(), lent_panel()}, scales, stream_);
  }

  void finish() {
    const LinearShape& s = call_.shape;
    if (s.tokens == 0) {  // the loss of none
      write_loss(call_.in, m_.tokens, m_.losses, call_.outputs.loss, stream_);
      return clear_grad_weight(call_, stream_);
    }
    if (s.grad_weight) {
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
    if (s.grad_bias) write_grad_bias(call_, m_, stream_);
  }
};

}  // namespace logitless::cuda
