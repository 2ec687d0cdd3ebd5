// SPDX-License-Identifier: Apache-2.0
// Runs the steps of a plan on a family's kernels.
#include <algorithm>

#include "src/cuda/linear/linear_run.h"
#include "src/cuda/linear/parts.h"
#include "src/cuda/linear/tiled/engine.h"
#include "src/cuda/linear/tiled/panels.h"
#include "src/cuda/linear/tiled/teams.h"

namespace logitless::cuda::tiled {
namespace {

// Bytes of a row of a block of 64 columns.
constexpr int64_t panel_row_bytes = 64 * 2;

class TiledRun final : public LinearRun {
 public:
  TiledRun(const TiledEngine& engine, const LinearCall& call, const LinearPlan& plan,
           const LinearMemory& memory, const DeviceInfo& device, Stream* stream)
      : LinearRun(call, plan, memory, device, stream), engine_(engine) {}

 private:
  Panel panel_of(const PanelPlace& at) const override {
    Panel panel = tiled::panel_of(work_.call, work_.plan, work_.m, at);
    // The caller's panel has rows of all tokens, including the chunk's.
    if (at.kept && at.columns > 0) panel.data += work_.chunk.first * panel_row_bytes;
    return panel;
  }

  int whole_rows() const override { return engine_.tile().depth; }

  void run(const Step& step) override {
    const Panel panel = panel_of(step.panel);
    switch (step.kind) {
      case StepKind::logits:
        if (work_.call.top) return list_logits(step.panel);
        return engine_.logits(work_, step.panel.first, step.panel.columns,
                              is_kept(step.panel.origin) ? panel : Panel{});
      case StepKind::column_terms:
        return column_terms(work_, engine_.tile().columns);
      case StepKind::finish_panel:
        return finish_panel(work_, panel, false);
      case StepKind::form_dz:
        if (is_by_rows(step.panel.origin)) return form_panel(work_, panel, panel, whole_rows());
        return engine_.form_dz(work_, panel, !step.adds);
      case StepKind::remake:
        return engine_.remake(work_, panel);
      case StepKind::copy_panel: {
        PanelPlace from = step.panel;
        from.copied = false;
        return copy_panel(work_, panel_of(from), work_.m.remade);
      }
      case StepKind::grad_input:
        return grad_input(step, {panel, panel_of(step.behind())});
      case StepKind::grad_weight:
        return engine_.grad_weight(work_, panel, factor_rows(step.of_e()), step.of_e(),
                                   adds_weight(step));
      case StepKind::both_gradients:
        engine_.both_gradients(work_, panel, factor_rows(step.of_e()), step.of_e(),
                               adds_weight(step));
        joined_ = tiled_part(work_.plan).slots > 0 && !work_.call.shape.grad_bias;
        return;
      default:
        return;
    }
  }

  // Computes the logits of some columns at a time, and lists the largest of them.
  void list_logits(const PanelPlace& panel) {
    const int64_t most = work_.plan.block_columns;
    for (int64_t first = panel.first; first < panel.end(); first += most) {
      const int64_t columns = std::min(most, panel.end() - first);
      engine_.logits(work_, first, columns, Panel{});
      list_block(work_, {work_.m.logits, most, 0, work_.chunk.rows, first, columns},
                 engine_.tile().columns, true);
    }
  }

  void grad_input(const Step& step, const Kept& kept) {
    if (step.to_sums) {
      // If grad_input is summed some rows at a time, write_grad_input applies the rows' factors.
      return engine_.input_sums(work_, kept, step.rows, input_sums(),
                                step.of_e() && work_.plan.sum_rows == 0, step.adds);
    }
    engine_.grad_input(work_, kept, step.of_e());
    if (lends_input()) clear_other_rows(work_.m.tokens, work_.call.grad_input, work_.stream);
  }

  // Whether the product adds to existing values.
  bool adds_weight(const Step& step) const {
    return step.adds || (work_.call.accumulate && !sums_grad_weight());
  }

  const TiledEngine& engine_;
};

}  // namespace

void TiledEngine::run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                      const DeviceInfo& device, Stream* stream) const {
  LinearMemory memory = cuda::place(*this, call, plan, workspace);
  const LinearShape& s = call.shape;
  const int64_t lent = tiled_part(plan).lent_scaled;
  if (lent >= 0) memory.scaled = call.grad_weight.as<char>() + lent;
  memory.partials.anchored = s.forward && !finds_maximum(s);
  memory.units = {static_cast<int32_t>(divide_up(s.vocab, tile_.columns)),
                  teams_of(plan, tile_.teams(device.multiprocessors))};
  TiledRun run(*this, call, plan, memory, device, stream);
  Parts(call.part, &run).enumerate(*this, s, plan);
}

}  // namespace logitless::cuda::tiled
