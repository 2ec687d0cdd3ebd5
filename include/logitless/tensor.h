// SPDX-License-Identifier: Apache-2.0
// Tensors as the caller passes them: views of memory that the library does not own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "logitless/c.h"
#include "logitless/cxx20.h"

namespace logitless {

enum class DType : int32_t {
  f32 = LOGITLESS_F32,
  f16 = LOGITLESS_F16,
  bf16 = LOGITLESS_BF16,
  i32 = LOGITLESS_I32,
  i64 = LOGITLESS_I64,
};

enum class DeviceType : int32_t {
  cpu = LOGITLESS_CPU,
  cuda = LOGITLESS_CUDA,
  webgpu = LOGITLESS_WEBGPU,
  reference = LOGITLESS_REFERENCE,  // on host memory: its tensors are on DeviceType::cpu
};

// Where a tensor's memory is, or where an op runs.
struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

// The bytes of one element, or 0 for an unknown dtype.
constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i64:
      return 8;
  }
  return 0;
}

// A strided view of up to two dimensions of the caller's memory. A default view is an absent
// optional.
struct TensorView {
  void* data = nullptr;  // a host or device address, or a WGPUBuffer on WebGPU
  uint64_t byte_offset = 0;
  DType dtype = DType::f32;
  Device device{};
  int32_t rank = -1;  // 0, 1 or 2; -1: absent
  std::array<int64_t, 2> shape{};
  std::array<int64_t, 2> stride{};  // in elements; 0 broadcasts an input

  constexpr explicit operator bool() const { return rank != -1; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(static_cast<char*>(data) + byte_offset);
  }
};

// Row-major views of host memory. A const address is for inputs only.
inline TensorView scalar_view(const void* data, DType dtype) {
  return {.data = const_cast<void*>(data), .dtype = dtype, .rank = 0};
}
inline TensorView vector_view(const void* data, DType dtype, int64_t size) {
  return {.data = const_cast<void*>(data),
          .dtype = dtype,
          .rank = 1,
          .shape = {size, 0},
          .stride = {1, 0}};
}
inline TensorView matrix_view(const void* data, DType dtype, int64_t rows, int64_t columns) {
  return {.data = const_cast<void*>(data),
          .dtype = dtype,
          .rank = 2,
          .shape = {rows, columns},
          .stride = {columns, 1}};
}

}  // namespace logitless
