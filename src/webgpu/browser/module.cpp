// SPDX-License-Identifier: Apache-2.0
// The functions that the wasm module exports to web/logitless.js. They begin an op, set its tensors
// and options by their names in docs/semantics.md, then plan it, run it on the page's device, or
// evaluate it in double with the reference backend. One op at a time, on one thread.
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <type_traits>

#include "src/message.h"
#include "src/numbers.h"
#include "src/reference/reference.h"
#include "src/validate.h"
#include "src/webgpu/browser/device.h"
#include "src/webgpu/run.h"

#define LOGITLESS_EXPORT(name) __attribute__((export_name(name)))

namespace logitless::webgpu {
namespace {

struct Options {
  LossOptions loss;
  DivergenceOptions divergence;
  const char* of_divergence = nullptr;  // the name of an option of divergences that was set
};

template <class Value>
Value& field(Options& options, Value LossOptions::* member) {
  return options.loss.*member;
}
template <class Value>
Value& field(Options& options, Value DivergenceOptions::* member) {
  return options.divergence.*member;
}

struct State {
  BrowserDevice device;
  std::unique_ptr<WorkspaceBuffers> workspace;  // of the last size; kept for the next call
  int32_t kind = -1;
  bool accumulate = false;
  Options options;
  std::map<std::string, TensorView> tensors;
  reference::Result judged;
  Status given;  // the first error in the tensors' numbers
  Status status;
};

// Created at the first call, because a reactor module has no main().
State& state() {
  static State* made = new State;
  return *made;
}

int32_t report(const Status& status) {
  state().status = status;
  return static_cast<int32_t>(status.code());
}

// JavaScript's numbers are doubles; one that the option's type cannot hold is an error.
template <auto member>
Status set_f32(Options& options, const char* name, double value) {
  if (!held_by_f32(value)) {
    return error(StatusCode::invalid_argument, "%s is %g; allowed: %s", name, unsigned_nan(value),
                 what_f32_holds);
  }
  field(options, member) = static_cast<float>(value);
  return {};
}

template <auto member>
Status set_integer(Options& options, const char* name, double value) {
  if (!is_integer(value)) {
    return error(StatusCode::invalid_argument, "%s is %g; allowed: %s", name, unsigned_nan(value),
                 what_is_integer);
  }
  field(options, member) = static_cast<int64_t>(value);
  return {};
}

template <auto member>
Status set_enum(Options& options, const char* name, double value) {
  if (!is_integer(value) || value < 0 || value > INT32_MAX) {
    return error(StatusCode::unknown_enum, "%s is %g; allowed: an enumerator", name,
                 unsigned_nan(value));
  }
  using Enum = std::remove_reference_t<decltype(field(options, member))>;
  field(options, member) = static_cast<Enum>(static_cast<int32_t>(value));
  return {};
}

Status set_double(Options& options, const char*, double value) {
  options.loss.normalizer = value;
  return {};
}

struct Option {
  const char* name;
  Status (*set)(Options&, const char* name, double);
  bool of_divergence = false;
};
constexpr Option kOptions[] = {
    {"reduction", set_enum<&LossOptions::reduction>},
    {"ignore_index", set_integer<&LossOptions::ignore_index>},
    {"label_smoothing", set_f32<&LossOptions::label_smoothing>},
    {"z_loss", set_f32<&LossOptions::z_loss>},
    {"logit_scale", set_f32<&LossOptions::logit_scale>},
    {"softcap", set_f32<&LossOptions::softcap>},
    {"temperature", set_f32<&LossOptions::temperature>},
    {"out_of_range", set_enum<&LossOptions::out_of_range>},
    {"empty_mean", set_enum<&LossOptions::empty_mean>},
    {"input_kind", set_enum<&LossOptions::input_kind>},
    {"probability_floor", set_f32<&LossOptions::probability_floor>},
    {"normalizer", set_double},
    {"vocab_start", set_integer<&LossOptions::vocab_start>},
    {"vocab_total", set_integer<&LossOptions::vocab_total>},
    {"divergence", set_enum<&DivergenceOptions::kind>, true},
    {"beta", set_f32<&DivergenceOptions::beta>, true},
    {"label_weight", set_f32<&DivergenceOptions::label_weight>, true},
    {"teacher_logit_scale", set_f32<&DivergenceOptions::teacher_logit_scale>, true},
    {"teacher_softcap", set_f32<&DivergenceOptions::teacher_softcap>, true},
    {"teacher_temperature", set_f32<&DivergenceOptions::teacher_temperature>, true},
};

// Reads a size, a stride or an offset. The first that is not an integer becomes an error of make().
int64_t size_of_tensor(const char* tensor, double value) {
  if (is_integer(value)) return static_cast<int64_t>(value);
  if (state().given.ok()) {
    state().given =
        error(StatusCode::invalid_argument, "%s has a size or a stride of %g; allowed: %s", tensor,
              unsigned_nan(value), what_is_integer);
  }
  return 0;
}

constexpr Execution kOnDevice{.device = {.type = DeviceType::webgpu}};

// Builds the current op from the given tensors; a tensor that it does not have is an error.
Status make(const Execution& execution, DeviceType tensors_on, Call* call) {
  const State& s = state();
  if (!s.given.ok()) return s.given;
  if (s.kind < 0 || s.kind >= kinds) return unknown_op(s.kind);
  *call = Call(s.kind, execution);
  if (call->loss_op) call->options = s.options.loss;
  if (call->diverges) call->divergence = s.options.divergence;
  if (!call->diverges && s.options.of_divergence != nullptr) {
    return error(StatusCode::invalid_argument, "%s is given; %s has no teacher",
                 s.options.of_divergence, call->op_name());
  }
  call->accumulate = call->gradients && call->linear && s.accumulate;
  size_t taken = 0;
  for (const TensorField& field : tensor_fields(s.kind)) {
    const auto found = s.tensors.find(field.name);
    if (found == s.tensors.end()) continue;
    tensor_at(*call, field) = found->second;
    tensor_at(*call, field).device.type = tensors_on;
    ++taken;
  }
  if (taken == s.tensors.size()) return {};
  return error(StatusCode::invalid_argument, "a tensor was given that this op does not have");
}

Status sizes_of(const Call& call, WorkspaceSize* size) {
  const Status status = validate(call);
  if (!status.ok()) return status;
  return workspace_sizes(problem_of(call), state().device.limits(), &size->minimum,
                         &size->recommended);
}

template <class F>
int32_t with_call(const Execution& execution, DeviceType tensors_on, F&& f) {
  Call call;
  const Status status = make(execution, tensors_on, &call);
  return report(status.ok() ? f(call) : status);
}

}  // namespace
}  // namespace logitless::webgpu

