// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_gpu.h"

#include "cli/commands.h"
#include "cli/text.h"

namespace logitless::cli {
namespace {

// Returns the op with its tensors on the device, at the addresses of data_of.
template <class Op, class F>
Op moved(const Op& host, const Device& device, F&& data_of) {
  Op op = host;
  const logitless_op unused{};
  for_each_tensor(op, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (!view) return;
    view.data = data_of(view);
    view.device = device;
  });
  return op;
}

}  // namespace

uint64_t bytes_of(const TensorView& view) {
  uint64_t elements = 1;
  for (int32_t d = 0; d < view.rank; ++d) elements *= static_cast<uint64_t>(view.shape[d]);
  return elements * static_cast<uint64_t>(size_of(view.dtype));
}

template <class Op>
WorkspaceSize GpuBench::size(const Op& host) const {
  WorkspaceSize size;
  check(workspace(moved(host, execution_.device, [](const TensorView& view) { return view.data; }),
                  execution_, &size));
  return size;
}

template <class Op>
double GpuBench::timed(const Op& host, uint64_t workspace, bool fetches) {
  const Op op =
      moved(host, execution_.device, [&](const TensorView& view) { return device_of(view); });
  const Workspace scratch = reserve(workspace);
  const double elapsed = seconds([&] { check(run(op, scratch, execution_)); });
  if (!fetches) return elapsed;
  const logitless_op unused{};
  for_each_tensor(host, unused, [&](const char*, Access access, const TensorView& view, auto&&) {
    if (view && access != Access::read) fetch(view);
  });
  return elapsed;
}

#define LOGITLESS_INSTANTIATE(Op)                         \
  template WorkspaceSize GpuBench::size(const Op&) const; \
  template double GpuBench::timed(const Op&, uint64_t, bool);
LOGITLESS_INSTANTIATE(Softmax)
LOGITLESS_INSTANTIATE(CrossEntropyForward)
LOGITLESS_INSTANTIATE(CrossEntropyBackward)
LOGITLESS_INSTANTIATE(CrossEntropyForwardBackward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyForward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyBackward)
LOGITLESS_INSTANTIATE(LinearCrossEntropyForwardBackward)
#undef LOGITLESS_INSTANTIATE

}  // namespace logitless::cli
