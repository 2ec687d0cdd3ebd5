// SPDX-License-Identifier: Apache-2.0
// The reference's conversions: all 65536 patterns of f16 and bf16, every midpoint between adjacent
// values, and views of any stride.
#include "src/reference/numbers.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace logitless::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Format {
  const char* name;
  double (*decode)(uint16_t);
  uint16_t (*encode)(double);
  uint16_t infinity;
  double least_subnormal;
};
const Format kFormats[] = {{"f16", f16_to_double, round_to_f16, 0x7c00, 0x1p-24},
                           {"bf16", bf16_to_double, round_to_bf16, 0x7f80, 0x1p-133}};

class ReferenceNumbers : public testing::TestWithParam<Format> {};

TEST_P(ReferenceNumbers, RoundTripEveryPattern) {
  const Format& format = GetParam();
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double value = format.decode(bits);
    const uint16_t back = format.encode(value);
    if ((bits & 0x7fff) > format.infinity) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      EXPECT_TRUE(std::isnan(format.decode(back))) << bits;
    } else {
      EXPECT_EQ(back, bits);
      EXPECT_EQ(std::signbit(value), bits >= 0x8000);
    }
  }
}

TEST_P(ReferenceNumbers, RoundToTheNearestAndTiesToEven) {
  const Format& format = GetParam();
  for (uint16_t bits = 0; bits < format.infinity; ++bits) {
    const double low = format.decode(bits);
    // Infinity counts as the next value after the largest finite one.
    const uint16_t next = bits + 1;
    const double high =
        next == format.infinity ? 2 * low - format.decode(bits - 1) : format.decode(next);
    ASSERT_GT(high, low);
    const double middle = low + (high - low) / 2;
    EXPECT_EQ(format.encode(middle), bits % 2 == 0 ? bits : next) << bits;
    EXPECT_EQ(format.encode(std::nextafter(middle, 0.0)), bits) << bits;
    EXPECT_EQ(format.encode(std::nextafter(middle, kInfinity)), next) << bits;
    EXPECT_EQ(format.encode(-middle), format.encode(middle) | 0x8000) << bits;
  }
}

TEST_P(ReferenceNumbers, KeepInfinityNanAndTheSignOfZero) {
  const Format& format = GetParam();
  EXPECT_EQ(format.encode(kInfinity), format.infinity);
  EXPECT_EQ(format.encode(-kInfinity), format.infinity | 0x8000);
  EXPECT_EQ(format.encode(std::numeric_limits<double>::max()), format.infinity);
  EXPECT_EQ(format.encode(0.0), 0);
  EXPECT_EQ(format.encode(-0.0), 0x8000);
  EXPECT_EQ(format.encode(std::numeric_limits<double>::denorm_min()), 0);
  EXPECT_TRUE(std::isnan(format.decode(format.encode(std::nan("")))));
  EXPECT_EQ(format.decode(1), format.least_subnormal);
}

INSTANTIATE_TEST_SUITE_P(Formats, ReferenceNumbers, testing::ValuesIn(kFormats),
                         [](const testing::TestParamInfo<Format>& info) {
                           return info.param.name;
                         });

TEST(ReferenceNumbers, KnownValuesOfF16) {
  EXPECT_EQ(f16_to_double(0x3c00), 1.0);
  EXPECT_EQ(f16_to_double(0x7bff), 65504.0);
  EXPECT_EQ(f16_to_double(0x0400), 0x1p-14);
  EXPECT_EQ(f16_to_double(0xc500), -5.0);
  EXPECT_EQ(round_to_f16(65519.99), 0x7bff);
  EXPECT_EQ(round_to_f16(65520), 0x7c00);
  // Rounding to f32 first would give a tie, which rounds to 1.
  EXPECT_EQ(round_to_f16(1 + 0x1p-11 + 0x1p-40), 0x3c01);
}

TEST(ReferenceNumbers, Bf16IsTheUpperHalfOfF32) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = std::bit_cast<float>(bits << 16);
    if (std::isnan(value)) continue;
    EXPECT_EQ(bf16_to_double(bits), value);
  }
}

TEST(ReferenceNumbers, ReadAndWriteAnyStride) {
  float memory[12] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  TensorView transposed = matrix_view(memory, DType::f32, 3, 2);
  transposed.stride = {1, 3};
  EXPECT_EQ(read(transposed), (std::vector<double>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(read_row(transposed, 1), (std::vector<double>{1, 4}));
  TensorView broadcast = vector_view(memory + 7, DType::f32, 3);
  broadcast.stride = {0, 0};
  EXPECT_EQ(read(broadcast), (std::vector<double>{7, 7, 7}));
  TensorView backwards = vector_view(memory + 11, DType::f32, 3);
  backwards.stride = {-2, 0};
  EXPECT_EQ(read(backwards), (std::vector<double>{11, 9, 7}));
  TensorView offset = scalar_view(memory, DType::f32);
  offset.byte_offset = 20;
  EXPECT_EQ(read(offset), (std::vector<double>{5}));
  write({-1, -2, -3, -4, -5, -6}, transposed);
  EXPECT_EQ(read(transposed), (std::vector<double>{-1, -2, -3, -4, -5, -6}));
  EXPECT_EQ(memory[3], -2);
  EXPECT_EQ(memory[6], 6);
}

TEST(ReferenceNumbers, ReadIndicesOfBothSizes) {
  const int32_t small[] = {5, -100, 2147483647};
  const int64_t large[] = {int64_t{1} << 40, -100, 3};
  EXPECT_EQ(read_indices(vector_view(small, DType::i32, 3)),
            (std::vector<int64_t>{5, -100, 2147483647}));
  EXPECT_EQ(read_indices(vector_view(large, DType::i64, 3)),
            (std::vector<int64_t>{int64_t{1} << 40, -100, 3}));
}

}  // namespace
}  // namespace logitless::reference
