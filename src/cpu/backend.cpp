// SPDX-License-Identifier: Apache-2.0
// The CPU backend: Highway kernels, dispatched at run time, on the caller's threads or the
// library's own.
#include "src/backend.h"

#include "src/cpu/dispatch.h"
#include "src/cpu/ops.h"
#include "src/cpu/plan.h"
#include "src/cpu/thread_pool.h"

namespace logitless {
namespace {

struct CpuBackend final : Backend {
  CpuBackend() { cpu::initialize_dispatch(); }
  const char* name() const override { return "cpu"; }
  Status workspace(const Call& call, uint64_t given, WorkspaceSize* size) const override {
    if (call.only_chosen) return cpu::only_chosen_workspace(call, size);
    if (call.linear) return cpu::linear_workspace(call, given, size);
    if (call.combines) return cpu::combine_workspace(call, size);
    return call.loss_op ? cpu::logits_loss_workspace(call, size)
                        : cpu::softmax_workspace(call, size);
  }
  Status decide(const Call& call, uint64_t bytes, Decisions* decided) const override {
    if (call.linear && !call.only_chosen) decided->set(cpu::linear_plan(call, bytes));
    return {};
  }
  Status run(const Call& call, const Decisions& decided,
             const Workspace& workspace) const override {
    if (call.only_chosen) return cpu::run_only_chosen(call, workspace);
    if (call.linear) {
      const auto& plan = decided.get<cpu::LinearPlan>();
      return call.diverges ? cpu::run_divergence(call, plan, workspace)
                           : cpu::run_linear(call, plan, workspace);
    }
    if (call.combines) return cpu::run_combine(call, workspace);
    return call.loss_op ? cpu::run_logits_loss(call, workspace) : cpu::run_softmax(call, workspace);
  }
  Status describe(char* text, size_t bytes) const override {
    std::snprintf(text, bytes, "%s, %d threads", cpu::target_name(), cpu::num_threads());
    return {};
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace logitless
