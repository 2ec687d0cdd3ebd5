// SPDX-License-Identifier: Apache-2.0
// XLA's custom calls to every op end here: the call frame's buffers and attributes become a
// logitless_op, and logitless_run is called. One handler serves all platforms. Its attributes:
//   device_type, kind       s32, as in c.h
//   fields                  text: the names of the op's tensors, arguments then results, a space
//                           between two; "-" for a result that is an argument's memory
//   only_chosen             s32, as in c.h; 0 where it is not given
//   workspace_bytes         s64: of the last result, which no field names; it holds `alignment`
//   alignment               bytes more, so that the workspace can start at a multiple of it
//   options of logitless_loss_options and logitless_divergence_options: see scalar_attributes
#include <array>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>

#include "logitless/fields.h"
#include "logitless/status.h"
#include "src/call.h"
#include "src/message.h"
#include "src/xla/ffi.h"

namespace logitless::xla {
namespace {

struct Request {
  int32_t device_type = -1, kind = -1, only_chosen = 0;
  int64_t workspace_bytes = 0, alignment = 1;
  std::string_view fields;
  logitless_loss_options options = LOGITLESS_LOSS_OPTIONS_INIT;
  logitless_divergence_options divergence = LOGITLESS_DIVERGENCE_OPTIONS_INIT;
  bool has_options = false, has_divergence = false;
};

struct ScalarAttribute {
  std::string_view name;
  int dtype;
  size_t bytes, offset;  // `offset` of the member in Request
};

#define LOGITLESS_ATTRIBUTE(type, bytes, field) \
  ScalarAttribute { #field, type, bytes, offsetof(Request, field) }
#define LOGITLESS_OPTION(type, bytes, field) \
  ScalarAttribute { #field, type, bytes, offsetof(Request, options.field) }
#define LOGITLESS_DIVERGENCE(type, bytes, name, field) \
  ScalarAttribute { name, type, bytes, offsetof(Request, divergence.field) }
constexpr size_t first_option = 5, first_of_divergence = 17;
constexpr std::array scalar_attributes = {
    LOGITLESS_ATTRIBUTE(type_s32, 4, device_type),
    LOGITLESS_ATTRIBUTE(type_s32, 4, kind),
    LOGITLESS_ATTRIBUTE(type_s64, 8, workspace_bytes),
    LOGITLESS_ATTRIBUTE(type_s64, 8, alignment),
    LOGITLESS_ATTRIBUTE(type_s32, 4, only_chosen),
    LOGITLESS_OPTION(type_s32, 4, reduction),
    LOGITLESS_OPTION(type_s64, 8, ignore_index),
    LOGITLESS_OPTION(type_f32, 4, label_smoothing),
    LOGITLESS_OPTION(type_f32, 4, z_loss),
    LOGITLESS_OPTION(type_f32, 4, logit_scale),
    LOGITLESS_OPTION(type_f32, 4, softcap),
    LOGITLESS_OPTION(type_f32, 4, temperature),
    LOGITLESS_OPTION(type_s32, 4, empty_mean),
    LOGITLESS_OPTION(type_s32, 4, allow_tf32),
    LOGITLESS_OPTION(type_f64, 8, normalizer),
    LOGITLESS_OPTION(type_s64, 8, vocab_start),
    LOGITLESS_OPTION(type_s64, 8, vocab_total),
    LOGITLESS_DIVERGENCE(type_s32, 4, "divergence", kind),
    LOGITLESS_DIVERGENCE(type_f32, 4, "beta", beta),
    LOGITLESS_DIVERGENCE(type_f32, 4, "label_weight", label_weight),
    LOGITLESS_DIVERGENCE(type_f32, 4, "teacher_logit_scale", teacher_logit_scale),
    LOGITLESS_DIVERGENCE(type_f32, 4, "teacher_softcap", teacher_softcap),
    LOGITLESS_DIVERGENCE(type_f32, 4, "teacher_temperature", teacher_temperature)};
static_assert(scalar_attributes[first_option].name == "reduction");
static_assert(scalar_attributes[first_of_divergence].name == "divergence");
#undef LOGITLESS_ATTRIBUTE
#undef LOGITLESS_OPTION
#undef LOGITLESS_DIVERGENCE

Status read_attribute(std::string_view name, int kind, const void* value, Request* call) {
  if (name == "fields" && kind == attribute_text) {
    const Text& text = *static_cast<const Text*>(value);
    call->fields = {text.data, text.size};
    return {};
  }
  for (size_t i = 0; i < scalar_attributes.size(); ++i) {
    const ScalarAttribute& known = scalar_attributes[i];
    if (known.name != name || kind != attribute_scalar) continue;
    const Scalar& scalar = *static_cast<const Scalar*>(value);
    if (scalar.dtype != known.dtype) break;
    std::memcpy(reinterpret_cast<char*>(call) + known.offset, scalar.value, known.bytes);
    call->has_options |= i >= first_option && i < first_of_divergence;
    call->has_divergence |= i >= first_of_divergence;
    return {};
  }
  return error(StatusCode::internal, "xla: attribute %.*s is not known, or of another type",
               static_cast<int>(name.size()), name.data());
}

Status read_attributes(const Attributes& given, Request* call) {
  Status status;
  for (int64_t i = 0; i < given.size && status.ok(); ++i) {
    const Text& name = *given.names[i];
    status = read_attribute({name.data, name.size}, given.kinds[i], given.values[i], call);
  }
  return status;
}

// Finds the op's field of that name, which is the same member for every kind of op.
const logitless_tensor** find_field(std::string_view name, logitless_op* c) {
  for (int32_t kind = 0; kind < kinds; ++kind) {
    for (const TensorField& field : tensor_fields(kind)) {
      if (name != field.name) continue;
      return reinterpret_cast<const logitless_tensor**>(reinterpret_cast<char*>(c) + field.in_c);
    }
  }
  return nullptr;
}

// XLA's own name of an element type.
std::string name_of_type(int type) {
  constexpr const char* names[] = {"",    "pred", "s8",  "s16", "s32", "s64", "u8",  "u16", "u32",
                                   "u64", "f16",  "f32", "f64", "",    "",    "c64", "bf16"};
  const bool named = type >= 0 && type < static_cast<int>(std::size(names)) && *names[type] != 0;
  return named ? names[type] : "of element type " + std::to_string(type);
}

int32_t dtype_of(int type) {
  switch (type) {
    case type_f32:
      return LOGITLESS_F32;
    case type_f16:
      return LOGITLESS_F16;
    case type_bf16:
      return LOGITLESS_BF16;
    case type_s32:
      return LOGITLESS_I32;
    case type_s64:
      return LOGITLESS_I64;
  }
  return -1;
}

// Reads a dense row-major buffer, XLA's default for custom calls. All dimensions but the last are
// merged, so that JAX need not reshape arrays to the op's ranks.
Status read_buffer(std::string_view name, const Buffer& buffer, int32_t device_type,
                   int32_t device_index, logitless_tensor* tensor) {
  const int length = static_cast<int>(name.size());
  const int32_t dtype = dtype_of(buffer.dtype);
  if (dtype < 0) {
    return error(StatusCode::wrong_dtype, "xla: %.*s is %s; allowed: f32, f16, bf16, s32, s64",
                 length, name.data(), name_of_type(buffer.dtype).c_str());
  }
  if (buffer.rank < 0) {
    return error(StatusCode::wrong_shape, "xla: %.*s has rank %lld; allowed: >= 0", length,
                 name.data(), static_cast<long long>(buffer.rank));
  }
  *tensor = LOGITLESS_TENSOR_INIT;
  tensor->dtype = dtype;
  tensor->data = buffer.data;
  tensor->device_type = device_type;
  tensor->device_index = device_index;
  tensor->rank = static_cast<int32_t>(buffer.rank < 2 ? buffer.rank : 2);
  if (tensor->rank == 0) return {};
  const int64_t columns = buffer.shape[buffer.rank - 1];
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < buffer.rank; ++d) rows *= buffer.shape[d];
  const size_t last = static_cast<size_t>(tensor->rank - 1);
  tensor->shape[0] = rows, tensor->stride[0] = columns;
  tensor->shape[last] = columns, tensor->stride[last] = 1;
  return {};
}

// Reads the workspace from the last result. It is cut to exactly the planned bytes, since their
// number decides the plan, and the plan decides the result's bits.
Status read_workspace(const Buffer& buffer, const Request& call, logitless_workspace_buffer* to) {
  const int64_t bytes = call.workspace_bytes, alignment = call.alignment;
  if (buffer.dtype != type_u8 || buffer.rank != 1 || bytes < 0 || alignment < 1 ||
      buffer.shape[0] < alignment || buffer.shape[0] - alignment < bytes) {
    return error(StatusCode::internal, "xla: the last result is no workspace of %lld bytes",
                 static_cast<long long>(bytes));
  }
  const uint64_t past = reinterpret_cast<uintptr_t>(buffer.data) % static_cast<uint64_t>(alignment);
  to->data = buffer.data;
  to->byte_offset = past == 0 ? 0 : static_cast<uint64_t>(alignment) - past;
  to->bytes = static_cast<uint64_t>(bytes);
  return {};
}

constexpr size_t most_tensors = 32;

// Reads every buffer into its field of `op`, held in `tensors`, and the last result as the
// workspace.
Status read_buffers(const CallFrame& frame, const Request& call, int32_t device_index,
                    std::array<logitless_tensor, most_tensors>* tensors, logitless_op* op,
                    logitless_workspace_buffer* workspace) {
  const int64_t arguments = frame.arguments.size, count = arguments + frame.results.size;
  if (frame.results.size < 1 || count > static_cast<int64_t>(most_tensors)) {
    return error(StatusCode::internal, "xla: %lld buffers", static_cast<long long>(count));
  }
  std::string_view names = call.fields;
  for (int64_t i = 0; i < count; ++i) {
    const Values& values = i < arguments ? frame.arguments : frame.results;
    const int64_t at = i < arguments ? i : i - arguments;
    if (values.kinds[at] != kind_buffer) {
      return error(StatusCode::internal, "xla: buffer %lld is none", static_cast<long long>(i));
    }
    const Buffer& buffer = *static_cast<const Buffer*>(values.values[at]);
    if (i == count - 1) {
      if (names.empty()) return read_workspace(buffer, call, workspace);
      break;
    }
    const std::string_view name = names.substr(0, names.find(' '));
    names.remove_prefix(name.size() < names.size() ? name.size() + 1 : name.size());
    if (name == "-") continue;
    const logitless_tensor** field = find_field(name, op);
    if (field == nullptr || *field != nullptr) break;
    logitless_tensor& tensor = (*tensors)[static_cast<size_t>(i)];
    const Status status = read_buffer(name, buffer, call.device_type, device_index, &tensor);
    if (!status.ok()) return status;
    *field = &tensor;
  }
  return error(StatusCode::internal, "xla: fields \"%.*s\" do not name %lld buffers",
               static_cast<int>(call.fields.size()), call.fields.data(),
               static_cast<long long>(count));
}

// Returns the Forward op whose kept state this Backward reads. The key does not depend on the
// teacher, but the op must have one: a logits tensor without memory.
logitless_op forward_of(const logitless_op& op, logitless_tensor* teacher) {
  const bool diverges = op.kind == LOGITLESS_LINEAR_DIVERGENCE_BACKWARD;
  logitless_op forward = LOGITLESS_OP_INIT(diverges ? LOGITLESS_LINEAR_DIVERGENCE_FORWARD
                                                    : LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD);
  forward.options = op.options, forward.divergence = op.divergence;
  forward.input = op.input, forward.weight = op.weight;
  forward.bias = op.bias, forward.target = op.target;
  forward.temperature = op.temperature;
  if (!diverges || op.input == nullptr || op.weight == nullptr) return forward;
  *teacher = *op.input;
  teacher->data = nullptr;
  teacher->shape[1] = teacher->stride[0] = op.weight->shape[0];
  forward.teacher_logits = teacher;
  return forward;
}

// Sets Backward's kept_key. The key depends on the device, which is unknown when JAX compiles a
// program for several platforms. A loss's Backward may overwrite the kept state: its buffers are
// also results, so XLA has copied whatever it needs later. A divergence's Backward leaves it
// unchanged.
void take_kept(const logitless_execution& execution, logitless_op* op, Status* status) {
  const bool of_loss = op->kind == LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD;
  if (!of_loss && op->kind != LOGITLESS_LINEAR_DIVERGENCE_BACKWARD) return;
  if (op->kept == nullptr || op->kept_rows == nullptr) return;
  logitless_tensor teacher;
  const logitless_op forward = forward_of(*op, &teacher);
  const int64_t element = op->kept->dtype == LOGITLESS_F32 ? 4 : 2;
  const int64_t of_rows = 4 * op->kept_rows->shape[0] * op->kept_rows->shape[1];
  logitless_kept kept = LOGITLESS_KEPT_INIT;
  logitless_kept_size(
      &forward, &execution,
      static_cast<uint64_t>(op->kept->shape[0] * op->kept->shape[1] * element + of_rows), &kept,
      status->c());
  op->kept_key = kept.key;
  op->consume_kept = of_loss ? 1 : 0;
}

Error* run(const CallFrame& frame, Status* status) {
  Request call;
  *status = read_attributes(frame.attributes, &call);
  if (!status->ok()) return nullptr;
  logitless_execution execution = LOGITLESS_EXECUTION_INIT;
  execution.device_type = call.device_type;
  if (call.device_type == LOGITLESS_CUDA) {
    DeviceOrdinalGet device{sizeof(device), nullptr, frame.context, 0};
    if (Error* e = frame.api->device_ordinal_get(&device)) return e;
    StreamGet stream{sizeof(stream), nullptr, frame.context, nullptr};
    if (Error* e = frame.api->stream_get(&stream)) return e;
    execution.device_index = device.ordinal;
    execution.stream = stream.stream;
  }
  std::array<logitless_tensor, most_tensors> tensors;
  logitless_op op = LOGITLESS_OP_INIT(call.kind);
  logitless_workspace_buffer workspace = LOGITLESS_WORKSPACE_BUFFER_INIT;
  *status = read_buffers(frame, call, execution.device_index, &tensors, &op, &workspace);
  if (!status->ok()) return nullptr;
  if (call.has_options) op.options = &call.options;
  if (call.has_divergence) op.divergence = &call.divergence;
  op.only_chosen = call.only_chosen;
  take_kept(execution, &op, status);
  if (!status->ok()) return nullptr;
  logitless_run(&op, &workspace, &execution, status->c());
  return nullptr;
}

int error_code(StatusCode code) {
  switch (code) {
    case StatusCode::target_out_of_range:
      return error_out_of_range;
    case StatusCode::not_supported:
      return error_unimplemented;
    case StatusCode::backend_unavailable:
      return error_unavailable;
    case StatusCode::device_error:
    case StatusCode::internal:
      return error_internal;
    default:
      return error_invalid_argument;
  }
}

// Before its first call XLA queries the handler's version.
bool answered_metadata(const CallFrame& frame) {
  if (frame.extension == nullptr || frame.extension->type != extension_metadata) return false;
  Metadata* metadata = reinterpret_cast<MetadataExtension*>(frame.extension)->metadata;
  metadata->version = {sizeof(Version), nullptr, version_major, version_minor};
  metadata->traits = 0;
  return true;
}

}  // namespace
}  // namespace logitless::xla

extern "C" void* logitless_xla_run(void* call_frame) {
  using namespace logitless::xla;
  const CallFrame& frame = *static_cast<const CallFrame*>(call_frame);
  if (answered_metadata(frame) || frame.stage != stage_execute) return nullptr;
  logitless::Status status;
  if (Error* e = run(frame, &status)) return e;
  if (status.ok()) return nullptr;
  ErrorCreate create{sizeof(create), nullptr, status.message(), error_code(status.code())};
  return frame.api->error_create(&create);
}
