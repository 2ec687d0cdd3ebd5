// SPDX-License-Identifier: Apache-2.0
// Guarded host memory, and conversions to and from the narrow float formats.
#include "memory.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace logitless::conformance {
namespace {

struct Format {
  int digits, min_exponent, max_exponent;  // a value is m 2^e with 1 <= m < 2
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return {24, -126, 127};
    case DType::f16:
      return {11, -14, 15};
    case DType::bf16:
      return {8, -126, 127};
    default:
      throw std::invalid_argument("no floating dtype");
  }
}

// Returns 2^exponent. Multiplying by it is exact and fast; ldexp would take most of a test's time.
double power(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Returns e of |value| = m 2^e with 1 <= m < 2; for subnormals an e below any format's.
int exponent_of(double value) {
  return static_cast<int>(std::bit_cast<uint64_t>(value) >> 52 & 0x7FF) - 1023;
}

// Returns the bits of a 16-bit format with `mantissa` stored bits, of a value rounded to it before.
uint16_t encode(double value, int mantissa, int min_exponent, int exponent_mask) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | (exponent_mask << mantissa) | (1 << (mantissa - 1));
  if (std::isinf(value)) return sign | (exponent_mask << mantissa);
  const int exponent = exponent_of(value);
  if (exponent < min_exponent)
    return sign | static_cast<uint16_t>(std::fabs(value) * power(mantissa - min_exponent));
  const uint64_t stored = std::bit_cast<uint64_t>(value) >> (52 - mantissa);
  const auto fraction = static_cast<uint16_t>(stored & ((1 << mantissa) - 1));
  return sign | static_cast<uint16_t>((exponent - min_exponent + 1) << mantissa) | fraction;
}

double decode(uint16_t bits, int mantissa, int min_exponent, int exponent_mask) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = (bits >> mantissa) & exponent_mask, fraction = bits & ((1 << mantissa) - 1);
  if (exponent == exponent_mask) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * fraction * power(min_exponent - mantissa);
  return sign * (fraction + (1 << mantissa)) * power(exponent - 1 + min_exponent - mantissa);
}

template <class T>
T raw(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

template <class T>
void put(std::byte* address, T value) {
  std::memcpy(address, &value, sizeof(value));
}

}  // namespace

double round_to(DType dtype, double value) {
  if (!std::isfinite(value) || value == 0) return value;
  const Format f = format_of(dtype);
  const int exponent = std::max(exponent_of(value), f.min_exponent);
  const double steps = std::nearbyint(value * power(f.digits - 1 - exponent));
  const double rounded = steps * power(exponent - f.digits + 1);
  return std::fabs(rounded) >= power(f.max_exponent + 1) ? std::copysign(INFINITY, value) : rounded;
}

double overflow_threshold(DType dtype) {
  const Format f = format_of(dtype);
  return std::ldexp(2 - std::ldexp(1, -f.digits), f.max_exponent);
}

double load(DType dtype, const std::byte* address) {
  switch (dtype) {
    case DType::f32:
      return raw<float>(address);
    case DType::f16:
      return decode(raw<uint16_t>(address), 10, -14, 31);
    case DType::bf16:
      return decode(raw<uint16_t>(address), 7, -126, 255);
    case DType::i32:
      return raw<int32_t>(address);
    case DType::i64:
      return static_cast<double>(raw<int64_t>(address));
  }
  return NAN;
}

void store(DType dtype, double value, std::byte* address) {
  switch (dtype) {
    case DType::f32:
      return put(address, static_cast<float>(value));
    case DType::f16:
      return put(address, encode(round_to(dtype, value), 10, -14, 31));
    case DType::bf16:
      return put(address, encode(round_to(dtype, value), 7, -126, 255));
    case DType::i32:
      return put(address, static_cast<int32_t>(value));
    case DType::i64:
      return put(address, static_cast<int64_t>(value));
  }
}

Bytes::Bytes(size_t size)
    : data_(static_cast<std::byte*>(::operator new(size, std::align_val_t{128}))), size_(size) {}

TensorView Pool::add(DType dtype, std::vector<int64_t> shape, const std::vector<double>& values,
                     Layout layout) {
  const TensorView view = reserve(dtype, std::move(shape), layout);
  write(view, values);
  return view;
}

TensorView Pool::reserve(DType dtype, std::vector<int64_t> shape, Layout layout) {
  TensorView view{.dtype = dtype, .rank = static_cast<int32_t>(shape.size())};
  int64_t span = 1;
  const bool given = layout.broadcast || layout.stride[0] != 0 || layout.stride[1] != 0;
  for (int d = view.rank - 1; d >= 0; --d) {
    view.shape[d] = shape[d];
    view.stride[d] = given ? layout.stride[d] : (d == 0 && view.rank == 2 ? view.shape[1] : 1);
    span += std::max<int64_t>(shape[d] - 1, 0) * view.stride[d];
  }
  const int64_t size = size_of(dtype);
  Bytes bytes(2 * kGuardBytes + (span + layout.offset) * size);
  std::fill_n(bytes.data(), bytes.size(), kFill);
  // Half of the offset goes into the address, half into byte_offset, so that both must be used.
  const int64_t by_address = layout.offset / 2;
  view.data = bytes.data() + kGuardBytes + by_address * size;
  view.byte_offset = (layout.offset - by_address) * size;
  allocations_.push_back(std::move(bytes));
  return view;
}

size_t Pool::find(const TensorView& view) const {
  const auto* address = static_cast<const std::byte*>(view.data);
  for (size_t i = 0; i < allocations_.size(); ++i) {
    const Bytes& bytes = allocations_[i];
    if (!std::less<>()(address, bytes.data()) &&
        std::less<>()(address, bytes.data() + bytes.size()))
      return i;
  }
  throw std::invalid_argument("a view outside its pool");
}

int64_t element_count(const TensorView& view) {
  int64_t count = 1;
  for (int d = 0; d < view.rank; ++d) count *= view.shape[d];
  return count;
}

std::vector<double> read(const TensorView& view) {
  std::vector<double> values(element_count(view));
  const auto* first = view.as<const std::byte>();
  for_each_element(
      view, [&](int64_t i, int64_t offset) { values[i] = load(view.dtype, first + offset); });
  return values;
}

void write(const TensorView& view, const std::vector<double>& values) {
  if (static_cast<int64_t>(values.size()) != element_count(view))
    throw std::invalid_argument("as many values as elements");
  auto* first = view.as<std::byte>();
  for_each_element(
      view, [&](int64_t i, int64_t offset) { store(view.dtype, values[i], first + offset); });
}

}  // namespace logitless::conformance
