// SPDX-License-Identifier: Apache-2.0
// The CPU backend: Highway kernels chosen at run time, the caller's or the library's own threads.
#include "src/backend.h"

#include "src/cpu/dispatch.h"
#include "src/cpu/ops.h"
#include "src/cpu/thread_pool.h"

namespace logitless {
namespace {

struct Calls {
  template <class Op>
  static Status workspace(const Op& op, const Execution& execution, WorkspaceSize* size) {
    return cpu::workspace(op, execution, size);
  }
  template <class Op>
  static Status run(const Op& op, const Workspace& workspace, const Execution& execution) {
    return cpu::run(op, workspace, execution);
  }
};

struct CpuBackend final : BackendOf<Calls> {
  CpuBackend() { cpu::initialize_dispatch(); }
  const char* name() const override { return "cpu"; }
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
