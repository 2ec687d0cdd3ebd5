// SPDX-License-Identifier: Apache-2.0
// The error bounds of the reference accept correct f32 arithmetic, and reject every small mistake
// below.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "example.h"
#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

// A plain f32 loss and gradient with hooks for mistakes.
struct Mistakes {
  std::function<float(float)> logit = [](float z) { return z; };
  std::function<float(float)> lse = [](float z) { return z; };
  int64_t dropped_columns = 0;
  int64_t dropped_products = 0;
};

struct Single {
  std::vector<double> loss, lse, grad_input;
};

Single compute_in_f32(const Example& e, const Mistakes& wrong) {
  const int64_t v = e.columns, d = e.hidden;
  Single result;
  for (int64_t i = 0; i < e.tokens; ++i) {
    const float* h = e.input.data() + i * d;
    std::vector<float> z(v);
    for (int64_t j = 0; j < v; ++j) {
      float lanes[8] = {};
      for (int64_t k = 0; k + wrong.dropped_products < d; ++k)
        lanes[k % 8] += h[k] * e.weight[j * d + k];
      float sum = 0;
      for (const float lane : lanes) sum += lane;
      z[j] = wrong.logit(sum);
    }
    const float m = *std::max_element(z.begin(), z.end());
    float sum = 0;
    for (int64_t j = 0; j < v - wrong.dropped_columns; ++j) sum += std::exp(z[j] - m);
    const float log_sum = wrong.lse(std::log(sum));
    result.loss.push_back((m - z[e.target[i]]) + log_sum);
    result.lse.push_back(m + log_sum);
    for (int64_t k = 0; k < d; ++k) {
      float gradient = 0;
      for (int64_t j = 0; j < v; ++j) {
        const float p = std::exp((z[j] - m) - log_sum) - (j == e.target[i] ? 1.0f : 0.0f);
        gradient += p * e.weight[j * d + k];
      }
      result.grad_input.push_back(gradient);
    }
  }
  return result;
}

bool within(const Output& expected, const std::vector<double>& values) {
  for (size_t k = 0; k < values.size(); ++k) {
    if (!(std::fabs(values[k] - expected.value[k]) <= expected.bound[k])) return false;
  }
  return true;
}

float to_bf16(float value) { return static_cast<float>(bf16_to_double(round_to_bf16(value))); }

TEST(ReferenceMistakes, HonestArithmeticPassesAndMistakesFail) {
  Example e = linear_example(4, 256, 1024);
  e.bias.clear();
  e.options.reduction = Reduction::none;
  std::mt19937 generator(5);
  std::normal_distribution<float> normal;
  for (float& x : e.input) x = normal(generator);
  for (float& w : e.weight) w = normal(generator) / 32;
  decltype(Result::outputs) expected =
      evaluate(make_op<LinearCrossEntropyForwardBackward>(e)).outputs;
  const auto passes = [&](const Mistakes& wrong) {
    const Single single = compute_in_f32(e, wrong);
    return within(expected["loss"], single.loss) && within(expected["lse"], single.lse) &&
           within(expected["grad_input"], single.grad_input);
  };
  EXPECT_TRUE(passes({}));
  EXPECT_FALSE(passes({.logit = to_bf16}));
  EXPECT_FALSE(passes({.lse = to_bf16}));
  EXPECT_FALSE(passes({.dropped_columns = 1}));
  EXPECT_FALSE(passes({.dropped_products = 1}));
}

}  // namespace
}  // namespace logitless::reference