using namespace logitless;          // NOLINT: the C functions below are this file's purpose
using namespace logitless::webgpu;  // NOLINT

extern "C" {

LOGITLESS_EXPORT("allocate") void* allocate(uint32_t bytes) { return std::malloc(bytes); }
LOGITLESS_EXPORT("release") void release(void* memory) { std::free(memory); }
LOGITLESS_EXPORT("message") const char* message() { return state().status.message(); }

LOGITLESS_EXPORT("set_limits")
void set_limits(double buffer_bytes, double storage_binding_bytes, uint32_t storage_buffers,
                uint32_t offset_alignment, uint32_t workgroup_bytes, uint32_t workgroup_invocations,
                uint32_t groups) {
  state().device.set_limits({.buffer_bytes = static_cast<uint64_t>(buffer_bytes),
                             .storage_binding_bytes = static_cast<uint64_t>(storage_binding_bytes),
                             .storage_buffers = storage_buffers,
                             .offset_alignment = offset_alignment,
                             .workgroup_bytes = workgroup_bytes,
                             .workgroup_invocations = workgroup_invocations,
                             .groups = groups});
}

LOGITLESS_EXPORT("begin") void begin(int32_t kind, int32_t accumulate_grad_weight) {
  State& s = state();
  s.kind = kind;
  s.accumulate = accumulate_grad_weight != 0;
  s.options = {};
  s.tensors.clear();
  s.given = {};
}

// `data` is a buffer's number, or, for the reference, an address.
LOGITLESS_EXPORT("tensor")
void tensor(const char* name, uintptr_t data, double byte_offset, int32_t dtype, int32_t rank,
            double rows, double columns, double row_stride, double column_stride) {
  const auto size = [name](double value) { return size_of_tensor(name, value); };
  state().tensors[name] = {.data = reinterpret_cast<void*>(data),
                           .byte_offset = static_cast<uint64_t>(size(byte_offset)),
                           .dtype = static_cast<DType>(dtype),
                           .rank = rank,
                           .shape = {size(rows), size(columns)},
                           .stride = {size(row_stride), size(column_stride)}};
}

LOGITLESS_EXPORT("option") int32_t option(const char* name, double value) {
  for (const Option& known : kOptions) {
    if (std::strcmp(known.name, name) != 0) continue;
    if (known.of_divergence) state().options.of_divergence = known.name;
    return report(known.set(state().options, name, value));
  }
  return report(error(StatusCode::invalid_argument, "there is no option %s", name));
}

// Writes the op's minimum and recommended bytes of workspace.
LOGITLESS_EXPORT("workspace") int32_t workspace(double* sizes) {
  return with_call(kOnDevice, DeviceType::webgpu, [&](const Call& call) {
    WorkspaceSize size;
    const Status status = sizes_of(call, &size);
    sizes[0] = static_cast<double>(size.minimum);
    sizes[1] = static_cast<double>(size.recommended);
    return status;
  });
}

// Records and submits the op without waiting. The workspace's buffers are kept for the next call
// with the same budget.
LOGITLESS_EXPORT("run") int32_t run(double budget) {
  return with_call(kOnDevice, DeviceType::webgpu, [&](const Call& call) {
    if (!(budget >= 0 && budget < 0x1p53)) {
      return error(StatusCode::invalid_argument, "budget is %g; allowed: 0 to 2^53 - 1 bytes",
                   unsigned_nan(budget));
    }
    WorkspaceSize size;
    Status status = sizes_of(call, &size);
    const auto bytes = static_cast<uint64_t>(budget);
    State& s = state();
    if (s.workspace == nullptr || s.workspace->budget() != bytes) {
      s.workspace = std::make_unique<WorkspaceBuffers>(&s.device, bytes);
    }
    if (status.ok()) {
      status = validate_data(call, {.data = s.workspace.get(), .bytes = bytes}, size);
    }
    if (!status.ok()) return status;
    return logitless::webgpu::run(call, bytes, s.workspace.get());
  });
}

// Drops the workspace's buffers after a call that failed: WebGPU may have refused one of them.
LOGITLESS_EXPORT("forget") void forget() { state().workspace.reset(); }

// Evaluates the op in double; its tensors are memory of this module.
LOGITLESS_EXPORT("evaluate") int32_t evaluate(int32_t with_bounds) {
  const Execution on_reference{.device = {.type = DeviceType::reference}};
  return with_call(on_reference, DeviceType::cpu, [&](const Call& call) {
    const Status status = validate(call);
    if (!status.ok()) return status;
    state().judged = reference::evaluate(call, {}, with_bounds != 0);
    return state().judged.status;
  });
}

// An output's values as `evaluate` computed them, or the contract's bounds of a backend's error.
LOGITLESS_EXPORT("evaluated") const double* evaluated(const char* name, int32_t bound) {
  const auto found = state().judged.outputs.find(name);
  if (found == state().judged.outputs.end()) return nullptr;
  return (bound != 0 ? found->second.bound : found->second.value).data();
}

}  // extern "C"
