// SPDX-License-Identifier: Apache-2.0
// An op flattened to a list of named views, so that every validation rule is one plain function.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "logitless/logitless.h"

namespace logitless {

struct Field {
  std::string_view name;  // of a string literal: ends with a NUL
  Access access = Access::read;
  const TensorView* view = nullptr;  // never null where listed; may be absent
  bool given() const { return static_cast<bool>(*view); }
  bool written() const { return access != Access::read; }
};

struct Call {
  int32_t kind = -1;
  const char* op_name = "";
  const LossOptions* options = nullptr;  // nullptr: Softmax
  bool linear = false;
  bool gradients = false;   // Backward, ForwardBackward
  bool statistics = false;  // Forward, ForwardBackward: loss and statistics are outputs
  bool accumulate = false;
  Execution execution{};
  std::array<Field, 24> fields{};
  size_t field_count = 0;

  const Field* begin() const { return fields.data(); }
  const Field* end() const { return fields.data() + field_count; }
  // The view of that name; an absent one where the op has no such field.
  const TensorView& operator[](std::string_view name) const {
    static constexpr TensorView absent{};
    for (const Field& field : *this) {
      if (field.name == name) return *field.view;
    }
    return absent;
  }
  const TensorView& rows() const { return (*this)[linear ? "input" : "logits"]; }
  int64_t tokens() const { return rows().shape[0]; }
  int64_t vocab() const { return linear ? (*this)["weight"].shape[0] : rows().shape[1]; }
  int64_t hidden() const { return rows().shape[1]; }  // linear ops only
  int64_t vocab_total() const {
    return options != nullptr && options->vocab_total > 0 ? options->vocab_total : vocab();
  }
  bool shard() const { return vocab_total() > vocab(); }
};

constexpr const char* name_of(int32_t kind) {
  constexpr const char* names[] = {"Softmax",
                                   "CrossEntropyForward",
                                   "CrossEntropyBackward",
                                   "CrossEntropyForwardBackward",
                                   "LinearCrossEntropyForward",
                                   "LinearCrossEntropyBackward",
                                   "LinearCrossEntropyForwardBackward"};
  return names[kind];
}

// Names of known values.
constexpr const char* name_of(DType dtype) {
  constexpr const char* names[] = {"f32", "f16", "bf16", "i32", "i64"};
  return names[static_cast<int32_t>(dtype)];
}

constexpr const char* name_of(DeviceType type) {
  constexpr const char* names[] = {"cpu", "cuda", "webgpu", "reference"};
  return names[static_cast<int32_t>(type)];
}

// A shape in words.
struct Text {
  char text[48];
};

inline Text shape_text(int32_t rank, int64_t first, int64_t second) {
  Text out{"[]"};
  const long long a = first, b = second;
  if (rank == 1) std::snprintf(out.text, sizeof(out.text), "[%lld]", a);
  if (rank == 2) std::snprintf(out.text, sizeof(out.text), "[%lld, %lld]", a, b);
  return out;
}

inline Text shape_text(const TensorView& v) { return shape_text(v.rank, v.shape[0], v.shape[1]); }

// `op` must outlive the call.
template <class Op>
Call call_of(const Op& op, const Execution& execution) {
  Call call;
  static_assert(tensor_count<Op> <= std::tuple_size_v<decltype(call.fields)>);
  call.kind = kind_of<Op>;
  call.op_name = name_of(call.kind);
  if constexpr (LossOp<Op>) call.options = &op.options;
  call.linear = LinearOp<Op>;
  call.gradients = GradientOp<Op>;
  call.statistics = ForwardOp<Op>;
  if constexpr (LinearOp<Op> && GradientOp<Op>) call.accumulate = op.accumulate_grad_weight;
  call.execution = execution;
  const logitless_op unused{};
  for_each_tensor(op, unused,
                  [&](const char* name, Access access, const TensorView& view, const auto*) {
                    call.fields[call.field_count++] = {name, access, &view};
                  });
  return call;
}

// Elements of a view with valid rank and sizes.
inline int64_t elements(const TensorView& v) {
  int64_t count = 1;
  for (int32_t d = 0; d < v.rank; ++d) count *= v.shape[d];
  return count;
}

// Bytes from the first element to the end of the last; false where they and the offset pass int64.
inline bool extent(const TensorView& v, int64_t* bytes) {
  int64_t last = 0;
  *bytes = 0;
  if (v.byte_offset > static_cast<uint64_t>(INT64_MAX)) return false;
  for (int32_t d = 0; d < v.rank; ++d) {
    if (v.shape[d] == 0) return true;
  }
  for (int32_t d = 0; d < v.rank; ++d) {
    int64_t reach;
    if (__builtin_mul_overflow(v.shape[d] - 1, v.stride[d], &reach)) return false;
    if (__builtin_add_overflow(last, reach, &last)) return false;
  }
  int64_t end;
  return !__builtin_add_overflow(last, int64_t{1}, &last) &&
         !__builtin_mul_overflow(last, size_of(v.dtype), bytes) &&
         !__builtin_add_overflow(*bytes, static_cast<int64_t>(v.byte_offset), &end);
}

// The rules of validate_fields.cpp and validate_options.cpp; each looks at one thing and relies on
// those before it in the table of validate.cpp.
Status check_tensor_enums(const Call& call);
Status check_devices(const Call& call);
Status check_ranks(const Call& call);
Status check_nonnegative(const Call& call);
Status check_shapes(const Call& call);
Status check_dtypes(const Call& call);
Status check_extents(const Call& call);
Status check_written_once(const Call& call);
Status check_option_enums(const Call& call);
Status check_option_ranges(const Call& call);
Status check_normalizer(const Call& call);
Status check_shard_range(const Call& call);
Status check_shard_fields(const Call& call);
Status check_probability_input(const Call& call);

}  // namespace logitless
