// SPDX-License-Identifier: Apache-2.0
// Compares the gradients of a row with loops in double.
#include "row_kernels.h"

#include <array>
#include <cstring>
#include <iterator>

namespace logitless::cpu {
namespace {

// Returns the gradient of one raw logit without its one-hot part, and the sum of its terms'
// magnitudes.
double gradient(const LogitMap& map, const RowGradient& g, double z, double c, double* magnitude) {
  const double log_p = z - g.reference - g.log_sum, p = std::exp(log_p);
  const double information = p == 0 ? 0 : g.entropy * p * (log_p + g.entropy_value);
  const double s = slope(map, z);
  const double size = p == 0 ? 0 : std::fabs(log_p);
  *magnitude = (std::fabs(g.probability) * p * (4 + size) + std::fabs(g.smoothing * c) +
                std::fabs(g.entropy) * p * (size + std::fabs(g.entropy_value)) * (4 + size)) *
               std::fabs(map.scale / map.temperature);
  return (g.probability * p - g.smoothing * c - information) * s;
}

TEST_P(RowKernels, GradientIsADoubleLoopAtEveryCount) {
  for (const LogitMap& map : maps()) {
    for (const int64_t count : counts()) {
      std::vector<float> z = normal(count, 6);
      const std::vector<float> weight = normal(count, 1);
      map_block(map, z.data(), nullptr, count);
      if (count > 2) z[count / 3] = mapped(map, map.scale > 0 ? -kInf : kInf);
      for (int mask = 0; mask < 8; ++mask) {
        RowGradient g{.reference = 3, .log_sum = 1.5f, .probability = -.7f};
        if (mask & 1) g.smoothing = .01f;
        if (mask & 2) g.entropy = .4f, g.entropy_value = 2;
        const float* c = mask & 4 ? weight.data() : nullptr;
        std::vector<float> draw(count + 16, 77);
        gradient_block(map, g, z.data(), c, count, draw.data());
        for (int64_t j = 0; j < count; ++j) {
          double magnitude;
          const double exact = gradient(map, g, z[j], c != nullptr ? c[j] : 1, &magnitude);
          ASSERT_LE(std::fabs(draw[j] - exact), 4 * kU * magnitude + 1e-37)
              << count << " " << j << " " << mask << " " << z[j];
        }
        for (int i = 0; i < 16; ++i) ASSERT_EQ(draw[count + i], 77);
        std::vector<float> in_place = z;
        gradient_block(map, g, in_place.data(), c, count, in_place.data());
        ASSERT_EQ(std::memcmp(in_place.data(), draw.data(), count * sizeof(float)), 0);
      }
    }
  }
}

// Forward keeps exp(z - reference) rounded once to bf16. Checks it and the gradient computed from
// it.
TEST_P(RowKernels, RoundedExponentialsGiveTheGradient) {
  const LogitMap map = logit_map({.logit_scale = -.7f, .temperature = .3f});
  constexpr double rounding = 0x1p-8;  // bf16's unit roundoff
  for (const int64_t count : counts()) {
    std::vector<float> z = normal(count, 20);
    const std::vector<float> weight = normal(count, 1);
    if (count > 2) z[count / 3] = -kInf;
    const float reference = 11.25f;
    std::vector<uint16_t> bits(count + 16, 77);
    store_exponentials(z.data(), reference, count, bits.data());
    for (int i = 0; i < 16; ++i) ASSERT_EQ(bits[count + i], 77);
    std::vector<float> e(count);
    load_as_f32(bits.data(), DType::bf16, count, e.data());
    for (int64_t j = 0; j < count; ++j) {
      const double exact = std::exp(static_cast<double>(z[j]) - reference);
      ASSERT_LE(std::fabs(e[j] - exact), rounding * exact + 0x1p-126) << z[j];
    }
    for (int mask = 0; mask < 8; ++mask) {
      RowGradient g{.reference = 30, .log_sum = 1.5f, .probability = -.7f};
      if (mask & 1) g.smoothing = .01f;
      if (mask & 2) g.entropy = .4f, g.entropy_value = 2;
      const float* c = mask & 4 ? weight.data() : nullptr;
      std::vector<float> draw(count + 16, 77);
      exponentials_gradient(map, g, e.data(), reference, c, count, draw.data());
      for (int64_t j = 0; j < count; ++j) {
        double magnitude;
        // Compared with the exact gradient of the rounded exponential: only the f32 steps remain.
        const double told = reference + std::log(static_cast<double>(e[j]));
        const double exact = gradient(map, g, told, c != nullptr ? c[j] : 1, &magnitude);
        ASSERT_LE(std::fabs(draw[j] - exact), 16 * kU * magnitude + 1e-37)
            << count << " " << j << " " << mask << " " << z[j];
      }
      for (int i = 0; i < 16; ++i) ASSERT_EQ(draw[count + i], 77);
      exponentials_gradient(map, g, e.data(), reference, c, count, e.data());
      ASSERT_EQ(std::memcmp(e.data(), draw.data(), count * sizeof(float)), 0);
      load_as_f32(bits.data(), DType::bf16, count, e.data());
    }
  }
}

TEST_P(RowKernels, KeptExponentialsGiveTheGradient) {
  for (const float temperature : {1.f, .3f}) {
    const LogitMap map = logit_map({.logit_scale = -.7f, .temperature = temperature});
    for (const int64_t count : counts()) {
      const std::vector<float> raw = normal(count, 6), weight = normal(count, 1);
      std::vector<float> z = raw, e(count + 16, 77), in_place = raw;
      BlockState plain, kept, over;
      constexpr BlockWants all{UsualSums<Narrow>::kinds};
      forward_block(map, z.data(), nullptr, weight.data(), count, all, &kept, e.data());
      forward_block(map, in_place.data(), nullptr, weight.data(), count, all, &over,
                    in_place.data());
      std::vector<float> again = raw;
      forward_block(map, again.data(), nullptr, weight.data(), count, all, &plain);
      EXPECT_EQ(std::memcmp(&plain, &kept, sizeof(plain)), 0);
      EXPECT_EQ(std::memcmp(&plain, &over, sizeof(plain)), 0);
      EXPECT_EQ(std::memcmp(e.data(), in_place.data(), count * sizeof(float)), 0);
      for (int mask = 0; mask < 3; ++mask) {
        RowGradient g{.reference = kept.maximum + 2, .log_sum = 1.5f, .probability = -.7f};
        if (mask > 0) g.smoothing = .01f;
        const float* c = mask > 1 ? weight.data() : nullptr;
        std::vector<float> draw(count + 16, 77);
        scale_block(map, g, e.data(), kept.maximum, c, count, draw.data());
        for (int64_t j = 0; j < count; ++j) {
          double magnitude;
          const double exact = gradient(map, g, z[j], c != nullptr ? c[j] : 1, &magnitude);
          ASSERT_LE(std::fabs(draw[j] - exact), 4 * kU * magnitude + 1e-37) << count << " " << j;
        }
        for (int i = 0; i < 16; ++i) ASSERT_EQ(draw[count + i], 77);
      }
    }
  }
}

// Returns floats of random bits, of every size, ties, subnormals, infinities and NaN.
class AnyFloat {
 public:
  float operator()() {
    const uint32_t bits = random_();
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    const float size = static_cast<float>(random_()) * 0x1p-32f;
    const float few[] = {0, -0.0f, 1, .5f, kInf, -kInf, kNan, 0x1p-149f, 0x1p-126f, 3e38f};
    return std::array<float, 4>{x, size, -90 * size, few[bits % std::size(few)]}[random_() % 4];
  }

