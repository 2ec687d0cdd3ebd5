// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: finds the device, makes it current, and runs the op.
#include "src/backend.h"

#include <cstdio>

#include "src/cuda/divergence/divergence.h"
#include "src/cuda/linear/engines.h"
#include "src/cuda/linear/linear_cross_entropy.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/ops.h"
#include "src/cuda/promises.h"

namespace logitless {
namespace {

// Finds the op's device, and checks that the engine named by LOGITLESS_CUDA_KERNELS serves it.
Status find_device(const Execution& execution, const cuda::DeviceInfo** device) {
  const Status status = cuda::find_device(execution.device.index, device);
  return status.ok() ? cuda::check_named_engine(**device) : status;
}

// Calls enqueue(device, stream) with the execution's device current.
template <class F>
Status on_stream(const Execution& execution, F&& enqueue) {
  const cuda::DeviceInfo* device;
  const Status status = find_device(execution, &device);
  if (!status.ok()) return status;
  const cuda::CurrentDevice current(device->index);
  if (!current.status().ok()) return current.status();
  cuda::Stream stream(execution.stream);
  enqueue(*device, &stream);
  return stream.status();
}

const char* invariant_ops(const cuda::DeviceInfo& device) {
  return cuda::half_linear_ops_are_batch_invariant(device)
             ? "all but divergences, and linear ops in f32 or of a weight whose rows are strided "
               "or unaligned"
             : "all but the linear ops";
}

const char* near_references(const cuda::DeviceInfo& device) {
  return cuda::reference_is_maximum(device, DType::bf16) ? ""
                                                         : ", but near it in 16-bit linear ops";
}

struct CudaBackend final : Backend {
  const char* name() const override { return "cuda"; }
  Status workspace(const Call& call, uint64_t given, WorkspaceSize* size) const override {
    const cuda::DeviceInfo* device;
    const Status status = find_device(call.execution, &device);
    if (!status.ok()) return status;
    if (call.diverges) return cuda::divergence_workspace(call, *device, given, size);
    if (call.only_chosen) return cuda::only_chosen_workspace(call, size);
    if (call.linear) return cuda::linear_workspace(call, *device, given, size);
    if (call.combines) return cuda::combine_workspace(call, *device, size);
    return call.loss_op ? cuda::logits_loss_workspace(call, *device, size)
                        : cuda::softmax_workspace(call, *device, size);
  }
  Status decide(const Call& call, uint64_t bytes, Decisions* decided) const override {
    if (!call.linear || call.only_chosen) return {};
    const cuda::DeviceInfo* device;
    const Status status = find_device(call.execution, &device);
    if (!status.ok()) return status;
    if (call.diverges) {
      decided->set(cuda::divergence_plan(call, bytes, *device));
    } else {
      decided->set(cuda::decide_linear(call, bytes, *device));
    }
    return status;
  }
  Status run(const Call& call, const Decisions& decided,
             const Workspace& workspace) const override {
    const cuda::DeviceInfo* device;
    Status status = find_device(call.execution, &device);
    if (!status.ok()) return status;
    const cuda::CurrentDevice current(device->index);
    if (!current.status().ok()) return current.status();
    cuda::Stream stream(call.execution.stream);
    if (call.diverges) {
      status = cuda::run_divergence(call, decided.get<cuda::DivergencePlan>(), workspace, *device,
                                    &stream);
    } else if (call.linear && !call.only_chosen) {
      const cuda::LinearPasses made =
          cuda::linear_passes(call, decided.get<cuda::LinearDecisions>(), workspace, *device);
      stream.prepare_and_run([&] {
        for (int i = 0; i < made.count; ++i) {
          const cuda::LinearPass& pass = made.pass[i];
          made.engine->run(pass.call, pass.plan, pass.workspace, *device, &stream);
        }
      });
    } else {
      const auto run = call.only_chosen ? cuda::run_only_chosen
                       : call.combines  ? cuda::run_combine
                       : call.loss_op   ? cuda::run_logits_loss
                                        : cuda::run_softmax;
      status = run(call, workspace, *device, &stream);
    }
    return status.ok() ? stream.status() : status;
  }
  bool divides(const Call& call) const override { return call.linear && !call.only_chosen; }
  Status describe(char* text, size_t bytes) const override {
    const cuda::DeviceInfo* device;
    Status status = cuda::find_first_device(&device);
    if (status.ok()) status = cuda::check_named_engine(*device);
    if (!status.ok()) return status;
    char library[160], kernels[40] = {};
    if (device->kernels[0] != 0) {
      std::snprintf(kernels, sizeof(kernels), ", %s kernels", device->kernels);
    }
    (void)cuda::describe_matrix_library(library, sizeof(library));
    std::snprintf(text, bytes,
                  "%s, sm_%d%d%s, %s, batch invariance: %s; row_reference: the row's maximum%s",
                  device->name, device->major, device->minor, kernels, library,
                  invariant_ops(*device), near_references(*device));
    return status;
  }
  Status scale(std::span<const TensorView> values, const TensorView& factor,
               const Execution& execution) const override {
    return on_stream(execution, [&](const cuda::DeviceInfo& device, cuda::Stream* stream) {
      cuda::scale(values, factor, device, stream);
    });
  }
  Status add(std::span<const TensorView> parts, const TensorView& sum,
             const Execution& execution) const override {
    return on_stream(execution, [&](const cuda::DeviceInfo& device, cuda::Stream* stream) {
      cuda::add(parts, sum, device, stream);
    });
  }
  Status warmup(const Execution& execution) const override {
    const cuda::DeviceInfo* device;
    const Status status = find_device(execution, &device);
    if (!status.ok()) return status;
    const cuda::CurrentDevice current(device->index);
    return current.status().ok() ? cuda::warmup(*device) : current.status();
  }
};

}  // namespace

const Backend* cuda_backend(Status* status) {
  int count;
  *status = cuda::count_devices(&count);
  if (!status->ok()) return nullptr;
  static const CudaBackend backend;
  return &backend;
}

}  // namespace logitless
