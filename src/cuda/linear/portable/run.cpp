// SPDX-License-Identifier: Apache-2.0
// The linear ops on every GPU: cuBLASLt's products, and between them a pass over a block of logits
// in f32 at a time.
#include "src/cuda/linear/portable/engine.h"

#include <algorithm>

#include "src/cuda/linear/linear_run.h"

namespace logitless::cuda {
namespace {

class PortableRun final : public LinearRun {
 public:
  using LinearRun::LinearRun;

 private:
  const float* zero() const { return &m_.tokens.scalars->zero; }
  const float* one() const { return &m_.tokens.scalars->one; }

  // Depth of the logits product and columns of the others: with zeros behind D where both operands
  // have them.
  int64_t depth() const {
    return call_.shape.copies_weight ? plan_.hidden_pitch : call_.shape.hidden;
  }

  Panel stored_panel() const override {
    return {m_.stored, stored_pitch(plan_.stored_columns), 0, plan_.stored_columns, false};
  }

  void forward() override {
    const Panel stored = stored_panel();
    for_each_block(0, call_.shape.vocab, [&](const Block& block) {
      const bool stores = block.column < stored.columns;
      exponentials(call_, m_, chunk_, block, true, stores ? stored : Panel{}, stream_);
    });
  }

  void gradients() override {
    if (plan_.stored_columns == 0) {
      frugal_gradients();
    } else if (plan_.stored_columns < call_.shape.vocab) {
      mixed_gradients();
    } else {
      whole_gradients();
    }
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

  // Rows of grad_weight: panel columns of E . input times v, or of dz . input. Of a vocabulary
  // that is no multiple of 8 the last ones go through a sum of 8 rows: see input_product.
  void grad_weight(const Panel& panel, bool of_e) {
    if (!call_.shape.grad_weight) return;
    const char* rows = factor_rows(of_e);
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

  // What cuBLASLt's products read beyond the tokens and the columns.
  void extra_rows(const Panel& panel) { write_extra_rows(call_, m_, chunk_, panel, stream_); }

  // E is there for every column: some rows of grad_input at a time.
  void whole_gradients() {
    const Panel stored = stored_panel();
    finish_panel(call_, m_, chunk_, stored, false, device_, stream_);
    extra_rows(stored);
    scale_apart();
    grad_weight(stored, true);
    for (int64_t row = 0; call_.shape.grad_input && row < chunk_.rows; row += plan_.sum_rows) {
      const int64_t rows = std::min<int64_t>(plan_.sum_rows, chunk_.rows - row);
      input_product(stored, row, rows, m_.row_sums, false);
      write_grad_input(call_, plan_, m_, chunk_, m_.row_sums, row, rows, true, lends_, stream_);
    }
    bias(stored, true);
  }

  // Some of E is there; the rest is made again a panel at a time.
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
};

}  // namespace

void PortableEngine::run(const LinearCall& call, const LinearPlan& plan, const LinearMemory& memory,
                         const DeviceInfo& device, Stream* stream) const {
  PortableRun(call, plan, memory, device, stream).run();
}

}  // namespace logitless::cuda
