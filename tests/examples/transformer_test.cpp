// SPDX-License-Identifier: Apache-2.0
// The mathematics of examples/transformer.h: gradients against finite differences of the loss, in
// double; the trained model's gradients, whose head is the library's, against those; that no token
// sees a later one; and AdamW. examples/CMakeLists.txt tests the training.
#include "examples/transformer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace example {
namespace {

// Two sequences of five tokens; the width is no multiple of what a loop takes at a time.
constexpr int64_t sequences = 2;
Shape small(bool tied, int64_t heads) {
  return {.vocab = 11, .hidden = 10, .heads = heads, .context = 5, .tied = tied};
}

std::vector<int32_t> draw_tokens(const Shape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(sequences * shape.context));
  for (int32_t& token : tokens) {
    token = static_cast<int32_t>(random() % static_cast<uint64_t>(shape.vocab));
  }
  return tokens;
}

// Moves every gain away from 1 and every embedding from 0, where a mistake would not show.
template <class T>
void disturb(Parameters<T>* parameters) {
  parameters->draw(3);
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal(0, 0.3f);
  for (T& value : parameters->all) value += normal(random);
}

// Returns the mean loss and, if the pointers are not null, the gradients of h [N, D] and of the
// head.
double head_loss(const Shape& shape, const Parameters<double>& p, const std::vector<double>& h,
                 const std::vector<int32_t>& next, std::vector<double>* grad_h = nullptr,
                 double* grad_head = nullptr) {
  const int64_t D = shape.hidden, V = shape.vocab, N = static_cast<int64_t>(next.size());
  if (grad_h != nullptr) grad_h->assign(h.size(), 0);
  double loss = 0;
  for (int64_t n = 0; n < N; ++n) {
    std::vector<double> probability(static_cast<size_t>(V));
    double sum = 0;
    for (int64_t v = 0; v < V; ++v) {
      for (int64_t d = 0; d < D; ++d) probability[v] += h[n * D + d] * p.head[v * D + d];
      sum += probability[v] = std::exp(probability[v]);
    }
    loss -= std::log(probability[next[n]] / sum) / static_cast<double>(N);
    for (int64_t v = 0; grad_h != nullptr && v < V; ++v) {
      const double dz = (probability[v] / sum - (v == next[n])) / static_cast<double>(N);
      for (int64_t d = 0; d < D; ++d) {
        (*grad_h)[n * D + d] += dz * p.head[v * D + d];
        grad_head[v * D + d] += dz * h[n * D + d];
      }
    }
  }
  return loss;
}

struct Double {
  explicit Double(const Shape& s) : shape(s), parameters(s), gradient(s), block(s) {}
  double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& next) {
    return head_loss(shape, parameters, block.forward(parameters, tokens), next);
  }
  double gradients(const std::vector<int32_t>& tokens, const std::vector<int32_t>& next) {
    std::vector<double> grad_h;
    const double loss = head_loss(shape, parameters, block.forward(parameters, tokens), next,
                                  &grad_h, gradient.head);
    block.backward(parameters, tokens, grad_h, &gradient);
    return loss;
  }

  Shape shape;
  Parameters<double> parameters, gradient;
  Block<double> block;
};

void expect_gradients_of_differences(const Shape& shape) {
  Double model(shape);
  disturb(&model.parameters);
  const std::vector<int32_t> tokens = draw_tokens(shape, 1), next = draw_tokens(shape, 2);
  model.gradients(tokens, next);
  for (size_t i = 0; i < model.parameters.views.size(); ++i) {
    const auto& view = model.parameters.views[i];
    double largest = 0;
    for (int64_t k = 0; k < view.size; ++k) {
      constexpr double step = 1e-5;
      const double value = view.data[k];
      view.data[k] = value + step;
      const double above = model.loss(tokens, next);
      view.data[k] = value - step;
      const double below = model.loss(tokens, next);
      view.data[k] = value;
      const double expected = (above - below) / (2 * step);
      largest = std::max(largest, std::abs(expected));
      ASSERT_NEAR(model.gradient.views[i].data[k], expected, 1e-8 + 1e-6 * std::abs(expected))
          << view.name << "[" << k << "]";
    }
    EXPECT_TRUE(view.size == 0 || largest > 1e-3) << view.name << ": nothing was compared";
  }
}

TEST(TransformerGradients, AreTheDifferencesOfTheLoss) {
  expect_gradients_of_differences(small(false, 2));
}

TEST(TransformerGradients, AreThoseOfATiedHeadToo) {
  expect_gradients_of_differences(small(true, 1));
}

TEST(TransformerGradients, WithTheLibrarysHeadAreTheSame) {
  for (const bool tied : {false, true}) {
    const Shape shape = small(tied, 2);
    const std::vector<int32_t> tokens = draw_tokens(shape, 1), next = draw_tokens(shape, 2);
    Model model(shape, 1);
    disturb(&model.parameters);
    Double expected(shape);
    for (size_t k = 0; k < model.parameters.all.size(); ++k) {
      expected.parameters.all[k] = double{model.parameters.all[k]};
    }
    model.gradients(tokens, next);  // nothing of it may remain in the next call
    EXPECT_NEAR(double{model.gradients(tokens, next)}, expected.gradients(tokens, next), 2e-6);
    EXPECT_NEAR(double{model.loss(tokens, next)}, expected.loss(tokens, next), 2e-6);
    for (size_t k = 0; k < model.gradient.all.size(); ++k) {
      ASSERT_NEAR(double{model.gradient.all[k]}, expected.gradient.all[k], 2e-6) << k;
    }
  }
}

TEST(TransformerAttention, SeesNoLaterTokenAndNoOtherSequence) {
  const Shape shape = small(true, 2);
  Double model(shape);
  disturb(&model.parameters);
  const std::vector<int32_t> tokens = draw_tokens(shape, 1);
  const std::vector<double> before = model.block.forward(model.parameters, tokens);
  const auto context = static_cast<size_t>(shape.context);
  for (const size_t changed : {size_t{2}, context + 1}) {
    std::vector<int32_t> others = tokens;
    others[changed] = (tokens[changed] + 1) % static_cast<int32_t>(shape.vocab);
    const std::vector<double> after = model.block.forward(model.parameters, others);
    for (size_t k = 0; k < before.size(); ++k) {
      const size_t n = k / static_cast<size_t>(shape.hidden);
      const bool sees = n >= changed && n / context == changed / context;
      EXPECT_EQ(before[k] != after[k], sees) << "token " << n << " of " << changed;
    }
  }
}

TEST(TransformerAdamW, FollowsItsFormula) {
  std::vector<double> p = {1, -2, 0.5}, m(3), v(3), g(3);
  std::vector<double> expected = p, mean(3), square(3);
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  for (int step = 1; step <= 4; ++step) {
    for (double& value : g) value = normal(random);
    adamw(step, 0.01, 0.1, int64_t{3}, g.data(), m.data(), v.data(), p.data());
    for (size_t i = 0; i < 3; ++i) {
      mean[i] += 0.1 * (g[i] - mean[i]);
      square[i] += 0.05 * (g[i] * g[i] - square[i]);
      const double size = std::sqrt(square[i] / (1 - std::pow(0.95, step))) + 1e-8;
      const double direction = mean[i] / (1 - std::pow(0.9, step)) / size;
      expected[i] = expected[i] * (1 - 0.01 * 0.1) - 0.01 * direction;
      EXPECT_NEAR(p[i], expected[i], 1e-12);
    }
  }
}

}  // namespace
}  // namespace example
