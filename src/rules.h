// SPDX-License-Identifier: Apache-2.0
// Shared by the rules of validate*.cpp: names of values, sizes of views, and declarations of the
// rules.
#pragma once

#include <cstdio>

#include "src/call.h"

namespace logitless {

constexpr const char* name_of(DType dtype) {
  constexpr const char* names[] = {"f32", "f16", "bf16", "i32", "i64"};
  return names[static_cast<int32_t>(dtype)];
}

constexpr bool known(DeviceType type) {
  return static_cast<uint32_t>(type) <= static_cast<uint32_t>(DeviceType::reference);
}

constexpr const char* name_of(DeviceType type) {
  constexpr const char* names[] = {"cpu", "cuda", "webgpu", "reference"};
  return names[static_cast<int32_t>(type)];
}

constexpr const char* name_of(Reduction reduction) {
  constexpr const char* names[] = {"none", "sum", "mean"};
  return names[static_cast<int32_t>(reduction)];
}

// A shape as text.
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

// A WebGPU buffer is a handle, not an address.
inline bool has_addresses(const Call& call) {
  return call.rows().device.type != DeviceType::webgpu;
}

// For a view of valid rank and sizes.
inline int64_t elements(const TensorView& v) {
  int64_t count = 1;
  for (int32_t d = 0; d < v.rank; ++d) count *= v.shape[d];
  return count;
}

// Computes the bytes from the first element to the end of the last; returns false if they and the
// offset exceed int64.
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

// check_enums refuses an unknown dtype or device.
Status check_enums(const char* name, const TensorView& view);
Status check_teacher_map(const LossOptions& options);

// Rules that validate*.cpp share: each checks one thing and relies on those before it in
// validate.cpp's table.
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
Status check_temperature(const Call& call);
Status check_normalizer(const Call& call);
Status check_combine(const Call& call);
Status check_shard_range(const Call& call);
Status check_shard_fields(const Call& call);
Status check_kept(const Call& call);
Status check_kept_key(const Call& call);
Status check_probability_input(const Call& call);
Status check_divergence_options(const Call& call);
Status check_teacher(const Call& call);
Status check_divergence_states(const Call& call);
Status check_divergence_shard(const Call& call);

}  // namespace logitless
