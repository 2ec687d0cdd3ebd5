// SPDX-License-Identifier: Apache-2.0
// The rules of docs/semantics.md that need only the op, in one table in the order in which they are
// checked. validate_data.cpp has those about memory.
#include "src/validate.h"

#include <algorithm>

#include "src/kept.h"
#include "src/message.h"
#include "src/rules.h"

namespace logitless {

Status unknown_device(int32_t type) {
  return error(StatusCode::unknown_enum,
               "execution.device.type is %d; allowed: cpu, cuda, webgpu, reference", type);
}

Status unknown_op(int32_t kind) {
  return error(StatusCode::unknown_enum,
               "op.kind is %d; allowed: Softmax, Combine, and CrossEntropy, LinearCrossEntropy and "
               "LinearDivergence with Forward, Backward or ForwardBackward",
               kind);
}

Status validate(const Execution& execution) {
  const Device device = execution.device;
  if (!known(device.type)) return unknown_device(static_cast<int32_t>(device.type));
  const bool host = device.type == DeviceType::cpu || device.type == DeviceType::reference;
  if (device.index < 0 || (host && device.index != 0)) {
    return error(StatusCode::wrong_device, "execution.device.index is %d; allowed: %s",
                 device.index, host ? "0" : ">= 0");
  }
  return {};
}

namespace {

Status check_execution(const Call& call) { return validate(call.execution); }

Status check_required(const Call& call) {
  for (const char* name : {"input", "weight", "logits", "probabilities", "target", "grad_logits",
                           "shard_row_reference", "shard_row_log_sum", "shard_target_logit"}) {
    for (const Field& field : call.fields()) {
      if (call.diverges && field.name == "target") continue;
      if (field.name == name && !field.given()) {
        return error(StatusCode::invalid_argument, "%s is missing; %s needs it", name,
                     call.op_name());
      }
    }
  }
  return {};
}

// ForwardBackward's loss is optional, since its gradients may be all that is wanted.
Status check_outputs(const Call& call) {
  if (call.linear && call.gradients && !call["grad_input"] && !call["grad_weight"] &&
      !call["grad_bias"]) {
    return error(StatusCode::invalid_argument,
                 "grad_input, grad_weight and grad_bias are missing; %s needs at least one",
                 call.op_name());
  }
  if (!call.forward || call.gradients) return {};
  for (const Field& field : call.fields()) {
    if (field.access == Access::write && field.given()) return {};
  }
  return error(StatusCode::invalid_argument,
               "loss is missing, and so is every statistic; %s needs at least one", call.op_name());
}

Status check_companions(const Call& call) {
  if (call.forward) return {};
  const bool reference = static_cast<bool>(call["row_reference"]);
  if (reference != static_cast<bool>(call["row_log_sum"])) {
    return error(StatusCode::invalid_argument, "%s is given without %s; allowed: both or neither",
                 reference ? "row_reference" : "row_log_sum",
                 reference ? "row_log_sum" : "row_reference");
  }
  if (call["grad_entropy"] && !call["entropy"]) {
    return error(StatusCode::invalid_argument, "entropy is missing; grad_entropy needs it");
  }
  return {};
}

// Chosen columns need both ids and the tensor that is read or written at them.
Status check_chosen(const Call& call) {
  const char* at = call.forward ? "logits_at" : "grad_logits_at";
  const bool ids = static_cast<bool>(call["ids"]);
  if (call["id_offsets"] && !ids) {
    return error(StatusCode::invalid_argument, "ids is missing; id_offsets needs it");
  }
  if (ids == static_cast<bool>(call[at])) return {};
  return error(StatusCode::invalid_argument, "%s is given without %s; allowed: both or neither",
               ids ? "ids" : at, ids ? at : "ids");
}

// Top-k needs both values and ids, and in Combine those of the shards too.
Status check_listed(const Call& call) {
  const char* first = "top_logits";
  for (const char* name : {"top_ids", "shard_top_logits", "shard_top_ids"}) {
    if (!call.combines && name[0] == 's') continue;
    const bool given = static_cast<bool>(call[name]);
    if (given == static_cast<bool>(call[first])) continue;
    return error(
        StatusCode::invalid_argument, "%s is given without %s; allowed: %s", given ? name : first,
        given ? first : name,
        call.combines ? "all of top_logits, top_ids and the shards', or none" : "both or neither");
  }
  if (!call.top_logits || !call.kept) return {};
  return error(StatusCode::invalid_argument,
               "top_logits is given beside kept; allowed: one of them");
}

// With only_chosen nothing may be given that only other gradients use.
Status check_only_chosen(const Call& call) {
  if (!call.only_chosen) return {};
  if (!call.grad_logits_at) {
    return error(StatusCode::invalid_argument, "grad_logits_at is missing; only_chosen needs it");
  }
  for (const char* name :
       {"grad_loss", "grad_lse", "grad_target_logit", "grad_entropy", "entropy", "row_reference",
        "row_log_sum", "kept", "token_weight", "vocab_weight", "normalizer"}) {
    if (!call[name]) continue;
    return error(StatusCode::invalid_argument,
                 "%s is given with only_chosen; allowed: no gradient but grad_logits_at, no "
                 "weights and no state of the rows",
                 name);
  }
  const struct {
    const char* name;
    double value;
  } options[] = {{"label_smoothing", call.options.label_smoothing},
                 {"z_loss", call.options.z_loss},
                 {"options.normalizer", call.options.normalizer}};
  for (const auto& option : options) {
    if (option.value == 0) continue;
    return error(StatusCode::invalid_argument, "%s is %g with only_chosen; allowed: 0", option.name,
                 option.value);
  }
  return {};
}

Text key_text(uint64_t key) {
  Text out{};
  std::snprintf(out.text, sizeof(out.text), "%#llx", static_cast<unsigned long long>(key));
  return out;
}

}  // namespace

// kept and kept_rows go together; Backward needs further tensors with them.
Status check_kept(const Call& call) {
  const bool kept = static_cast<bool>(call["kept"]);
  if (kept != static_cast<bool>(call["kept_rows"])) {
    return error(StatusCode::invalid_argument, "%s is given without %s; allowed: both or neither",
                 kept ? "kept" : "kept_rows", kept ? "kept_rows" : "kept");
  }
  if (call.forward) return {};
  if (!kept && call.consume_kept) {
    return error(StatusCode::invalid_argument, "consume_kept is 1 without kept; allowed: 0");
  }
  if (!kept && call.kept_key != 0) {
    return error(StatusCode::invalid_argument, "kept_key is %s without kept; allowed: 0",
                 key_text(call.kept_key).text);
  }
  if (kept && !call.diverges && !call["row_reference"]) {
    return error(StatusCode::invalid_argument,
                 "row_reference and row_log_sum are missing; kept needs those of its Forward");
  }
  return {};
}

// Shapes and options are valid by now, so the key can be computed.
Status check_kept_key(const Call& call) {
  if (!call["kept"]) return {};
  for (const char* name : {"kept", "kept_rows"}) {
    const TensorView& v = call[name];
    if (v.shape[0] == 0 || (v.stride[0] == v.shape[1] && v.stride[1] == 1)) continue;
    return error(StatusCode::invalid_argument,
                 "%s has strides [%lld, %lld]; allowed: [%lld, 1], dense rows", name,
                 static_cast<long long>(v.stride[0]), static_cast<long long>(v.stride[1]),
                 static_cast<long long>(v.shape[1]));
  }
  if (call["kept"].dtype != call["input"].dtype) {
    return error(StatusCode::wrong_dtype, "kept is %s; allowed: %s, the dtype of input",
                 name_of(call["kept"].dtype), name_of(call["input"].dtype));
  }
  const uint64_t key = kept_key(call, kept_columns(call));
  if (call.forward || call.kept_key == key) return {};
  return error(StatusCode::invalid_argument,
               "kept_key is %s; allowed: %s, what logitless_kept_size says of a Forward of this "
               "shape, device, dtype and options",
               key_text(call.kept_key).text, key_text(key).text);
}

namespace {

Status check_empty(const Call& call) {
  for (const char* name : {"input", "teacher_input"}) {
    if (!call[name] || call[name].shape[1] > 0) continue;
    return error(StatusCode::invalid_argument, "%s has shape %s; allowed: D >= 1", name,
                 shape_text(call[name]).text);
  }
  if (call.combines) {
    if (call.shards() > 0) return {};
    return error(StatusCode::invalid_argument, "shard_row_reference has shape %s; allowed: P >= 1",
                 shape_text(call.rows()).text);
  }
  if (call.vocab() == 0 && call.tokens() > 0) {
    return error(StatusCode::invalid_argument,
                 "%s has shape %s with N = %lld; allowed: V >= 1 where N > 0",
                 call.linear ? "weight" : "logits",
                 shape_text(call.linear ? call["weight"] : call.rows()).text,
                 static_cast<long long>(call.tokens()));
  }
  return {};
}

// The width of ids defines K, so only its range can be wrong.
Status check_chosen_count(const Call& call) {
  if (!call.ids || call.lists() || (call.chosen() >= 1 && call.chosen() <= most_chosen)) return {};
  return error(StatusCode::wrong_shape, "ids has shape %s; allowed: [%lld, K], K from 1 to %lld",
               shape_text(call.ids).text, static_cast<long long>(call.tokens()),
               static_cast<long long>(most_chosen));
}

// The width of the lists defines k, so only its range can be wrong.
Status check_listed_count(const Call& call) {
  const int64_t columns = call.vocab_total();  // 0 only if there is no token
  const int64_t most = columns > 0 ? std::min(columns, most_listed) : most_listed;
  if (!call.top_logits || (call.listed() >= 1 && call.listed() <= most)) return {};
  return error(StatusCode::wrong_shape,
               "top_logits has shape %s; allowed: [%lld, k], k from 1 to %lld, the least of the "
               "vocabulary and %lld",
               shape_text(call.top_logits).text, static_cast<long long>(call.tokens()),
               static_cast<long long>(most), static_cast<long long>(most_listed));
}

Status check_dtype_pairs(const Call& call) {
  if (call.linear) {
    const DType dtype = call["input"].dtype;
    for (const std::string_view name :
         {"weight", "bias", "teacher_input", "teacher_weight", "teacher_bias"}) {
      const TensorView& v = call[name];
      if (!v || v.dtype == dtype) continue;
      if (!name.ends_with("bias")) {
        return error(StatusCode::wrong_dtype, "%s is %s; allowed: %s, the dtype of input",
                     name.data(), name_of(v.dtype), name_of(dtype));
      }
      if (v.dtype == DType::f32) continue;
      return error(StatusCode::wrong_dtype, "%s is %s; allowed: f32%s%s", name.data(),
                   name_of(v.dtype), dtype == DType::f32 ? "" : ", ",
                   dtype == DType::f32 ? "" : name_of(dtype));
    }
  }
  for (const char* name : {"argmax", "rank", "shard_argmax", "top_ids", "shard_top_ids"}) {
    if (call[name].dtype == DType::i32 && call.vocab_total() > INT32_MAX) {
      return error(StatusCode::wrong_dtype, "%s is i32; allowed: i64 where V = %lld", name,
                   static_cast<long long>(call.vocab_total()));
    }
  }
  return {};
}

Status check_accumulate(const Call& call) {
  if (!call.accumulate) return {};
  for (const char* name : {"grad_weight", "grad_bias"}) {
    const TensorView& v = call[name];
    if (v && v.dtype != DType::f32) {
      return error(StatusCode::wrong_dtype, "%s is %s; allowed with accumulate_grad_weight: f32",
                   name, name_of(v.dtype));
    }
  }
  return {};
}

// Plans multiply these products by element sizes and small counts in 64 bits. Broadcast views can
// have such sizes without the memory.
Status check_products(const Call& call) {
  constexpr int64_t most = int64_t{1} << 56;
  const int64_t n = call.tokens(), v = call.vocab_total();
  const int64_t d = call.linear ? call.hidden() : call.combines ? call.shards() : 1;
  const auto fits = [](int64_t a, int64_t b) { return b == 0 || a <= most / b; };
  if (!fits(n, call.chosen())) {
    return error(StatusCode::invalid_argument,
                 "ids: N = %lld, K = %lld; allowed: no product of two above 2^56",
                 static_cast<long long>(n), static_cast<long long>(call.chosen()));
  }
  if (!fits(n, call.listed()) || (call.combines && !fits(n * call.listed(), call.shards()))) {
    return error(StatusCode::invalid_argument,
                 "top_logits: N = %lld, k = %lld; allowed: no product of two above 2^56",
                 static_cast<long long>(n), static_cast<long long>(call.listed()));
  }
  if (call.lists() && call.all_chosen() > most) {
    return error(StatusCode::invalid_argument, "ids: M = %lld; allowed: up to 2^56",
                 static_cast<long long>(call.all_chosen()));
  }
  const int64_t of_teacher = call.teacher_input ? call.teacher_input.shape[1] : 0;
  if (!fits(n, of_teacher) || !fits(v, of_teacher)) {
    return error(StatusCode::invalid_argument,
                 "%s: N = %lld, V = %lld, D = %lld; allowed: no product of two above 2^56",
                 call.shard() ? "vocab_total" : "teacher_weight", static_cast<long long>(n),
                 static_cast<long long>(v), static_cast<long long>(of_teacher));
  }
  if (fits(n, v) && fits(n, d) && fits(v, d)) return {};
  return error(StatusCode::invalid_argument,
               "%s: N = %lld, V = %lld, %c = %lld; allowed: no product of two above 2^56",
               call.shard() || call.combines ? "vocab_total"
               : call.linear                 ? "weight"
                                             : "logits",
               static_cast<long long>(n), static_cast<long long>(v), call.combines ? 'P' : 'D',
               static_cast<long long>(d));
}

// Checked in this order; a rule may rely on those above it.
// clang-format off
constexpr Status (*kRules[])(const Call&) = {
    check_execution,
    check_tensor_enums,
    check_option_enums,
    check_option_ranges,
    check_divergence_options,
    check_required,
    check_outputs,
    check_companions,
    check_kept,
    check_chosen,
    check_listed,
    check_only_chosen,
    check_teacher,
    check_divergence_states,
    check_devices,
    check_ranks,
    check_nonnegative,
    check_normalizer,
    check_temperature,
    check_empty,
    check_chosen_count,
    check_combine,
    check_shard_range,
    check_listed_count,
    check_products,
    check_shapes,
    check_dtypes,
    check_dtype_pairs,
    check_accumulate,
    check_extents,
    check_written_once,
    check_probability_input,
    check_shard_fields,
    check_kept_key,
};
// clang-format on

}  // namespace

Status validate(const Call& call) {
  for (const auto rule : kRules) {
    Status status = rule(call);
    if (!status.ok()) return status;
  }
  return {};
}

Status validate_keeping(const Call& call) {
  if (!call.linear || call.gradients || !call.forward) {
    return error(StatusCode::invalid_argument, "op.kind is %s; allowed: %s, %s", call.op_name(),
                 name_of_op(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD),
                 name_of_op(LOGITLESS_LINEAR_DIVERGENCE_FORWARD));
  }
  for (const auto rule : kRules) {
    if (rule == check_outputs) continue;
    Status status = rule(call);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace logitless
