// SPDX-License-Identifier: Apache-2.0
// Helpers of the row kernels' tests: this machine's instruction sets, row lengths, logit maps and
// their formulas in double.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "src/cpu/dispatch.h"
#include "src/cpu/row_kernels.h"

namespace logitless::cpu {

inline constexpr double kU = 0x1p-24;
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::vector<int64_t> counts() {
  std::vector<int64_t> all;
  for (int64_t i = 1; i <= 40; ++i) all.push_back(i);
  for (int64_t i : {63, 64, 65, 127, 192, 255, 257, 1000, 1024, 4097}) all.push_back(i);
  return all;
}

class RowKernels : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(force_target(GetParam().c_str())); }
  void TearDown() override { force_target(nullptr); }
  std::mt19937 random_{7};
  std::vector<float> normal(int64_t count, float scale) {
    std::normal_distribution<float> distribution(0, scale);
    std::vector<float> v(count);
    for (float& x : v) x = distribution(random_);
    return v;
  }
};

inline std::vector<LogitMap> maps() {
  std::vector<LogitMap> all;
  for (const float scale : {1.f, -.7f}) {
    for (const float softcap : {0.f, 30.f, 1.3f}) {
      for (const float temperature : {1.f, .3f}) {
        all.push_back(
            logit_map({.logit_scale = scale, .softcap = softcap, .temperature = temperature}));
      }
    }
  }
  return all;
}

inline double mapped(const LogitMap& map, double raw) {
  double c = raw * map.scale;
  if (map.softcap > 0) c = map.softcap * std::tanh(c / map.softcap);
  return c / map.temperature;
}

inline double slope(const LogitMap& map, double z) {
  const double t = map.softcap > 0 ? z * map.temperature / map.softcap : 0;
  return map.scale / static_cast<double>(map.temperature) * (1 - t * t);
}

}  // namespace logitless::cpu
