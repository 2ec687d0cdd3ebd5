// SPDX-License-Identifier: Apache-2.0
// The C entry points: they turn sized C structs into a Call for run.h.
#include "logitless/c.h"

#include <cstring>
#include <memory>

#include "src/c_status.h"
#include "src/cpu/thread_pool.h"
#include "src/kept.h"
#include "src/run.h"
#include "src/validate.h"

namespace logitless {

namespace {

// No version's struct is this large: a larger struct_size was never set.
constexpr uint32_t kMaxStructSize = 4096;

// Copies a sized struct. A smaller one is zero-extended. A larger one is accepted only if the bytes
// that this version does not know are zero.
template <class T>
Status read_struct(const char* name, const T* source, T* copy) {
  if (source == nullptr) return error(StatusCode::invalid_argument, "%s is NULL", name);
  uint32_t size;
  std::memcpy(&size, source, sizeof(size));
  // No version of a struct ends in the middle of a field: a sizeof is a multiple of its alignment.
  if (size == 0 || size > kMaxStructSize || size % alignof(T) != 0) {
    return error(StatusCode::invalid_argument,
                 "%s.struct_size is %u; allowed: a multiple of %zu up to %u (this library's: %zu)",
                 name, size, alignof(T), kMaxStructSize, sizeof(T));
  }
  const char* bytes = reinterpret_cast<const char*>(source);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return error(StatusCode::not_supported,
                   "%s.struct_size is %u and its byte %zu is set: newer than this library, which "
                   "knows %zu bytes",
                   name, size, i, sizeof(T));
    }
  }
  *copy = T{};
  std::memcpy(copy, source, size < sizeof(T) ? size : sizeof(T));
  copy->struct_size = sizeof(T);
  return {};
}

// An axis of one element, any axis of an empty view, and axes beyond the rank have no meaningful
// stride, so callers may leave any number there. It becomes that of dense rows, beyond the rank 0:
// a backend could overflow 64 bits with it or choose a layout by it. Strides that validation
// refuses stay, for its message.
void make_free_strides_dense(TensorView* view) {
  bool empty = false;
  for (int32_t d = 0; d < 2; ++d) {
    if (d >= view->rank) view->shape[d] = view->stride[d] = 0;
    if (view->shape[d] < 0 || view->stride[d] < 0) return;
    empty |= d < view->rank && view->shape[d] == 0;
  }
  int64_t dense = 1;
  for (int32_t d = view->rank - 1; d >= 0; --d) {
    if (empty || view->shape[d] == 1) view->stride[d] = dense;
    if (__builtin_mul_overflow(view->shape[d], view->stride[d], &dense)) return;
  }
}

Status from_c(const char* name, const logitless_tensor* source, TensorView* view) {
  logitless_tensor t;
  Status status = read_struct(name, source, &t);
  if (!status.ok()) return status;
  if (t.reserved != 0) {
    return error(StatusCode::invalid_argument, "%s.reserved is %d; allowed: 0", name, t.reserved);
  }
  // In C++ a rank of -1 marks an absent view; in C, NULL does.
  if (t.rank < 0 || t.rank > 2) {
    return error(StatusCode::wrong_shape, "%s has rank %d; allowed: 0, 1, 2", name, t.rank);
  }
  *view = {t.data,
           t.byte_offset,
           static_cast<DType>(t.dtype),
           {static_cast<DeviceType>(t.device_type), t.device_index},
           t.rank,
           {t.shape[0], t.shape[1]},
           {t.stride[0], t.stride[1]}};
  make_free_strides_dense(view);
  return {};
}

// Reads `count` tensors, whose number must be one of `allowed`, both ends included.
Status from_c(const char* name, const logitless_tensor* const* sources, int32_t count,
              std::pair<int32_t, int32_t> allowed, TensorView* views) {
  const auto [least, most] = allowed;
  if (count < least || count > most) {
    return error(StatusCode::invalid_argument, "count is %d; allowed: %d to %d", count, least,
                 most);
  }
  if (count > 0 && sources == nullptr) {
    return error(StatusCode::invalid_argument, "%s is NULL", name);
  }
  Status status;
  for (int32_t i = 0; status.ok() && i < count; ++i) status = from_c(name, sources[i], &views[i]);
  return status;
}

