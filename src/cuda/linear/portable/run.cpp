// SPDX-License-Identifier: Apache-2.0
// This file runs the linear ops on every GPU: cuBLASLt's products, and between them a pass over a
// block of logits in f32 at a time.
#include "src/cuda/linear/portable/engine.h"

#include <algorithm>

#include "src/cuda/linear/linear_run.h"
#include "src/cuda/linear/portable/kernels.h"

namespace logitless::cuda {
namespace {

class PortableRun final : public LinearRun {
 public:
  using LinearRun::LinearRun;

 private:
  const float* zero() const { return &work_.m.tokens.scalars->zero; }
  const float* one() const { return &work_.m.tokens.scalars->one; }

  // Returns the depth of the logits product and the columns of the others, which include the zeros
  // behind D where both operands have them.
  int64_t depth() const {
    return work_.call.shape.copies_weight ? work_.plan.hidden_pitch : work_.call.shape.hidden;
  }

  Panel panel_of(const PanelPlace& at) const override {
    if (at.columns == 0) return {};
    if (at.kept) {
      const int64_t columns = work_.call.kept.columns, pitch = stored_pitch(columns);
      // The caller's panel has rows of all tokens, the chunk's among them.
      const int64_t before = work_.chunk.first * pitch * size_of(work_.call.shape.dtype);
      return {work_.call.kept.data + before, pitch, 0, columns, false};
    }
    if (at.first < work_.plan.stored_columns) {
      return {work_.m.stored, stored_pitch(work_.plan.stored_columns), 0, work_.plan.stored_columns,
              false};
    }
    return {work_.m.remade, work_.plan.remade_columns, at.first, at.columns, false};
  }

  void run(const Step& step) override {
    const Panel panel = panel_of(step.panel);
    switch (step.kind) {
      case StepKind::logits:
        return logits(is_kept(step.panel.origin) ? panel : Panel{});
      case StepKind::finish_panel:
        if (step.of_e()) {
          finish_panel(work_, panel, panel.first > 0);
        }
        return write_extra_rows(work_, panel);
      case StepKind::form_dz:
        return form_panel(work_, panel, panel, whole_rows());
      case StepKind::remake:
        return remake(panel, step.of_e());
      case StepKind::grad_input:
        return input_product(panel, step.rows.first, step.rows.count, input_sums(), step.adds);
      case StepKind::grad_weight:
        return grad_weight(panel, step.of_e(), step.adds);
      default:
        return;
    }
  }

  void logits(const Panel& stored) {
    for_each_block(0, work_.call.shape.vocab, [&](const Block& block) {
      const bool stores = block.column < stored.columns;
      exponentials(work_, block, true, stores ? stored : Panel{});
    });
  }

  void remake(const Panel& panel, bool of_e) {
    for_each_block(panel.first, panel.first + panel.columns, [&](const Block& block) {
      if (of_e) {
        exponentials(work_, block, false, panel);
      } else {
        block_gradients(work_, block, panel);
      }
    });
  }

  // Calls `use` with the raw logits of columns [first, end), block by block.
  template <class F>
  void for_each_block(int64_t first, int64_t end, F&& use) {
    const int64_t element = size_of(work_.call.shape.dtype);
    for (int64_t column = first; column < end; column += work_.plan.block_columns) {
      const int64_t columns = std::min(work_.plan.block_columns, end - column);
      const Operand weight = weight_rows(work_.call, work_.plan, work_.m, column);
      for (int64_t row = 0; row < work_.chunk.rows; row += work_.plan.block_rows) {
        const int64_t rows = std::min<int64_t>(work_.plan.block_rows, work_.chunk.rows - row);
        Product p;
        p.in = work_.call.shape.dtype;
        p.rows = rows;
        p.columns = columns;
        p.depth = depth();
        p.a = {work_.m.input + row * work_.plan.hidden_pitch * element, work_.plan.hidden_pitch, 1};
        p.b = {weight.data, weight.column_stride, weight.row_stride};
        p.c = work_.m.logits;
        p.c_stride = work_.plan.block_columns;
        p.most_rows = work_.plan.block_rows;
        p.most_columns = work_.plan.block_columns;
        multiply(&p, one(), false);
        use(Block{work_.m.logits, work_.plan.block_columns, static_cast<int32_t>(row),
                  static_cast<int32_t>(rows), column, columns});
      }
    }
  }

