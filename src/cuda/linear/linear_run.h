// SPDX-License-Identifier: Apache-2.0
// One call of a linear op, enqueued chunk by chunk of tokens in the order of its plan.
#pragma once

#include <algorithm>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/sm90/forward.h"
#include "src/cuda/linear/sm90/product.h"

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

  void forward() {
    const Panel stored = stored_panel();
    if (call_.shape.fused) return forward_on_hopper();
    for_each_block(0, call_.shape.vocab, [&](const Block& block) {
      const bool stores = block.column < stored.columns;
      exponentials(call_, m_, chunk_, block, true, stores ? stored : Panel{}, stream_);
    });
  }

  // From what forward has found, or the state that was given.
  void rows() {
    const bool of_e = multiplies_e(call_.shape, plan_);
    const bool scales = of_e && call_.shape.grad_weight && !smooths_apart();
    finish_rows(call_, plan_, m_, chunk_, of_e, {stored_panel(), lent_panel()}, scales, device_,
                stream_);
  }

  void gradients() {
    const bool whole = plan_.stored_columns == call_.shape.vocab;
    if (!whole && call_.shape.fused) {
      gradients_on_hopper();
    } else if (plan_.stored_columns == 0) {
      frugal_gradients();
    } else if (!whole) {
      mixed_gradients();
    } else {
      const bool of_e = finish_kept(stored_panel());
      extra_rows(stored_panel());
      scale_apart();
      if (plan_.input_clusters > 0) {
        sm90::both_gradients(call_, plan_, m_, chunk_, stored_panel(), factor_rows(of_e), of_e,
                             adds_weight(), device_, stream_);
        joined_ = plan_.slots > 0 && !call_.shape.grad_bias;
      } else {
        grad_weight(stored_panel(), of_e);
        whole_grad_input(of_e);  // last: its memory may hold the input
      }
      if (of_e) bias(stored_panel(), of_e);
    }
    first_chunk_ = false;
  }

  void finish() {
    const LinearShape& s = call_.shape;
    if (s.tokens == 0) {  // the loss of none
      write_loss(call_.in, m_.tokens, m_.losses, call_.outputs.loss, stream_);
      return clear_grad_weight(call_, stream_);
    }
    if (s.grad_weight) {
      const int64_t tail = s.fused ? 0 : s.vocab % 8;
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

 private:
  const float* zero() const { return &m_.tokens.scalars->zero; }
  const float* one() const { return &m_.tokens.scalars->one; }
  // The smoothing's term of E's products is rows of its own, and the scaled input a pass.
  bool smooths_apart() const { return m_.smoothed_row != nullptr; }
  void scale_apart() {
    if (smooths_apart() && call_.shape.grad_weight) scale_input(call_, plan_, m_, chunk_, stream_);
  }

  // Depth of the logits product and columns of the others: with zeros behind D where both operands
  // have them.
  int64_t depth() const {
    return call_.shape.copies_weight ? plan_.hidden_pitch : call_.shape.hidden;
  }

  Panel stored_panel() const {
    if (call_.shape.fused) return panel_of(call_, plan_, m_, {0, plan_.stored_columns, false});
    return {m_.stored, stored_pitch(plan_.stored_columns), 0, plan_.stored_columns, false};
  }
  Panel lent_panel() const {
    return panel_of(call_, plan_, m_, {plan_.stored_columns, plan_.lent_columns, true});
  }

  // The sums of every column, and E of those that are kept.
  void forward_on_hopper() {
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
  void gradients_on_hopper() {
    const int64_t kept = kept_columns(plan_);
    scale_apart();
    if (kept > 0) kept_gradients();
    for (PanelPlace at{.columns = kept}; at.end() < call_.shape.vocab;) {
      at = panel_at(call_.shape, plan_, at.end());
      const Panel panel = panel_of(call_, plan_, m_, at);
      sm90::gradients(call_, plan_, m_, chunk_, panel, device_, stream_);
      if (call_.shape.grad_input) {
        sm90::input_sums(call_, plan_, m_, chunk_, {panel}, 0, chunk_.rows, m_.grad_input_sum,
                         false, at.first > 0, device_, stream_);
      }
      grad_weight(panel, false);
      bias(panel, false);
    }
    if (plan_.grad_input_sum) write_sums(false);
  }

  // All that needs the whole of what is kept; then grad_weight, whose rows take the place of the E
  // that lies there.
  void kept_gradients() {
    const sm90::Kept kept{stored_panel(), lent_panel()};
    bool of_e = false;
    for (const Panel& panel : {kept.panel, kept.behind}) {
      if (panel.columns == 0) continue;
      of_e = finish_kept(panel);
      if (of_e) bias(panel, of_e);
    }
    if (plan_.grad_input_sum) {
      sm90::input_sums(call_, plan_, m_, chunk_, kept, 0, chunk_.rows, m_.grad_input_sum, of_e,
                       false, device_, stream_);
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
      grad_weight(panel, of_e);
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

  // Raw logits of columns [first, end), block by block.
  template <class F>
  void for_each_block(int64_t first, int64_t end, F&& use) {
    const int64_t element = size_of(call_.shape.dtype);
    for (int64_t column = first; column < end; column += plan_.block_columns) {
      const int64_t columns = std::min(plan_.block_columns, end - column);
      const Operand weight = weight_rows(call_, plan_, m_, column);
      for (int64_t row = 0; row < chunk_.rows; row += plan_.block_rows) {
        const int64_t rows = std::min<int64_t>(plan_.block_rows, chunk_.rows - row);
        Product p;
        p.in = call_.shape.dtype;
        p.rows = rows;
        p.columns = columns;
        p.depth = depth();
        p.a = {m_.input + row * plan_.hidden_pitch * element, plan_.hidden_pitch, 1};
        p.b = {weight.data, weight.column_stride, weight.row_stride};
        p.c = m_.logits;
        p.c_stride = plan_.block_columns;
        p.most_rows = plan_.block_rows;
        p.most_columns = plan_.block_columns;
        multiply(&p, one(), false);
        use(Block{m_.logits, plan_.block_columns, static_cast<int32_t>(row),
                  static_cast<int32_t>(rows), column, columns});
      }
    }
  }

  // `add`: to what is there.
  void multiply(Product* p, const float* alpha, bool add) {
    p->alpha = alpha;
    p->beta = add ? one() : zero();
    p->tf32 = call_.in.options.allow_tf32;
    cuda::multiply(*p, device_, m_.library, stream_);
  }

  // sums [rows, hidden_pitch] (+)= panel rows . weight rows. The last columns of a vocabulary that
  // is no multiple of 8 are a product of their own, with zeros behind them: a depth of 50257 takes
  // cuBLASLt's kernels a hundred times as long.
  void input_product(const Panel& panel, int64_t row, int64_t rows, float* sums, bool add) {
    const int64_t element = size_of(call_.shape.dtype);
    if (call_.shape.fused) {
      return sm90::input_sums(call_, plan_, m_, chunk_, {panel}, row, rows, sums, false, add,
                              device_, stream_);
    }
    const int64_t tail = panel.columns % 8;
    Product p;
    p.in = call_.shape.dtype;
    p.rows = rows;
    p.columns = depth();
    p.depth = panel.columns - tail;
    p.a = {panel.data + row * panel.pitch * element, panel.pitch, 1};
    p.b = weight_rows(call_, plan_, m_, panel.first);
    p.c = sums;
    p.c_stride = plan_.hidden_pitch;
    if (p.depth > 0) {
      multiply(&p, one(), add);
      add = true;
    }
    if (tail == 0) return;
    p.a.data = panel.data + (row * panel.pitch + p.depth) * element;
    p.b = {m_.weight_tail, plan_.hidden_pitch, 1};
    p.columns = plan_.hidden_pitch;
    p.depth = 8;
    multiply(&p, one(), add);
  }

  // E, or dz, is there for every column: some rows of grad_input at a time.
  void whole_grad_input(bool of_e) {
    if (!call_.shape.grad_input) return;
    if (call_.shape.direct_grad_input) {
      sm90::grad_input(call_, plan_, m_, chunk_, {stored_panel()}, of_e, device_, stream_);
      if (lends_) clear_other_rows(m_.tokens, call_.grad_input, stream_);
      return;
    }
    for (int64_t row = 0; row < chunk_.rows; row += plan_.sum_rows) {
      const int64_t rows = std::min<int64_t>(plan_.sum_rows, chunk_.rows - row);
      input_product(stored_panel(), row, rows, m_.row_sums, false);
      write_grad_input(call_, plan_, m_, chunk_, m_.row_sums, row, rows, of_e, lends_, stream_);
    }
  }

  // What grad_weight multiplies E, or dz, with.
  const char* factor_rows(bool of_e) const { return of_e ? m_.scaled : m_.input; }
  // On Hopper: to what is there.
  bool adds_weight() const { return !first_chunk_ || (call_.accumulate && !plan_.grad_weight_sum); }

  // Rows of grad_weight: panel columns of E . input times v, or of dz . input. Of a vocabulary
  // that is no multiple of 8 the last ones go through a sum of 8 rows: see input_product.
  void grad_weight(const Panel& panel, bool of_e) {
    if (!call_.shape.grad_weight) return;
    const char* rows = factor_rows(of_e);
    if (call_.shape.fused) {
      return sm90::grad_weight(call_, plan_, m_, chunk_, panel, rows, of_e, adds_weight(), device_,
                               stream_);
    }
    const int64_t tail = panel.columns % 8, pitch = plan_.hidden_pitch;
    Product p;
    p.in = call_.shape.dtype;
    p.rows = panel.columns - tail;
    // A multiple of 8: there are zeros behind the rows of both.
    p.depth = (chunk_.rows + (m_.smoothed_row != nullptr ? 2 : 0) + 7) / 8 * 8;
    p.columns = pitch;
    p.a = {panel.data, 1, panel.pitch};
    p.b = {rows, pitch, 1};
    p.c_stride = pitch;
    if (tail > 0) {
      Product last = p;
      last.rows = 8;
      last.a.data = panel.data + p.rows * size_of(p.in);
      last.c = m_.weight_tail_sum;
      multiply(&last, one(), !first_chunk_);
    }
    if (plan_.grad_weight_sum) {
      p.c = m_.grad_weight_sum + panel.first * pitch;
      return multiply(&p, one(), !first_chunk_);
    }
    const TensorView& out = call_.grad_weight;
    p.out = out.dtype;
    p.columns = call_.shape.hidden;
    p.c = static_cast<char*>(out.data) + out.byte_offset +
          panel.first * out.stride[0] * size_of(out.dtype);
    p.c_stride = out.stride[0];
    multiply(&p, &m_.tokens.scalars->gradient_scale, call_.accumulate || !first_chunk_);
  }

  // What cuBLASLt's products read beyond the tokens and the columns; the own ones end with them.
  void extra_rows(const Panel& panel) {
    if (!call_.shape.fused) write_extra_rows(call_, m_, chunk_, panel, stream_);
  }

  void bias(const Panel& panel, bool of_e) {
    if (!call_.shape.grad_bias) return;
    const auto add = [&](const Panel& some) {
      add_to_bias(call_, m_, chunk_, some, of_e, first_chunk_, stream_);
    };
    if (!panel.blocks) return add(panel);
    for_bias_columns(call_.shape.dtype, panel, add);
  }

  // Some of E is there; the rest is made again a panel at a time. (Not on Hopper, as what follows.)
  void mixed_gradients() {
    scale_apart();
    const auto use = [&](const Panel& panel) {
      finish_panel(call_, m_, chunk_, panel, panel.first > 0, device_, stream_);
      extra_rows(panel);
      if (call_.shape.grad_input) {
        input_product(panel, 0, chunk_.rows, m_.grad_input_sum, panel.first > 0);
      }
      grad_weight(panel, true);
      bias(panel, true);
    };
    use(stored_panel());
    for_each_panel(plan_.stored_columns, [&](const Panel& panel) {
      for_each_block(panel.first, panel.first + panel.columns, [&](const Block& block) {
        exponentials(call_, m_, chunk_, block, false, panel, stream_);
      });
      use(panel);
    });
    write_sums(true);
  }

  // Nothing is there: dz itself, a panel at a time.
  void frugal_gradients() {
    for_each_panel(0, [&](const Panel& panel) {
      for_each_block(panel.first, panel.first + panel.columns, [&](const Block& block) {
        block_gradients(call_, m_, chunk_, block, panel, stream_);
      });
      extra_rows(panel);
      if (call_.shape.grad_input) {
        input_product(panel, 0, chunk_.rows, m_.grad_input_sum, panel.first > 0);
      }
      grad_weight(panel, false);
      bias(panel, false);
    });
    write_sums(false);
  }

  template <class F>
  void for_each_panel(int64_t first, F&& use) {
    for (int64_t column = first; column < call_.shape.vocab; column += plan_.remade_columns) {
      use(Panel{m_.remade, plan_.remade_columns, column,
                std::min(plan_.remade_columns, call_.shape.vocab - column), false});
    }
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
};

}  // namespace logitless::cuda
