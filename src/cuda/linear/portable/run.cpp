// SPDX-License-Identifier: Apache-2.0
// Runs the linear ops on every GPU: cuBLASLt's products, and between them kernels over one block of
// f32 logits at a time.
#include "src/cuda/linear/portable/engine.h"

#include <algorithm>

#include "src/cuda/linear/linear_run.h"
#include "src/cuda/linear/parts.h"
#include "src/cuda/linear/portable/kernels.h"
#include "src/cuda/linear/portable/products.h"

namespace logitless::cuda {
namespace {

class PortableRun final : public LinearRun {
 public:
  PortableRun(bool fuses, const LinearCall& call, const LinearPlan& plan,
              const LinearMemory& memory, const DeviceInfo& device, Stream* stream)
      : LinearRun(call, plan, memory, device, stream), fuses_(fuses) {}

 private:
  Panel panel_of(const PanelPlace& at) const override {
    if (at.columns == 0) return {};
    if (at.kept) {
      const int64_t columns = work_.call.kept.columns, pitch = stored_pitch(columns);
      // The caller's panel has rows of all tokens, including the chunk's.
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
        return HeadProducts(work_).grad_input(panel, step.rows.first, step.rows.count, input_sums(),
                                              step.adds);
      case StepKind::grad_weight:
        return HeadProducts(work_).grad_weight(panel, factor_rows(step.of_e()), step.adds);
      default:
        return;
    }
  }

  void logits(const Panel& stored) {
    if (fuses_) return fuse(stored);
    const bool early = exponentials_start_early(work_.device, work_.stream);
    for_each_block(0, work_.call.shape.vocab, [&](const Block& block) {
      multiply(block);
      const bool stores = block.column < stored.columns;
      exponentials(work_, block, true, stores ? stored : Panel{}, early);
      if (work_.call.top) list_block(work_, block, segment_columns, false);
    });
  }
  void fuse(const Panel& stored) {
    const int64_t vocab = work_.call.shape.vocab;
    if (!work_.call.top) {
      return fused_logits(work_, {.rows = work_.chunk.rows, .columns = vocab}, true, stored);
    }
    for_each_block(0, vocab, [&](const Block& block) {
      fused_logits(work_, block, true, {});  // no call for lists stores E
      list_block(work_, block, fused_columns, false);
    });
  }

  void remake(const Panel& panel, bool of_e) {
    if (of_e && fuses_) {
      const Block all{.rows = work_.chunk.rows, .column = panel.first, .columns = panel.columns};
      return fused_logits(work_, all, false, panel);
    }
    const bool early = of_e && exponentials_start_early(work_.device, work_.stream);
    for_each_block(panel.first, panel.first + panel.columns, [&](const Block& block) {
      multiply(block);
      if (of_e) {
        exponentials(work_, block, false, panel, early);
      } else {
        block_gradients(work_, block, panel);
      }
    });
  }

  void multiply(const Block& b) const {
    HeadProducts(work_).logits({b.row, b.rows, b.column, b.columns, work_.plan.block_rows,
                                work_.plan.block_columns, work_.m.logits, b.pitch});
  }

  // Calls `use` with the blocks of columns [first, end).
  template <class F>
  void for_each_block(int64_t first, int64_t end, F&& use) const {
    const int64_t most_rows = work_.plan.block_rows, most_columns = work_.plan.block_columns;
    for (int64_t column = first; column < end; column += most_columns) {
      const int64_t columns = std::min(most_columns, end - column);
      for (int64_t row = 0; row < work_.chunk.rows; row += most_rows) {
        const int64_t rows = std::min<int64_t>(most_rows, work_.chunk.rows - row);
        use(Block{work_.m.logits, most_columns, static_cast<int32_t>(row),
                  static_cast<int32_t>(rows), column, columns});
      }
    }
  }

  const bool fuses_;
};

}  // namespace

void PortableEngine::run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                         const DeviceInfo& device, Stream* stream) const {
  const LinearMemory memory = cuda::place(*this, call, plan, workspace);
  PortableRun run(fuses(), call, plan, memory, device, stream);
  Parts(call.part, &run).enumerate(*this, call.shape, plan);
}

}  // namespace logitless::cuda