  // If `add`, adds the product to what is there.
  void multiply(Product* p, const float* alpha, bool add) {
    p->alpha = alpha;
    p->beta = add ? one() : zero();
    p->tf32 = work_.call.in.options.allow_tf32;
    cuda::multiply(*p, work_.device, work_.m.library, work_.stream);
  }

  // Makes sums [rows, hidden_pitch] (+)= panel rows . weight rows. The last columns of a vocabulary
  // that is no multiple of 8 are a product of their own, with zeros behind them, because a depth of
  // 50257 takes cuBLASLt's kernels a hundred times as long.
  void input_product(const Panel& panel, int64_t row, int64_t rows, float* sums, bool add) {
    const int64_t element = size_of(work_.call.shape.dtype);
    const int64_t tail = panel.columns % 8;
    Product p;
    p.in = work_.call.shape.dtype;
    p.rows = rows;
    p.columns = depth();
    p.depth = panel.columns - tail;
    p.a = {panel.data + row * panel.pitch * element, panel.pitch, 1};
    p.b = weight_rows(work_.call, work_.plan, work_.m, panel.first);
    p.c = sums;
    p.c_stride = work_.plan.hidden_pitch;
    if (lends_block(work_.call.shape, work_.plan)) {
      p.parts = work_.m.logits;
      p.parts_bytes = block_bytes(work_.plan);
    }
    if (p.depth > 0) {
      multiply(&p, one(), add);
      add = true;
    }
    if (tail == 0) return;
    p.parts_bytes = 0;
    p.a.data = panel.data + (row * panel.pitch + p.depth) * element;
    p.b = {work_.m.weight_tail, work_.plan.hidden_pitch, 1};
    p.columns = work_.plan.hidden_pitch;
    p.depth = 8;
    multiply(&p, one(), add);
  }

  // Makes rows of grad_weight from panel columns of E and input times v, or of dz and input. If the
  // vocabulary is no multiple of 8, the last rows of 16 bits or TF32 go through a sum of 8: tensor
  // cores read whole 16 bytes. On the CUDA cores such 8 rows would take 2 % of the call.
  void grad_weight(const Panel& panel, bool of_e, bool adds) {
    const char* rows = factor_rows(of_e);
    const int64_t tail = work_.call.shape.on_cuda_cores ? 0 : panel.columns % 8;
    const int64_t pitch = work_.plan.hidden_pitch;
    Product p;
    p.in = work_.call.shape.dtype;
    p.rows = panel.columns - tail;
    // The depth is a multiple of 8, since zeros lie behind the rows of both.
    p.depth = (work_.chunk.rows + (work_.m.smoothed_row != nullptr ? 2 : 0) + 7) / 8 * 8;
    p.columns = pitch;
    p.a = {panel.data, 1, panel.pitch};
    p.b = {rows, pitch, 1};
    p.c_stride = pitch;
    if (tail > 0) {
      Product last = p;
      last.rows = 8;
      last.a.data = panel.data + p.rows * size_of(p.in);
      last.c = work_.m.weight_tail_sum;
      multiply(&last, one(), adds);
    }
    if (sums_grad_weight()) {
      p.c = work_.m.grad_weight_sum + panel.first * pitch;
      return multiply(&p, one(), adds);
    }
    const TensorView& out = work_.call.grad_weight;
    p.out = out.dtype;
    p.columns = work_.call.shape.hidden;
    p.c = static_cast<char*>(out.data) + out.byte_offset +
          panel.first * out.stride[0] * size_of(out.dtype);
    p.c_stride = out.stride[0];
    multiply(&p, &work_.m.tokens.scalars->gradient_scale, work_.call.accumulate || adds);
  }
};

}  // namespace

void PortableEngine::run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                         const DeviceInfo& device, Stream* stream) const {
  const LinearMemory memory = cuda::place(*this, call, plan, workspace);
  PortableRun run(call, plan, memory, device, stream);
  for_steps(call.shape, plan, &run);
}

}  // namespace logitless::cuda