Status from_c(const logitless_loss_options* source, LossOptions* options) {
  if (source == nullptr) return {};
  logitless_loss_options o;
  Status status = read_struct("options", source, &o);
  if (!status.ok()) return status;
  options->reduction = static_cast<Reduction>(o.reduction);
  options->ignore_index = o.ignore_index;
  options->label_smoothing = o.label_smoothing;
  options->z_loss = o.z_loss;
  options->logit_scale = o.logit_scale;
  options->softcap = o.softcap;
  options->temperature = o.temperature;
  options->out_of_range = static_cast<OutOfRange>(o.out_of_range);
  options->empty_mean = static_cast<EmptyMean>(o.empty_mean);
  options->input_kind = static_cast<InputKind>(o.input_kind);
  options->probability_floor = o.probability_floor;
  options->allow_tf32 = o.allow_tf32 != 0;
  options->normalizer = o.normalizer;
  options->vocab_start = o.vocab_start;
  options->vocab_total = o.vocab_total;
  return {};
}

Status from_c(const logitless_divergence_options* source, DivergenceOptions* options) {
  if (source == nullptr) return {};
  logitless_divergence_options o;
  Status status = read_struct("divergence", source, &o);
  if (!status.ok()) return status;
  if (o.reserved != 0) {
    return error(StatusCode::invalid_argument, "divergence.reserved is %d; allowed: 0", o.reserved);
  }
  *options = {static_cast<DivergenceKind>(o.kind),
              o.beta,
              o.label_weight,
              o.teacher_logit_scale,
              o.teacher_softcap,
              o.teacher_temperature};
  return {};
}

// `executor` holds a copy of the caller's executor, zero-extended to this version.
Status from_c(const logitless_execution* source, Execution* execution, Executor* executor) {
  if (source == nullptr) return {};
  logitless_execution e;
  Status status = read_struct("execution", source, &e);
  if (!status.ok()) return status;
  if (e.reserved != 0) {
    return error(StatusCode::invalid_argument, "execution.reserved is %d; allowed: 0", e.reserved);
  }
  *execution = {{static_cast<DeviceType>(e.device_type), e.device_index}, e.stream, nullptr};
  if (e.executor == nullptr) return {};
  status = read_struct("executor", e.executor, executor);
  if (!status.ok()) return status;
  if (executor->num_threads < 1) {
    return error(StatusCode::invalid_argument, "executor.num_threads is %d; allowed: >= 1",
                 executor->num_threads);
  }
  if (executor->parallel_for == nullptr) {
    return error(StatusCode::invalid_argument,
                 "executor.parallel_for is NULL; allowed: a function");
  }
  execution->executor = executor;
  return {};
}

Status from_c(const logitless_workspace_buffer* source, Workspace* workspace) {
  if (source == nullptr) return {};
  logitless_workspace_buffer w;
  Status status = read_struct("workspace", source, &w);
  if (!status.ok()) return status;
  if (w.reserved != 0) {
    return error(StatusCode::invalid_argument, "workspace.reserved is %u; allowed: 0", w.reserved);
  }
  *workspace = {w.data, w.bytes, w.byte_offset};
  return {};
}

const logitless_tensor*& tensor_of(logitless_op& c, const TensorField& field) {
  return *reinterpret_cast<const logitless_tensor**>(reinterpret_cast<char*>(&c) + field.in_c);
}

// Returns the name of a field of `c` that is set, or nullptr. Compares field by field, because with
// 32-bit pointers the struct has padding.
const char* name_of_set_field(logitless_op c) {
  for (int32_t kind = 0; kind < kinds; ++kind) {
    for (const TensorField& field : tensor_fields(kind)) {
      if (tensor_of(c, field) != nullptr) return field.name;
    }
  }
  if (c.options != nullptr) return "options";
  if (c.divergence != nullptr) return "divergence";
  if (c.kept_key != 0) return "kept_key";
  if (c.consume_kept != 0) return "consume_kept";
  if (c.accumulate_grad_weight != 0) return "accumulate_grad_weight";
  if (c.only_chosen != 0) return "only_chosen";
  if (c.grad_input_first != 0) return "grad_input_first";
  const bool reserved = c.reserved != 0 || c.reserved_2 != 0;
  return reserved ? "reserved" : nullptr;
}

