// SPDX-License-Identifier: Apache-2.0
// values *= factor and sum = parts[0] + parts[1] + ...: checks the vectors, then calls the backend.
#include "src/backend.h"
#include "src/message.h"
#include "src/rules.h"
#include "src/validate.h"

namespace logitless {
namespace {

enum class Allowed { any_float, f32 };

Status check_view(const char* name, const TensorView& v, int32_t rank, Allowed dtypes,
                  const Execution& execution) {
  const bool floating = v.dtype == DType::f32 || v.dtype == DType::f16 || v.dtype == DType::bf16;
  Status status = check_enums(name, v);
  if (!status.ok()) return status;
  if (!(v.device == execution.device)) {
    return error(StatusCode::wrong_device, "%s is on %s:%d; allowed: %s:%d", name,
                 name_of(v.device.type), v.device.index, name_of(execution.device.type),
                 execution.device.index);
  }
  if (v.rank != rank) {
    return error(StatusCode::wrong_shape, "%s has rank %d; allowed: %d", name, v.rank, rank);
  }
  if (!floating || (dtypes == Allowed::f32 && v.dtype != DType::f32)) {
    return error(StatusCode::wrong_dtype, "%s is %s; allowed: %s", name, name_of(v.dtype),
                 dtypes == Allowed::f32 ? "f32" : "f32, f16, bf16");
  }
  const int64_t count = rank == 0 ? 1 : v.shape[0];
  if (count < 0 || (count > 1 && v.stride[0] != 1)) {
    return error(StatusCode::wrong_shape, "%s has %lld elements of stride %lld; allowed: >= 0, 1",
                 name, static_cast<long long>(count), static_cast<long long>(v.stride[0]));
  }
  if (count == 0) return {};
  if (v.data == nullptr) return error(StatusCode::invalid_argument, "%s has NULL data", name);
  const uint64_t address = reinterpret_cast<uintptr_t>(v.data) + v.byte_offset;
  if (address % static_cast<uint64_t>(size_of(v.dtype)) != 0) {
    return error(StatusCode::misaligned, "%s is at address %p + %llu; allowed: multiples of %lld",
                 name, v.data, static_cast<unsigned long long>(v.byte_offset),
                 static_cast<long long>(size_of(v.dtype)));
  }
  return {};
}

// Whether two contiguous vectors share no byte, or are one f32 vector, each of whose elements is
// read before it is written.
bool fits_beside(const TensorView& part, const TensorView& sum) {
  const auto first = [](const TensorView& v) {
    return reinterpret_cast<uintptr_t>(v.data) + v.byte_offset;
  };
  const auto end = [&](const TensorView& v) {
    return first(v) + static_cast<uint64_t>(v.shape[0] * size_of(v.dtype));
  };
  if (first(part) == first(sum)) return sum.dtype == DType::f32 || sum.shape[0] == 0;
  return end(part) <= first(sum) || end(sum) <= first(part);
}

}  // namespace

Status scale_values(std::span<const TensorView> values, const TensorView& factor,
                    const Execution& execution) {
  Status status;
  const Backend* backend = find_backend(execution.device.type, &status);
  if (status.ok()) status = validate(execution);
  bool any = false;
  for (const TensorView& v : values) {
    if (status.ok()) status = check_view("values", v, 1, Allowed::any_float, execution);
    any |= v.shape[0] > 0;
  }
  if (status.ok()) status = check_view("factor", factor, 0, Allowed::f32, execution);
  if (!status.ok() || !any) return status;
  return backend->scale(values, factor, execution);
}

Status add_values(std::span<const TensorView> parts, const TensorView& sum,
                  const Execution& execution) {
  Status status;
  const Backend* backend = find_backend(execution.device.type, &status);
  if (status.ok()) status = validate(execution);
  if (status.ok()) status = check_view("sum", sum, 1, Allowed::any_float, execution);
  for (const TensorView& v : parts) {
    if (status.ok()) status = check_view("parts", v, 1, Allowed::f32, execution);
    if (status.ok() && v.shape[0] != sum.shape[0]) {
      status = error(StatusCode::wrong_shape, "parts has %lld elements; allowed: %lld, as sum has",
                     static_cast<long long>(v.shape[0]), static_cast<long long>(sum.shape[0]));
    }
    if (status.ok() && !fits_beside(v, sum)) {
      status = error(StatusCode::invalid_argument,
                     "sum overlaps parts; allowed: no common byte, or the same f32 vector");
    }
  }
  if (!status.ok() || sum.shape[0] == 0) return status;
  return backend->add(parts, sum, execution);
}

}  // namespace logitless