 private:
  std::mt19937 random_{11};
};

bool same_bits(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(a)) == 0;
}

// dz_of has the same formula for vectors and scalars: each element of a kernel's result has the
// bits of dz_of on scalars. Their p comes from the same kernel with no other factors.
TEST_P(RowKernels, AnElementOfAVectorIsThatOfANumber) {
  const bool fused = GetParam().rfind("SSE", 0) != 0;
  const auto one = [&](float own, float p, const RowGradient& g, float c, float log_p) {
    const float information = std::fmax(log_p, -87.3365f) + g.entropy_value;
    const auto dz = fused ? dz_of<Fused, float, float> : dz_of<Rounded, float, float>;
    return dz(own, g.smoothing != 0, g.smoothing, c, g.entropy != 0, g.entropy * p, information);
  };
  constexpr int64_t count = 61;
  AnyFloat any;
  std::vector<float> z(count), weight(count), p(count), draw(count), scaled(count);
  for (int n = 0; n < 4000; ++n) {
    for (float& x : z) x = any();
    for (float& x : weight) x = any();
    RowGradient g{.reference = n % 3 == 0 ? any() : 3,
                  .log_sum = n % 5 == 0 ? any() : 1.5f,
                  .probability = any()};
    gradient_block({}, {.reference = g.reference, .log_sum = g.log_sum, .probability = 1}, z.data(),
                   nullptr, count, p.data());
    if (n & 1) g.smoothing = any();
    const float* c = n & 2 ? weight.data() : nullptr;
    scale_block({}, {.probability = g.probability, .smoothing = g.smoothing}, z.data(), 0, c, count,
                scaled.data());
    if (n & 4) g.entropy = any(), g.entropy_value = any();
    gradient_block({}, g, z.data(), c, count, draw.data());
    for (int64_t j = 0; j < count; ++j) {
      const float c_j = c != nullptr ? c[j] : 1, log_p = (z[j] - g.reference) - g.log_sum;
      ASSERT_TRUE(same_bits(draw[j], one(g.probability * p[j], p[j], g, c_j, log_p)))
          << n << " " << j << " " << z[j] << " " << draw[j];
      RowGradient without = g;
      without.entropy = 0;
      ASSERT_TRUE(same_bits(scaled[j], one(z[j] * g.probability, z[j], without, c_j, 0)))
          << n << " " << j << " " << z[j] << " " << scaled[j];
    }
  }
}

TEST(DzOf, AsksForAClassWeightWhereItSmooths) {
  int asked = 0;
  const auto c = [&] {
    ++asked;
    return 1.1f;
  };
  const auto dz = [](bool smooths, auto weight) {
    return dz_of<Fused>(.7f, smooths, .3f, weight, true, .2f, -1.3f);
  };
  EXPECT_EQ(dz(false, c), dz(false, 1.1f));
  EXPECT_EQ(asked, 0);
  EXPECT_EQ(dz(true, c), dz(true, 1.1f));
  EXPECT_EQ(asked, 1);
}

TEST(TargetGradient, InF32IsThatInDouble) {
  std::mt19937 random{3};
  std::uniform_real_distribution<float> any(-2, 2), exponent(-30, -1);
  for (int n = 0; n < 100000; ++n) {
    const RowGradient g{.probability = any(random), .onehot = any(random)};
    const float small = std::exp2(exponent(random));
    for (const bool near_one : {false, true}) {
      const double p = near_one ? 1 - double{small} : small;
      const float rest = near_one ? small : static_cast<float>(1 - p);
      const double exact = dz_of_target(g, p, p - 1, 0, 1);
      const double bound = std::fabs(exact) + (near_one ? std::fabs(g.probability - g.onehot) : 0);
      ASSERT_LE(
          std::fabs(target_draw(g.probability, g.onehot, static_cast<float>(p), rest) - exact),
          kU * bound)
          << g.probability << " " << g.onehot << " " << p;
    }
  }
}

TEST_P(RowKernels, TheTargetsGradientHoldsItsOnehot) {
  for (const LogitMap& map : maps()) {
    for (float z : normal(2000, 6)) {
      map_block(map, &z, nullptr, 1);
      const RowGradient g{.reference = 3,
                          .log_sum = 1.5f,
                          .probability = -.7f,
                          .smoothing = .01f,
                          .onehot = .9f,
                          .entropy = .4f,
                          .entropy_value = 2};
      double magnitude;
      const double exact =
          gradient(map, g, z, 1.25, &magnitude) - static_cast<double>(g.onehot) * slope(map, z);
      magnitude += std::fabs(g.onehot * map.scale / map.temperature);
      ASSERT_LE(std::fabs(target_gradient(map, g, z, 1.25f) - exact), 4 * kU * magnitude);
    }
  }
}

TEST(TargetGradient, DoesNotCancelNearOne) {
  // With p = 1 - 1e-9 dz is -1e-9; 1 - p in f32 would be 0.
  const RowGradient g{.reference = 0, .log_sum = 1e-9f, .probability = 1, .onehot = 1};
  EXPECT_NEAR(target_gradient({}, g, 0, 1), -1e-9, 1e-15);
  EXPECT_EQ(target_gradient({}, {.probability = 1, .onehot = 1}, 0, 1), 0);
  EXPECT_EQ(target_gradient({}, g, -kInf, 1), -1);
  EXPECT_TRUE(std::isnan(target_gradient({}, g, kNan, 1)));
  // A class of weight 0 has no one-hot part, so dz is P p, accurate however small p is.
  EXPECT_FLOAT_EQ(target_gradient({}, {.probability = .5f}, -40, 1), .5f * std::exp(-40.f));
}

}  // namespace
}  // namespace logitless::cpu