Status from_c(const logitless_op* source, const Execution& execution, Call* call) {
  logitless_op c;
  Status status = read_struct("op", source, &c);
  if (!status.ok()) return status;
  if (c.kind < 0 || c.kind >= kinds) return unknown_op(c.kind);
  *call = Call(c.kind, execution);
  if (call->loss_op) {
    status = from_c(c.options, &call->options);
    c.options = nullptr;
  }
  if (call->diverges) {
    if (status.ok()) status = from_c(c.divergence, &call->divergence);
    c.divergence = nullptr;
  }
  if (call->linear && call->gradients) {
    call->accumulate = c.accumulate_grad_weight != 0;
    c.accumulate_grad_weight = 0;
  }
  const bool consumes = call->kind == LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD;
  if (consumes || call->kind == LOGITLESS_LINEAR_DIVERGENCE_BACKWARD) {
    call->kept_key = c.kept_key;
    call->grad_input_first = c.grad_input_first != 0;
    c.kept_key = 0, c.grad_input_first = 0;
  }
  if (consumes) {
    call->consume_kept = c.consume_kept != 0;
    call->only_chosen = c.only_chosen != 0;
    c.consume_kept = c.only_chosen = 0;
  }
  for (const TensorField& field : tensor_fields(c.kind)) {
    const logitless_tensor*& tensor = tensor_of(c, field);
    if (status.ok() && tensor != nullptr) {
      TensorView view;
      status = from_c(field.name, tensor, &view);
      tensor_at(*call, field) = view;
    }
    tensor = nullptr;
  }
  if (!status.ok()) return status;
  // The fields of this op were cleared above; what is set now belongs to other ops.
  if (const char* name = name_of_set_field(c); name != nullptr) {
    return error(StatusCode::invalid_argument, "%s is set; %s does not have it", name,
                 call->op_name());
  }
  return {};
}

Status check_plan(const logitless_plan* plan) {
  if (plan != nullptr) return {};
  return error(StatusCode::invalid_argument, "plan is NULL; allowed: one of logitless_plan_create");
}

}  // namespace
}  // namespace logitless

struct logitless_plan : logitless::PlannedCall {};

using namespace logitless;

extern "C" {

int32_t logitless_workspace(const logitless_op* op, const logitless_execution* execution,
                            logitless_workspace_size* size, logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Execution e;
    Executor executor;
    WorkspaceSize s;
    logitless_workspace_size before;
    Status result = read_struct("size", size, &before);
    if (result.ok()) result = from_c(execution, &e, &executor);
    Call call;
    if (result.ok()) result = from_c(op, e, &call);
    if (result.ok()) result = ask_workspace(call, &s);
    if (result.ok())
      write_struct({sizeof(logitless_workspace_size), 0, s.minimum, s.recommended, s.alignment},
                   size);
    return result;
  });
  return report(result, status);
}

int32_t logitless_kept_size(const logitless_op* op, const logitless_execution* execution,
                            uint64_t bytes, logitless_kept* kept, logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Execution e;
    Executor executor;
    logitless_kept before;
    Status result = read_struct("kept", kept, &before);
    if (result.ok()) result = from_c(execution, &e, &executor);
    Call call;
    if (result.ok()) result = from_c(op, e, &call);
    if (result.ok()) result = validate_keeping(call);
    if (!result.ok()) return result;
    const Kept k = kept_in(call, bytes);
    write_struct({sizeof(logitless_kept),
                  0,
                  k.columns,
                  {k.shape[0], k.shape[1]},
                  {k.rows_shape[0], k.rows_shape[1]},
                  k.bytes,
                  k.key},
                 kept);
    return {};
  });
  return report(result, status);
}

int32_t logitless_run(const logitless_op* op, const logitless_workspace_buffer* workspace,
                      const logitless_execution* execution, logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Execution e;
    Executor executor;
    Workspace w;
    Status result = from_c(execution, &e, &executor);
    if (result.ok()) result = from_c(workspace, &w);
    Call call;
    if (result.ok()) result = from_c(op, e, &call);
    return result.ok() ? run(call, w) : result;
  });
  return report(result, status);
}

int32_t logitless_scale(const logitless_tensor* values, const logitless_tensor* factor,
                        const logitless_execution* execution, logitless_status* status) {
  return logitless_scale_each(&values, 1, factor, execution, status);
}

int32_t logitless_scale_each(const logitless_tensor* const* values, int32_t count,
                             const logitless_tensor* factor, const logitless_execution* execution,
                             logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Execution e;
    Executor executor;
    TensorView views[most_scaled], f;
    Status result = from_c(execution, &e, &executor);
    if (result.ok()) result = from_c("values", values, count, {0, most_scaled}, views);
    if (result.ok()) result = from_c("factor", factor, &f);
    return result.ok() ? scale_values({views, static_cast<size_t>(count)}, f, e) : result;
  });
  return report(result, status);
}

