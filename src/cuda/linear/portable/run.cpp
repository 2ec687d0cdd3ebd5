// SPDX-License-Identifier: Apache-2.0
// The linear ops on every GPU: cuBLASLt's products, and between them a pass over a block of logits
// in f32 at a time.
#include "src/cuda/linear/portable/engine.h"

#include <algorithm>

#include "src/cuda/linear/linear_run.h"
#include "src/cuda/linear/portable/steps.h"

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

  Panel panel_of(const PanelPlace& at) const override {
    if (at.columns == 0) return {};
    if (at.first < plan_.stored_columns) {
      return {m_.stored, stored_pitch(plan_.stored_columns), 0, plan_.stored_columns, false};
    }
    return {m_.remade, plan_.remade_columns, at.first, at.columns, false};
  }

  void run(const Step& step) override {
    const Panel panel = panel_of(step.panel);
    switch (step.kind) {
      case StepKind::logits:
        return logits(step.of_e ? panel : Panel{});
      case StepKind::finish_panel:
        if (step.of_e) {
          finish_panel(call_, m_, chunk_, panel, panel.first > 0, device_, stream_);
        }
        return write_extra_rows(call_, m_, chunk_, panel, stream_);
      case StepKind::remake:
        return remake(panel, step.of_e);
      case StepKind::grad_input:
        return input_product(panel, step.rows.first, step.rows.count, input_sums(), step.adds);
      case StepKind::grad_weight:
        return grad_weight(panel, step.of_e, step.adds);
      default:
        return;
    }
  }

  void logits(const Panel& stored) {
    for_each_block(0, call_.shape.vocab, [&](const Block& block) {
      const bool stores = block.column < stored.columns;
      exponentials(call_, m_, chunk_, block, true, stores ? stored : Panel{}, stream_);
    });
  }

  void remake(const Panel& panel, bool of_e) {
    for_each_block(panel.first, panel.first + panel.columns, [&](const Block& block) {
      if (of_e) {
        exponentials(call_, m_, chunk_, block, false, panel, stream_);
      } else {
        block_gradients(call_, m_, chunk_, block, panel, stream_);
      }
    });
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
  void grad_weight(const Panel& panel, bool of_e, bool adds) {
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
      multiply(&last, one(), adds);
    }
    if (plan_.grad_weight_sum) {
      p.c = m_.grad_weight_sum + panel.first * pitch;
      return multiply(&p, one(), adds);
    }
    const TensorView& out = call_.grad_weight;
    p.out = out.dtype;
    p.columns = call_.shape.hidden;
    p.c = static_cast<char*>(out.data) + out.byte_offset +
          panel.first * out.stride[0] * size_of(out.dtype);
    p.c_stride = out.stride[0];
    multiply(&p, &m_.tokens.scalars->gradient_scale, call_.accumulate || adds);
  }
};

}  // namespace

void PortableEngine::for_steps(const LinearShape& shape, const LinearPlan& plan,
                               StepVisitor* visitor) const {
  PortableSteps(shape, plan, visitor).enumerate();
}

void PortableEngine::run(const LinearCall& call, const LinearPlan& plan, const LinearMemory& memory,
                         const DeviceInfo& device, Stream* stream) const {
  PortableRun run(call, plan, memory, device, stream);
  PortableSteps(call.shape, plan, &run).enumerate();
}

}  // namespace logitless::cuda
