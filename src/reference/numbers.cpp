// SPDX-License-Identifier: Apache-2.0
#include "src/reference/numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace logitless::reference {
namespace {

// A binary format of 16 bits: sign, exponent, `mantissa_bits` bits of fraction. `min_exponent` is
// that of the smallest normal number.
struct Format {
  int mantissa_bits;
  int min_exponent;
  uint16_t infinity;
};
constexpr Format f16{10, -14, 0x7c00};
constexpr Format bf16{7, -126, 0x7f80};

double decode(uint16_t bits, const Format& format) {
  const int magnitude = bits & 0x7fff;
  const int fraction = magnitude & ((1 << format.mantissa_bits) - 1);
  const int exponent = magnitude >> format.mantissa_bits;
  double value;
  if (magnitude > format.infinity) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (magnitude == format.infinity) {
    value = std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, format.min_exponent - format.mantissa_bits);
  } else {
    value = std::ldexp(fraction + (1 << format.mantissa_bits),
                       exponent - 1 + format.min_exponent - format.mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

uint16_t encode(double value, const Format& format) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | format.infinity | (1 << (format.mantissa_bits - 1));
  if (std::isinf(value)) return sign | format.infinity;
  const int exponent =
      magnitude == 0 ? format.min_exponent : std::max(std::ilogb(magnitude), format.min_exponent);
  // In units of the format's last place at this exponent. The division by a power of two is exact,
  // and nearbyint rounds ties to even.
  const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  // A carry out of the fraction increments the exponent; a subnormal has exponent field 0.
  const int64_t bits = (int64_t{exponent - format.min_exponent} << format.mantissa_bits) +
                       static_cast<int64_t>(steps);
  return sign | static_cast<uint16_t>(std::min<int64_t>(bits, format.infinity));
}

double load(const TensorView& view, int64_t index) {
  switch (view.dtype) {
    case DType::f32:
      return view.as<const float>()[index];
    case DType::f16:
      return f16_to_double(view.as<const uint16_t>()[index]);
    case DType::bf16:
      return bf16_to_double(view.as<const uint16_t>()[index]);
    case DType::i32:
      return view.as<const int32_t>()[index];
    case DType::i64:
      return static_cast<double>(view.as<const int64_t>()[index]);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void store(const TensorView& view, int64_t index, double value) {
  switch (view.dtype) {
    case DType::f32:
      view.as<float>()[index] = static_cast<float>(value);
      break;
    case DType::f16:
      view.as<uint16_t>()[index] = round_to_f16(value);
      break;
    case DType::bf16:
      view.as<uint16_t>()[index] = round_to_bf16(value);
      break;
    case DType::i32:
      view.as<int32_t>()[index] = static_cast<int32_t>(static_cast<int64_t>(value));
      break;
    case DType::i64:
      view.as<int64_t>()[index] = static_cast<int64_t>(value);
      break;
  }
}

// In row-major order; f gets each element's offset in memory.
template <class F>
void for_each_element(const TensorView& view, F&& f) {
  const int64_t rows = view.rank >= 1 ? view.shape[0] : 1;
  const int64_t columns = view.rank == 2 ? view.shape[1] : 1;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      f((view.rank >= 1 ? i * view.stride[0] : 0) + (view.rank == 2 ? j * view.stride[1] : 0));
    }
  }
}

}  // namespace

double f16_to_double(uint16_t bits) { return decode(bits, f16); }
double bf16_to_double(uint16_t bits) { return decode(bits, bf16); }
uint16_t round_to_f16(double value) { return encode(value, f16); }
uint16_t round_to_bf16(double value) { return encode(value, bf16); }

int64_t element_count(const TensorView& view) {
  int64_t count = 1;
  for (int k = 0; k < view.rank; ++k) count *= view.shape[k];
  return count;
}

std::vector<double> read(const TensorView& view) {
  std::vector<double> values;
  values.reserve(element_count(view));
  for_each_element(view, [&](int64_t index) { values.push_back(load(view, index)); });
  return values;
}

std::vector<double> read_row(const TensorView& matrix, int64_t row) {
  std::vector<double> values(matrix.shape[1]);
  for (int64_t j = 0; j < matrix.shape[1]; ++j) {
    values[j] = load(matrix, row * matrix.stride[0] + j * matrix.stride[1]);
  }
  return values;
}

std::vector<int64_t> read_indices(const TensorView& view) {
  std::vector<int64_t> values;
  values.reserve(element_count(view));
  for_each_element(view, [&](int64_t index) {
    values.push_back(view.dtype == DType::i64 ? view.as<const int64_t>()[index]
                                              : view.as<const int32_t>()[index]);
  });
  return values;
}

void write(const std::vector<double>& values, const TensorView& view) {
  int64_t next = 0;
  for_each_element(view, [&](int64_t index) { store(view, index, values[next++]); });
}

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 0x1p-11;
    case DType::bf16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}

double least(DType dtype) { return dtype == DType::f16 ? 0x1p-25 : 0x1p-126; }

double rounding_error(DType dtype, double value) {
  return unit_roundoff(dtype) * std::fabs(value) + least(dtype);
}

}  // namespace logitless::reference