int32_t logitless_add(const logitless_tensor* const* parts, int32_t count,
                      const logitless_tensor* sum, const logitless_execution* execution,
                      logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Execution e;
    Executor executor;
    TensorView views[most_added], s;
    Status result = from_c(execution, &e, &executor);
    if (result.ok()) result = from_c("parts", parts, count, {1, most_added}, views);
    if (result.ok()) result = from_c("sum", sum, &s);
    return result.ok() ? add_values({views, static_cast<size_t>(count)}, s, e) : result;
  });
  return report(result, status);
}

int32_t logitless_version(void) { return LOGITLESS_VERSION; }

int32_t logitless_describe_backend(int32_t device_type, char* text, size_t bytes,
                                   logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    if (text == nullptr && bytes > 0) {
      return error(StatusCode::invalid_argument, "text is NULL with %zu bytes", bytes);
    }
    if (bytes > 0) text[0] = 0;
    Status result;
    const Backend* backend = find_backend(static_cast<DeviceType>(device_type), &result);
    return backend != nullptr ? backend->describe(text, bytes) : result;
  });
  return report(result, status);
}

int32_t logitless_warmup(const logitless_execution* execution, logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Execution e;
    Executor executor;
    Status result = from_c(execution, &e, &executor);
    if (!result.ok()) return result;
    const Backend* backend = find_backend(e.device.type, &result);
    if (result.ok()) result = validate(e);
    return result.ok() ? backend->warmup(e) : result;
  });
  return report(result, status);
}

int32_t logitless_set_num_threads(int32_t num_threads) {
  int32_t in_force = 1;
  const Status status = guarded([&]() -> Status {
    in_force = cpu::set_num_threads(num_threads > 0 ? num_threads : 0);
    return {};
  });
  return status.ok() ? in_force : logitless_num_threads();
}

int32_t logitless_num_threads(void) {
  int32_t in_force = 1;
  const Status status = guarded([&]() -> Status {
    in_force = cpu::num_threads();
    return {};
  });
  return status.ok() ? in_force : 1;
}

int32_t logitless_plan_create(const logitless_op* op, const logitless_execution* execution,
                              uint64_t bytes, logitless_plan** plan, logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Execution e;
    Executor executor;
    Call call;
    Status result = plan == nullptr ? error(StatusCode::invalid_argument, "plan is NULL")
                                    : from_c(execution, &e, &executor);
    if (result.ok()) result = from_c(op, e, &call);
    if (!result.ok()) return result;
    auto made = std::make_unique<logitless_plan>();
    result = made->create(call, bytes);
    if (result.ok()) *plan = made.release();
    return result;
  });
  return report(result, status);
}

int32_t logitless_plan_size(const logitless_plan* plan, logitless_workspace_size* size,
                            logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    logitless_workspace_size before;
    Status result = read_struct("size", size, &before);
    if (result.ok()) result = check_plan(plan);
    if (!result.ok()) return result;
    const WorkspaceSize s = plan->size();
    write_struct({sizeof(logitless_workspace_size), 0, s.minimum, s.recommended, s.alignment},
                 size);
    return {};
  });
  return report(result, status);
}

int32_t logitless_plan_run(const logitless_plan* plan, const logitless_plan_arguments* arguments,
                           const logitless_workspace_buffer* workspace, logitless_status* status) {
  const Status result = guarded([&]() -> Status {
    Workspace w;
    logitless_plan_arguments a;
    Status result = check_plan(plan);
    if (result.ok()) result = read_struct("arguments", arguments, &a);
    if (result.ok() && a.reserved != 0) {
      result =
          error(StatusCode::invalid_argument, "arguments.reserved is %d; allowed: 0", a.reserved);
    }
    if (result.ok() && a.count > 0 && a.addresses == nullptr) {
      result = error(StatusCode::invalid_argument, "arguments.addresses is NULL");
    }
    if (result.ok()) result = from_c(workspace, &w);
    if (!result.ok()) return result;
    return plan->run({a.addresses, a.count}, w, a.stream, a.normalizer, a.part);
  });
  return report(result, status);
}

void logitless_plan_destroy(logitless_plan* plan) { delete plan; }

int32_t logitless_keeps(int32_t device_type, int32_t dtype, const logitless_loss_options* options) {
  LossOptions o;
  const bool known = dtype == LOGITLESS_F32 || dtype == LOGITLESS_F16 || dtype == LOGITLESS_BF16;
  return known && from_c(options, &o).ok() &&
         keeps(static_cast<DeviceType>(device_type), static_cast<DType>(dtype), o);
}

}  // extern "C"
