// SPDX-License-Identifier: Apache-2.0
// Conversions to f32 and back: every 16-bit value, rounding to nearest, and no access beyond the
// count.
#include "row_kernels.h"

#include <algorithm>
#include <cstring>

namespace logitless::cpu {
namespace {

TEST_P(RowKernels, LoadsEverySixteenBitNumber) {
  std::vector<uint16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> f16(65536), bf16(65536);
  load_as_f32(all.data(), DType::f16, 65536, f16.data());
  load_as_f32(all.data(), DType::bf16, 65536, bf16.data());
  for (int i = 0; i < 65536; ++i) {
    const int exponent = i >> 10 & 31, mantissa = i & 1023;
    double exact =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) exact = mantissa == 0 ? kInf : kNan;
    if (i & 0x8000) exact = -exact;
    const uint32_t bits = static_cast<uint32_t>(i) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(f16[i])) << i;
    } else {
      ASSERT_EQ(f16[i], exact) << i;
    }
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(bf16[i])) << i;
    } else {
      ASSERT_EQ(bf16[i], wide) << i;
    }
  }
}

// Rounds to the nearest number with `bits` bits of mantissa, ties to even; 2^least is the smallest
// subnormal.
double rounded(double x, int bits, int least, double largest) {
  if (!std::isfinite(x) || x == 0) return x;
  const int last = std::max(std::ilogb(x) - bits + 1, least);
  const double y = std::ldexp(std::nearbyint(std::ldexp(x, -last)), last);
  return std::fabs(y) > largest ? std::copysign(kInf, x) : y;
}

TEST_P(RowKernels, StoresToTheNearestTiesToEven) {
  std::vector<float> x;
  for (uint32_t i = 0; i < 200000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random_());
    float v;
    std::memcpy(&v, &bits, 4);
    x.push_back(v);
  }
  for (int e = -30; e < 18; ++e) {  // ties and their neighbours
    for (int m = 0; m < 64; ++m) {
      const float v = std::ldexp(1 + m / 4096.f, e);
      for (const float w : {v, std::nextafter(v, 0.f), std::nextafter(v, kInf)}) x.push_back(-w);
      const float b = std::ldexp(1 + m / 512.f, e);
      for (const float w : {b, std::nextafter(b, 0.f), std::nextafter(b, kInf)}) x.push_back(w);
    }
  }
  for (const float v : {kInf, -kInf, 65504.f, 65519.99f, 65520.f, 65536.f, 3.4e38f, 0.f}) {
    x.push_back(v);
  }
  const int64_t count = x.size();
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<uint16_t> narrow(count + 1, 0x1234);
    std::vector<float> back(count);
    store_from_f32(x.data(), count, dtype, narrow.data());
    EXPECT_EQ(narrow[count], 0x1234);
    load_as_f32(narrow.data(), dtype, count, back.data());
    for (int64_t i = 0; i < count; ++i) {
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(back[i])) << i;
        continue;
      }
      const double exact = dtype == DType::f16 ? rounded(x[i], 11, -24, 65504)
                                               : rounded(x[i], 8, -133, 3.3895313892515355e38);
      const bool flushed = back[i] == 0 && dtype == DType::bf16 && std::fabs(x[i]) < 0x1p-126;
      ASSERT_TRUE(flushed || back[i] == exact) << x[i];
    }
  }
}

TEST_P(RowKernels, ConversionsTouchExactlyTheirElements) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const int64_t count : counts()) {
      const std::vector<float> x = normal(count, 1);
      std::vector<uint32_t> narrow(count + 8, 0xabababab);
      std::vector<float> back(count + 8, 5);
      store_from_f32(x.data(), count, dtype, narrow.data());
      const char* bytes = reinterpret_cast<const char*>(narrow.data());
      for (int64_t i = count * size_of(dtype); i < (count + 8) * 4; ++i) {
        ASSERT_EQ(bytes[i], static_cast<char>(0xab));
      }
      load_as_f32(narrow.data(), dtype, count, back.data());
      for (int64_t i = 0; i < count; ++i) ASSERT_NEAR(back[i], x[i], .01 * std::fabs(x[i]));
      for (int64_t i = 0; i < 8; ++i) ASSERT_EQ(back[count + i], 5);
    }
  }
}

}  // namespace
}  // namespace logitless::cpu
