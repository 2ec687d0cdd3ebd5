// SPDX-License-Identifier: Apache-2.0
// The host memory of the conformance suite: every tensor has its own allocation between guard
// bytes, and elements are read and written as double. Gaps of strided tensors are guarded too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "logitless/logitless.h"

namespace logitless::conformance {

// Returns the nearest value of a floating dtype, ties to even; infinity beyond its range.
double round_to(DType dtype, double value);
// The smallest magnitude that rounds to infinity.
double overflow_threshold(DType dtype);
double load(DType dtype, const std::byte* address);
void store(DType dtype, double value, std::byte* address);

// Starts at a multiple of 128, so that the address 64 bytes on is aligned to 64 and no further.
class Bytes {
 public:
  Bytes() = default;
  explicit Bytes(size_t size);
  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{128}); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

inline constexpr size_t kGuardBytes = 256;

// The position of a tensor's elements; strides of {0, 0} mean dense.
struct Layout {
  std::array<int64_t, 2> stride{0, 0};
  int64_t offset =
      // Elements between the guard and the first element, for an address that is only
      // element-aligned.
      0;
  bool broadcast = false;  // strides of {0, 0} are strides, not "dense"
};

// NaN in every floating dtype, so that reading a gap or a guard shows.
inline constexpr std::byte kFill{0xFF};

// The tensors of one op. Views are valid as long as the pool lives.
class Pool {
 public:
  // Shape {} is [], {n} is [n] and {rows, columns} is [rows, columns]; values are dense row-major.
  TensorView add(DType dtype, std::vector<int64_t> shape, const std::vector<double>& values,
                 Layout layout = {});
  // The elements of the new tensor hold kFill.
  TensorView reserve(DType dtype, std::vector<int64_t> shape, Layout layout = {});
  size_t size() const { return allocations_.size(); }
  const Bytes& operator[](size_t i) const { return allocations_[i]; }
  // The index of the allocation that contains the view.
  size_t find(const TensorView& view) const;

 private:
  std::vector<Bytes> allocations_;
};

int64_t element_count(const TensorView& view);
// Calls f(i, byte offset from the view's first element) for every element, in dense row-major
// order.
template <class F>
void for_each_element(const TensorView& view, F&& f) {
  const int64_t rows = view.rank > 0 ? view.shape[0] : 1,
                columns = view.rank > 1 ? view.shape[1] : 1;
  const int64_t size = size_of(view.dtype);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      f(i * columns + j, (i * view.stride[0] + j * view.stride[1]) * size);
    }
  }
}
std::vector<double> read(const TensorView& view);
void write(const TensorView& view, const std::vector<double>& values);

}  // namespace logitless::conformance
