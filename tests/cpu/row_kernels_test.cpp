// SPDX-License-Identifier: Apache-2.0
// Compares the row kernels of Forward with loops in double: the logit map, exp, maxima and sums of
// a block, and blocks combined to a row.
#include "row_kernels.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

namespace logitless::cpu {
namespace {

std::vector<std::string> targets() {
  std::istringstream words(target_names());
  return {std::istream_iterator<std::string>(words), {}};
}

INSTANTIATE_TEST_SUITE_P(Targets, RowKernels, testing::ValuesIn(targets()),
                         [](const auto& info) { return info.param; });

// Returns exp(x): the gradient with P = 1 and lse = 0.
std::vector<float> exponentials(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  gradient_block({}, {.probability = 1}, x.data(), nullptr, x.size(), y.data());
  return y;
}

TEST_P(RowKernels, ExpIsWithinOneUlp) {
  std::vector<float> x;
  for (double v = -87.33; v < 87.9; v += .00037) x.push_back(static_cast<float>(v));
  for (float v = 1e-30f; v < 1; v *= 1.3f) {
    x.push_back(v);
    x.push_back(-v);
  }
  const std::vector<float> y = exponentials(x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
    worst = std::max(worst, std::fabs(y[i] - exact) / ulp);
  }
  RecordProperty("max_error_ulp", std::to_string(worst));
  EXPECT_LT(worst, 1.2);
  EXPECT_GT(worst, .4);  // an error of 0 would mean that this test fails to measure
}

TEST_P(RowKernels, ExpAtItsEdges) {
  const std::vector<float> y =
      exponentials({-kInf, -1e30f, -104, -88, 0, -0.f, kNan, kInf, 1e30f, 89, 100, -87.34f, -kNan});
  for (int i : {0, 1, 2, 3, 11}) EXPECT_EQ(y[i], 0) << i;
  EXPECT_EQ(y[4], 1);
  EXPECT_EQ(y[5], 1);
  EXPECT_TRUE(std::isnan(y[6]));
  for (int i : {7, 8, 9, 10}) EXPECT_EQ(y[i], kInf) << i;
  EXPECT_TRUE(std::isnan(y[12]));
}

TEST_P(RowKernels, TanhKeepsItsRelativeError) {
  std::vector<float> x;
  for (float v = 1e-30f; v < 30; v *= 1.0003f) {
    x.push_back(v);
    x.push_back(-v);
  }
  std::vector<float> y = x;
  map_block(logit_map({.softcap = 1}), y.data(), nullptr, y.size());
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::tanh(static_cast<double>(x[i]));
    worst = std::max(worst, std::fabs(y[i] - exact) / std::fabs(exact));
  }
  RecordProperty("max_relative_error_u", std::to_string(worst / kU));
  EXPECT_LT(worst, 1.7 * kU);
  std::vector<float> edges{kInf, -kInf, 0, -0.f, kNan, 3e38f, -3e38f};
  map_block(logit_map({.softcap = 1}), edges.data(), nullptr, edges.size());
  EXPECT_EQ(edges[0], 1);
  EXPECT_EQ(edges[1], -1);
  EXPECT_EQ(edges[2], 0);
  EXPECT_TRUE(std::signbit(edges[3]) && edges[3] == 0);
  EXPECT_TRUE(std::isnan(edges[4]));
  EXPECT_EQ(edges[5], 1);
  EXPECT_EQ(edges[6], -1);
}

TEST_P(RowKernels, TheMapIsWithinTheBoundOfALogit) {
  for (const LogitMap& map : maps()) {
    for (const float size : {.01f, 3.f, 40.f}) {
      const std::vector<float> raw = normal(20001, size), bias = normal(20001, size);
      std::vector<float> z = raw, with_bias = raw;
      map_block(map, z.data(), nullptr, z.size());
      map_block(map, with_bias.data(), bias.data(), z.size());
      for (size_t j = 0; j < z.size(); ++j) {
        const double exact = mapped(map, raw[j]), shifted = mapped(map, raw[j] + bias[j]);
        ASSERT_LE(std::fabs(z[j] - exact), 3 * kU * std::fabs(exact)) << raw[j];
        ASSERT_LE(std::fabs(with_bias[j] - shifted), 3 * kU * std::fabs(shifted)) << raw[j];
      }
    }
  }
}

TEST_P(RowKernels, AnInfiniteLogitMapsExactly) {
  for (const LogitMap& map : maps()) {
    std::vector<float> z{kInf, -kInf, kNan};
    map_block(map, z.data(), nullptr, 3);
    EXPECT_EQ(z[0], static_cast<float>(mapped(map, kInf)));
    EXPECT_EQ(z[1], static_cast<float>(mapped(map, -kInf)));
    EXPECT_TRUE(std::isnan(z[2]));
  }
}

TEST_P(RowKernels, ZeroTimesAnInfiniteLogitIsNaN) {
  for (const float scale : {0.f, -0.f}) {
    for (const float softcap : {0.f, 30.f}) {
      const LogitMap map = logit_map({.logit_scale = scale, .softcap = softcap});
      std::vector<float> z{kInf, -kInf, kNan, 3e38f, -1};
      map_block(map, z.data(), nullptr, 5);
      for (const int i : {0, 1, 2}) EXPECT_TRUE(std::isnan(z[i])) << i << ": " << z[i];
      EXPECT_EQ(z[3], 0);
      EXPECT_EQ(z[4], 0);
    }
  }
}

// Checks forward_block against double, from the mapped logits that it wrote.
void check_forward(const std::vector<float>& z, const std::vector<float>* weight,
                   const BlockState& state) {
  double m = -kInf, sum = 0, shifted = 0, weighted = 0, magnitude = 0;
  for (const float v : z) m = std::max<double>(m, v);
  int argmax = 0;
  while (z[argmax] != m) ++argmax;
  for (size_t j = 0; j < z.size(); ++j) {
    const double x = z[j] - m, c = weight != nullptr ? (*weight)[j] : 1;
    sum += std::exp(x);
    shifted += std::exp(x) * x;
    weighted += c * z[j];
    magnitude += std::fabs(c * z[j]);
  }
  const double length = std::log2(z.size()) + 3;
  EXPECT_EQ(state.maximum, m);
  EXPECT_NEAR(state.sum, sum, kU * (length * sum - 2 * shifted));
  EXPECT_NEAR(state.shifted, shifted, 4 * kU * (length * sum - 2 * shifted) + kU);
  EXPECT_NEAR(state.weighted, weighted, kU * (length - 1) * magnitude);
  EXPECT_EQ(state.argmax, argmax);
}

TEST_P(RowKernels, ForwardIsADoubleLoopAtEveryCount) {
  constexpr BlockWants all{UsualSums<Narrow>::kinds};
  for (const LogitMap& map : maps()) {
    for (const int64_t count : counts()) {
      const std::vector<float> raw = normal(count, 5), bias = normal(count, 1);
      const std::vector<float> weight = normal(count, 1);
      for (const bool with_bias : {false, true}) {
        std::vector<float> expected = raw, z = raw;
        // Elements after the block are neither read nor written.
        z.insert(z.end(), 64, kNan);
        const float* b = with_bias ? bias.data() : nullptr;
        map_block(map, expected.data(), b, count);
        BlockState state;
        forward_block(map, z.data(), b, weight.data(), count, all, &state);
        EXPECT_EQ(std::memcmp(z.data(), expected.data(), count * sizeof(float)), 0);
        for (int i = 0; i < 64; ++i) EXPECT_TRUE(std::isnan(z[count + i]));
        check_forward(expected, &weight, state);
        BlockState unweighted, plain;
        z.assign(raw.begin(), raw.end());
        forward_block(map, z.data(), b, nullptr, count, all, &unweighted);
        check_forward(expected, nullptr, unweighted);
        z.assign(raw.begin(), raw.end());
        forward_block(map, z.data(), b, nullptr, count, {}, &plain);
        // Further sums change no bit of the sum and the maximum.
        EXPECT_EQ(plain.sum, state.sum);
        EXPECT_EQ(plain.maximum, state.maximum);
      }
      if (HasFailure()) FAIL() << count;
    }
  }
}

TEST_P(RowKernels, FurtherSumsAreADoubleLoopAtEveryCount) {
  BlockWants wants{RareBlock::kinds};
  for (const int64_t count : counts()) {
    std::vector<float> z = normal(count, 5);
    for (const int64_t target : {int64_t{0}, count / 2, count - 1, count, int64_t{-1}}) {
      // The target's own column never counts as above, whatever its logit.
      const bool here = target >= 0 && target < count;
      wants.target_logit = here ? std::nextafter(z[target], -kInf) : 1;
      wants.target = target;
      BlockState plain, state;
      RareBlock more;
      forward_block({}, z.data(), nullptr, nullptr, count, {}, &plain);
      std::vector<float> e = z;  // forward_block overwrites it with exponentials
      forward_block({}, e.data(), nullptr, nullptr, count, wants, &state, e.data(), &more);
      EXPECT_EQ(plain.sum, state.sum);
      double sum = 0, squares = 0, magnitude = 0, mass = 0;
      int above = 0;
      for (int64_t j = 0; j < count; ++j) {
        sum += z[j];
        magnitude += std::fabs(z[j]);
        squares += std::exp(2.0 * (static_cast<double>(z[j]) - state.maximum));
        if (j == target || z[j] <= wants.target_logit) continue;
        ++above;
        mass += std::exp(static_cast<double>(z[j]) - state.maximum);
      }
      EXPECT_NEAR(more.logits, sum, kU * (std::log2(count) + 2) * magnitude);
      EXPECT_NEAR(more.squares, squares, 8 * kU * (std::log2(count) + 3) * squares);
      EXPECT_EQ(more.above, above) << count << " " << target;
      EXPECT_NEAR(more.mass, mass, 8 * kU * (std::log2(count) + 3) * mass)
          << count << " " << target;
    }
  }
}

TEST_P(RowKernels, FurtherSumsOfBlocksCombineToTheRow) {
  BlockWants wants{RareBlock::kinds};
  wants.target_logit = 3;
  std::vector<float> z = normal(1501, 8);
  for (int64_t j = 400; j < 700; ++j) z[j] -= 200;
  double squares = 0, sum = 0, whole = 0, mass = 0, m = -kInf;
  int64_t above = 0;
  for (const float v : z) m = std::max<double>(m, v);
  for (const float v : z) {
    sum += v;
    whole += std::exp(v - m);
    squares += std::exp(2 * (v - m));
    above += v > 3 ? 1 : 0;
    mass += v > 3 ? std::exp(v - m) : 0;
  }
  for (const int64_t block : {1501, 300, 7}) {
    RowAccumulator row = RowAccumulator::begin();
    for (int64_t j = 0; j < 1501; j += block) {
      BlockState state;
      RareBlock more;
      const int64_t count = std::min<int64_t>(block, 1501 - j);
      forward_block({}, z.data() + j, nullptr, nullptr, count, wants, &state, nullptr, &more);
      row.add(state, j, wants.sums, &more);
    }
    const RareStatistics statistics = row.finish_rare(3002);
    EXPECT_NEAR(statistics.mean_logit, sum / 3002, 1e-5 * std::fabs(sum / 3002) + 1e-4);
    EXPECT_NEAR(statistics.sum_p_squared, squares / (whole * whole), 1e-5);
    EXPECT_EQ(statistics.rank, above);
    EXPECT_NEAR(statistics.mass_above, mass / whole, 1e-5);
  }
}

TEST_P(RowKernels, TheAddressChangesNoBit) {
  constexpr BlockWants all{UsualSums<Narrow>::kinds};
  for (const int64_t count : {31, 192, 1000}) {
    const std::vector<float> raw = normal(count, 5);
    BlockState first{};
    for (int offset = 0; offset < 17; ++offset) {
      std::vector<float> z(offset);
      z.insert(z.end(), raw.begin(), raw.end());
      BlockState state;
      forward_block({}, z.data() + offset, nullptr, nullptr, count, all, &state);
      if (offset == 0) first = state;
      EXPECT_EQ(std::memcmp(&first, &state, sizeof(state)), 0) << offset;
    }
  }
}

TEST_P(RowKernels, ALogitsImageDoesNotDependOnItsPlace) {
  for (const LogitMap& map : maps()) {
    std::vector<float> raw = normal(97, 8);
    for (int64_t j = 0; j < 97; ++j) raw[j] = raw[j % 7];
    const RowGradient g{.reference = 1,
                        .log_sum = 2,
                        .probability = .3f,
                        .smoothing = .01f,
                        .entropy = .5f,
                        .entropy_value = 1.5f};
    std::vector<float> draw(97);
    map_block(map, raw.data(), nullptr, 97);
    gradient_block(map, g, raw.data(), nullptr, 97, draw.data());
    for (int64_t j = 7; j < 97; ++j) {
      EXPECT_EQ(raw[j], raw[j % 7]);
      EXPECT_EQ(draw[j], draw[j % 7]);
    }
  }
}

TEST_P(RowKernels, LowestIndexAmongEqualMaxima) {
  for (const int64_t count : counts()) {
    for (int64_t first = 0; first < count; first += 1 + count / 7) {
      std::vector<float> z(count, -1);
      z[first] = z[count - 1] = 2;
      BlockState state;
      forward_block({}, z.data(), nullptr, nullptr, count, {SumKind::argmax}, &state);
      EXPECT_EQ(state.argmax, first);
    }
  }
}

TEST_P(RowKernels, OneNanIsNeverLost) {
  for (const int64_t count : counts()) {
    for (int64_t where = 0; where < count; where += 1 + count / 37) {
      for (const float others : {-3.f, -kInf, kInf}) {
        std::vector<float> z(count, others);
        z[where] = kNan;
        BlockState state;
        forward_block({}, z.data(), nullptr, nullptr, count, {SumKind::argmax}, &state);
        EXPECT_TRUE(std::isnan(state.maximum)) << count << " " << where;
        EXPECT_TRUE(state.argmax >= 0 && state.argmax < count);
      }
    }
  }
}

TEST_P(RowKernels, MinusInfinityIsNoProbability) {
  constexpr BlockWants all{UsualSums<Narrow>::kinds};
  for (const int64_t count : counts()) {
    std::vector<float> z(count, -kInf), weight(count, 0);
    BlockState state;
    forward_block({}, z.data(), nullptr, weight.data(), count, all, &state);
    EXPECT_EQ(state.maximum, -kInf);
    EXPECT_EQ(state.sum, 0);
    EXPECT_EQ(state.shifted, 0);
    EXPECT_EQ(state.weighted, 0);  // its weight is 0
    EXPECT_EQ(state.argmax, 0);
    z[count / 2] = 3;
    forward_block({}, z.data(), nullptr, nullptr, count, all, &state);
    EXPECT_EQ(state.maximum, 3);
    EXPECT_EQ(state.sum, 1);
    EXPECT_EQ(state.shifted, 0);
    EXPECT_EQ(state.argmax, count / 2);
    if (count > 1) {
      EXPECT_EQ(state.weighted, -kInf);
    }
  }
}

TEST_P(RowKernels, HugeLogitsDoNotOverflow) {
  std::vector<float> z{1e30f, -1e30f, 1e30f, 0};
  BlockState state;
  forward_block({}, z.data(), nullptr, nullptr, 4, {SumKind::shifted}, &state);
  EXPECT_EQ(state.maximum, 1e30f);
  EXPECT_EQ(state.sum, 2);
  EXPECT_EQ(state.shifted, 0);
}

// Runs a whole row through blocks of this size.
RowState accumulate(std::vector<float> z, int64_t block, BlockWants wants) {
  RowAccumulator row = RowAccumulator::begin();
  for (size_t j = 0; j < z.size(); j += block) {
    const int64_t count = std::min<int64_t>(block, z.size() - j);
    BlockState state;
    forward_block({}, z.data() + j, nullptr, nullptr, count, wants, &state);
    row.add(state, j, wants.sums);
  }
  return row.finish(wants.sums);
}

TEST_P(RowKernels, BlocksCombineToTheRow) {
  constexpr BlockWants all{UsualSums<Narrow>::kinds};
  for (const float offset : {0.f, 1e4f, -300.f}) {
    std::vector<float> z = normal(1501, 8);
    for (float& v : z) v += offset;
    std::fill(z.begin() + 400, z.begin() + 700, -kInf);
    double m = -kInf, sum = 0, shifted = 0;
    for (const float v : z) m = std::max<double>(m, v);
    for (const float v : z) {
      if (v == -kInf) continue;
      sum += std::exp(v - m);
      shifted += std::exp(v - m) * (v - m);
    }
    for (const int64_t block : {1, 100, 192, 1000, 2000}) {
      const RowState s = accumulate(z, block, all);
      EXPECT_EQ(s.reference, m);
      EXPECT_NEAR(s.log_sum, std::log(sum), 40 * kU);
      EXPECT_NEAR(s.entropy, std::log(sum) - shifted / sum, 100 * kU);
      EXPECT_EQ(z[s.argmax], m);
      EXPECT_EQ(s.weighted_logit_sum, -kInf);
    }
  }
}

TEST_P(RowKernels, ARowOfMinusInfinityIsNan) {
  constexpr BlockWants all{UsualSums<Narrow>::kinds};
  const RowState s = accumulate(std::vector<float>(50, -kInf), 16, all);
  EXPECT_EQ(s.reference, -kInf);
  EXPECT_TRUE(std::isnan(s.log_sum) && std::isnan(s.lse()) && std::isnan(s.entropy));
  EXPECT_EQ(s.argmax, 0);
}

TEST_P(RowKernels, NanAndInfinityReachTheRow) {
  constexpr BlockWants all{UsualSums<Narrow>::kinds};
  for (const int where : {0, 20, 49}) {
    std::vector<float> z(50, -2);
    z[where] = kNan;
    EXPECT_TRUE(std::isnan(accumulate(z, 16, all).reference));
    EXPECT_TRUE(std::isnan(accumulate(z, 16, all).log_sum));
    z[where] = kInf;
    const RowState s = accumulate(z, 16, all);
    EXPECT_EQ(s.reference, kInf);
    EXPECT_TRUE(std::isnan(s.log_sum));
    EXPECT_EQ(s.argmax, where);
  }
}

TEST_P(RowKernels, OneClassIsCertain) {
  const RowState s = accumulate({-7.25f}, 192, {SumKind::shifted});
  EXPECT_EQ(s.reference, -7.25f);
  EXPECT_EQ(s.log_sum, 0);
  EXPECT_EQ(s.entropy, 0);
}

}  // namespace
}  // namespace logitless::cpu
