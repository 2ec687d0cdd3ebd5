// SPDX-License-Identifier: Apache-2.0
// Rules for single fields: rank, shape and dtype, which tables list, and device and strides.
#include <array>
#include <numeric>

#include "src/kept.h"
#include "src/message.h"
#include "src/row/statistics.h"
#include "src/rules.h"

namespace logitless {
namespace {

enum DTypes : uint32_t {  // one bit each
  kF32 = 1u << LOGITLESS_F32,
  kFloats = kF32 | 1u << LOGITLESS_F16 | 1u << LOGITLESS_BF16,
  kI32 = 1u << LOGITLESS_I32,
  kInts = kI32 | 1u << LOGITLESS_I64,
  kF32OrI64 = kF32 | 1u << LOGITLESS_I64,
};

enum class Shape {
  // Of rank 1.
  token,        // [N]
  vocab,        // [V]
  vocab_total,  // [V], or [vocab_total] on a shard
  reduced,      // [N] if the reduction is none, else [] or [1]
  scalar,       // [] or [1]
  one,          // [1]
  token_ends,   // [N + 1]
  // Of rank 1 with id_offsets, else 2.
  token_chosen,  // [N, K], or [M] with id_offsets
  // Of rank 2.
  token_vocab,           // [N, V]
  token_hidden,          // [N, D]
  vocab_hidden,          // [V, D]
  kept,                  // [blocks * rows, 64], rows = N rounded up to 64
  kept_rows,             // [N, 8]
  shard_token,           // [P, N]
  teacher_hidden,        // [N, Dt]
  vocab_teacher_hidden,  // [V, Dt]
  token_listed,          // [N, k]
  shard_listed,          // [P, N k]
};

struct FieldRule {
  std::string_view name;
  Shape shape;
  uint32_t dtypes;
  const char* dtype_names;
};
constexpr FieldRule kFieldRules[] = {
    {"input", Shape::token_hidden, kFloats, "f32, f16, bf16"},
    {"weight", Shape::vocab_hidden, kFloats, "f32, f16, bf16"},
    {"bias", Shape::vocab, kFloats, "f32, f16, bf16"},
    {"logits", Shape::token_vocab, kFloats, "f32, f16, bf16"},
    {"probabilities", Shape::token_vocab, kFloats, "f32, f16, bf16"},
    {"teacher_input", Shape::teacher_hidden, kFloats, "f32, f16, bf16"},
    {"teacher_weight", Shape::vocab_teacher_hidden, kFloats, "f32, f16, bf16"},
    {"teacher_bias", Shape::vocab, kFloats, "f32, f16, bf16"},
    {"teacher_logits", Shape::token_vocab, kFloats, "f32, f16, bf16"},
    {"teacher_temperature", Shape::token, kF32, "f32"},
    {"teacher_entropy", Shape::token, kF32, "f32"},
    {"acceptance", Shape::token, kF32, "f32"},
    {"teacher_row_reference", Shape::token, kF32, "f32"},
    {"teacher_row_log_sum", Shape::token, kF32, "f32"},
    {"divergence_sum", Shape::token, kF32, "f32"},
    {"slope_sum", Shape::token, kF32, "f32"},
    {"slope_mean", Shape::token, kF32, "f32"},
    {"target", Shape::token, kInts, "i32, i64"},
    {"token_weight", Shape::token, kF32, "f32"},
    {"vocab_weight", Shape::vocab_total, kF32, "f32"},
    {"normalizer", Shape::scalar, kF32OrI64, "f32, i64"},
    {"temperature", Shape::token, kF32, "f32"},
    {"loss", Shape::reduced, kF32, "f32"},
    {"grad_loss", Shape::reduced, kF32, "f32"},
    {"grad_lse", Shape::token, kF32, "f32"},
    {"grad_target_logit", Shape::token, kF32, "f32"},
    {"grad_entropy", Shape::token, kF32, "f32"},
    {"anchor", Shape::token, kF32, "f32"},
    {"ids", Shape::token_chosen, kInts, "i32, i64"},
    {"id_offsets", Shape::token_ends, kInts, "i32, i64"},
    {"logits_at", Shape::token_chosen, kF32, "f32"},
    {"grad_logits_at", Shape::token_chosen, kF32, "f32"},
    {"top_logits", Shape::token_listed, kF32, "f32"},
    {"top_ids", Shape::token_listed, kInts, "i32, i64"},
    {"shard_top_logits", Shape::shard_listed, kF32, "f32"},
    {"shard_top_ids", Shape::shard_listed, kInts, "i32, i64"},
    {"kept", Shape::kept, kFloats, "f32, f16, bf16"},
    {"kept_rows", Shape::kept_rows, kF32, "f32"},
    {"grad_logits", Shape::token_vocab, kFloats, "f32, f16, bf16"},
    {"grad_input", Shape::token_hidden, kFloats, "f32, f16, bf16"},
    {"grad_weight", Shape::vocab_hidden, kFloats, "f32, f16, bf16"},
    {"grad_bias", Shape::vocab, kFloats, "f32, f16, bf16"},
    {"fault", Shape::one, kI32, "i32"},
    {"shard_row_reference", Shape::shard_token, kF32, "f32"},
    {"shard_row_log_sum", Shape::shard_token, kF32, "f32"},
    {"shard_target_logit", Shape::shard_token, kF32, "f32"},
};

// Statistics, and Combine's inputs for them, have their own table.
FieldRule rule_of(const Field& field) {
  const bool shards = field.name.starts_with("shard_");
  for (const Statistic& statistic : kStatistics) {
    if ((shards ? statistic.of_shards : statistic.name) != field.name) continue;
    const bool index = statistic.index != nullptr;
    return {field.name, shards ? Shape::shard_token : Shape::token, index ? kInts : kF32,
            index ? "i32, i64" : "f32"};
  }
  for (const FieldRule& rule : kFieldRules) {
    if (rule.name == field.name) return rule;
  }
  return kFieldRules[0];  // not reached: every field of fields.h is listed
}

template <class Check>
Status for_each_given(const Call& call, Check&& check) {
  for (const Field& field : call.fields()) {
    if (!field.given()) continue;
    Status status = check(field, *field.view);
    if (!status.ok()) return status;
  }
  return {};
}

// Two elements share an address if di s = dj t for |di| < a, |dj| < b, not both zero; the smallest
// such pair is t/g, s/g with g = gcd(s, t).
bool overlaps_itself(const TensorView& v) {
  if (elements(v) <= 1) return false;
  if (v.rank == 1) return v.stride[0] == 0;
  const int64_t s = v.stride[0], t = v.stride[1], g = std::gcd(s, t);
  return g == 0 || (t / g < v.shape[0] && s / g < v.shape[1]);
}

// kept has blocks of 64 columns: all of the vocabulary, or whole groups of them.
Status check_kept_shape(const Call& call, const TensorView& view) {
  const int64_t rows = kept_rows_of(call.tokens()), all = kept_blocks(call);
  const int64_t blocks = rows > 0 ? view.shape[0] / rows : 0;
  const bool part = !call.diverges && blocks > 0 && blocks < all && blocks % kept_group == 0;
  const bool whole = blocks == all || part;
  if (view.shape[1] == kept_block && view.shape[0] == blocks * rows && (whole || rows == 0)) {
    return {};
  }
  return error(StatusCode::wrong_shape,
               "kept has shape %s; allowed: [b * %lld, %lld] for b = %lld or a multiple of %lld "
               "below: what logitless_kept_size says",
               shape_text(view).text, static_cast<long long>(rows),
               static_cast<long long>(kept_block), static_cast<long long>(all),
               static_cast<long long>(kept_group));
}

// The weight defines V, so only its D can be wrong.
Status wrong_width(const TensorView& weight, int64_t hidden) {
  const long long d = hidden;
  if (weight.shape[0] == hidden) {
    return error(
        StatusCode::wrong_shape,
        "weight has shape %s; allowed: [V, %lld]; its first dimension is %lld: transposed?",
        shape_text(weight).text, d, d);
  }
  return error(StatusCode::wrong_shape, "weight has shape %s; allowed: [V, %lld]",
               shape_text(weight).text, d);
}

// Vocabularies padded to different sizes are first detected here.
Status wrong_teacher_vocab(const TensorView& weight, int64_t vocab) {
  const long long own = vocab, its = weight.shape[0];
  return error(StatusCode::wrong_shape,
               "teacher_weight has shape %s and weight V = %lld; allowed: one V (if the columns "
               "behind it are padding: %s[:%lld])",
               shape_text(weight).text, own, its > own ? "teacher_weight" : "weight",
               its > own ? own : its);
}

int32_t rank_of(const Call& call, Shape shape) {
  if (shape == Shape::token_chosen) return call.lists() ? 1 : 2;
  return shape < Shape::token_chosen ? 1 : 2;
}

bool may_be_scalar(const Call& call, Shape shape) {
  return shape == Shape::scalar ||
         (shape == Shape::reduced && call.options.reduction != Reduction::none);
}

// Returns the sizes that a vector (its first) or a matrix of this shape has in the call.
std::array<int64_t, 2> sizes_of(const Call& call, Shape shape) {
  const int64_t n = call.tokens(), v = call.vocab();
  switch (shape) {
    case Shape::token:
      return {n};
    case Shape::vocab:
      return {v};
    case Shape::vocab_total:
      return {call.vocab_total()};
    case Shape::reduced:
      return {may_be_scalar(call, shape) ? 1 : n};
    case Shape::scalar:
    case Shape::one:
      return {1};
    case Shape::token_ends:
      return {n + 1};
    case Shape::token_chosen:
      return {call.lists() ? call.all_chosen() : n, call.chosen()};
    case Shape::token_vocab:
      return {n, v};
    case Shape::token_hidden:
      return {n, call.hidden()};
    case Shape::vocab_hidden:
      return {v, call.hidden()};
    case Shape::teacher_hidden:
      return {n, call.teacher_input.shape[1]};
    case Shape::vocab_teacher_hidden:
      return {v, call.teacher_input ? call.teacher_input.shape[1] : 0};
    case Shape::kept_rows:
      return {n, kept_row_width};
    case Shape::shard_token:
      return {call.shards(), n};
    case Shape::token_listed:
      return {n, call.listed()};
    case Shape::shard_listed:
      return {call.shards(), n * call.listed()};
    case Shape::kept:
      break;  // check_kept_shape
  }
  return {};
}

}  // namespace

Status check_enums(const char* name, const TensorView& view) {
  if (size_of(view.dtype) == 0) {
    return error(StatusCode::unknown_enum, "%s has dtype %d; allowed: f32, f16, bf16, i32, i64",
                 name, static_cast<int>(view.dtype));
  }
  if (!known(view.device.type)) {
    return error(StatusCode::unknown_enum, "%s has device type %d; allowed: cpu, cuda, webgpu",
                 name, static_cast<int>(view.device.type));
  }
  return {};
}

Status check_tensor_enums(const Call& call) {
  return for_each_given(call, [](const Field& field, const TensorView& v) {
    return check_enums(field.name.data(), v);
  });
}

// The reference runs on host memory, so its tensors are on the CPU.
Status check_devices(const Call& call) {
  Device device = call.execution.device;
  if (device.type == DeviceType::reference) device.type = DeviceType::cpu;
  return for_each_given(call, [&](const Field& field, const TensorView& v) -> Status {
    if (v.device == device) return {};
    return error(StatusCode::wrong_device, "%s is on %s:%d; allowed: %s:%d", field.name.data(),
                 name_of(v.device.type), v.device.index, name_of(device.type), device.index);
  });
}

Status check_ranks(const Call& call) {
  return for_each_given(call, [&](const Field& field, const TensorView& v) -> Status {
    const Shape shape = rule_of(field).shape;
    const int32_t most = rank_of(call, shape), least = may_be_scalar(call, shape) ? 0 : most;
    if (v.rank >= least && v.rank <= most) return {};
    return error(StatusCode::wrong_shape, "%s has rank %d; allowed: %s%d", field.name.data(),
                 v.rank, least < most ? "0 or " : "", most);
  });
}

Status check_nonnegative(const Call& call) {
  return for_each_given(call, [](const Field& field, const TensorView& v) -> Status {
    for (int32_t d = 0; d < v.rank; ++d) {
      if (v.shape[d] < 0) {
        return error(StatusCode::invalid_argument, "%s has shape %s; allowed: sizes >= 0",
                     field.name.data(), shape_text(v).text);
      }
      if (v.stride[d] < 0) {
        return error(StatusCode::invalid_argument, "%s has stride %lld; allowed: >= 0",
                     field.name.data(), static_cast<long long>(v.stride[d]));
      }
    }
    return {};
  });
}

// The sizes of a call come from input and weight, from logits, or in Combine from target and the
// first of the shards' tensors.
Status check_shapes(const Call& call) {
  return for_each_given(call, [&](const Field& field, const TensorView& view) -> Status {
    const Shape shape = rule_of(field).shape;
    if (shape == Shape::kept) return check_kept_shape(call, view);
    if (view.rank == 0) return {};  // check_ranks allows it
    if (field.name == "teacher_weight" && view.shape[0] != call.vocab()) {
      return wrong_teacher_vocab(view, call.vocab());
    }
    const int32_t rank = rank_of(call, shape);
    const auto [first, second] = sizes_of(call, shape);
    if (view.shape[0] == first && (rank == 1 || view.shape[1] == second)) return {};
    if (field.name == "weight") return wrong_width(view, call.hidden());
    return error(StatusCode::wrong_shape, "%s has shape %s; allowed: %s%s", field.name.data(),
                 shape_text(view).text, shape_text(rank, first, second).text,
                 may_be_scalar(call, shape) ? " or []" : "");
  });
}

Status check_dtypes(const Call& call) {
  return for_each_given(call, [&](const Field& field, const TensorView& v) -> Status {
    const FieldRule rule = rule_of(field);
    if ((rule.dtypes >> static_cast<uint32_t>(v.dtype)) & 1) return {};
    return error(StatusCode::wrong_dtype, "%s is %s; allowed: %s", field.name.data(),
                 name_of(v.dtype), rule.dtype_names);
  });
}

Status check_extents(const Call& call) {
  return for_each_given(call, [](const Field& field, const TensorView& v) -> Status {
    int64_t bytes;
    if (extent(v, &bytes)) return {};
    return error(StatusCode::invalid_argument,
                 "%s: offset %llu, shape %s and strides [%lld, %lld] pass 2^63 bytes",
                 field.name.data(), static_cast<unsigned long long>(v.byte_offset),
                 shape_text(v).text, static_cast<long long>(v.stride[0]),
                 static_cast<long long>(v.stride[1]));
  });
}

Status check_written_once(const Call& call) {
  return for_each_given(call, [](const Field& field, const TensorView& v) -> Status {
    if (!field.written() || !overlaps_itself(v)) return {};
    return error(StatusCode::invalid_argument,
                 "%s has shape %s and strides [%lld, %lld]: elements overlap; allowed in inputs "
                 "only",
                 field.name.data(), shape_text(v).text, static_cast<long long>(v.stride[0]),
                 static_cast<long long>(v.rank == 2 ? v.stride[1] : 0));
  });
}

}  // namespace logitless
