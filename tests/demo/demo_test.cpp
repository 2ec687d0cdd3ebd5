// SPDX-License-Identifier: Apache-2.0
// The demo's own mathematics: gradients against finite differences of the loss in double, Adam, and
// the same bits on any number of threads.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "examples/demo/train.h"
#include "src/cpu/thread_pool.h"

namespace logitless::cli::demo {
namespace {

// Makes a text whose words are the numbers of a vocabulary of this size.
Text text_of(int64_t vocab, int64_t tokens, uint64_t seed) {
  Text text;
  std::mt19937_64 random(seed);
  for (int64_t v = 0; v < vocab; ++v) {
    text.words.push_back(fmt::format("w{}", v));
    text.count.push_back(1 + static_cast<int64_t>(random() % 9));
  }
  for (int64_t i = 0; i < tokens; ++i) {
    text.train.push_back(static_cast<Token>(random() % static_cast<uint64_t>(vocab)));
  }
  text.heldout = text.train;
  return text;
}

// The parameters in double, with the names of network.h.
struct Reference {
  Shape shape;
  std::vector<double> weight, bias, position, hidden_bias, unit_weight, unit_bias, unit_output;

  std::vector<double>* find(const std::string& name) {
    const std::pair<const char*, std::vector<double>*> all[] = {
        {"weight", &weight},           {"bias", &bias},
        {"position", &position},       {"hidden_bias", &hidden_bias},
        {"unit_weight", &unit_weight}, {"unit_bias", &unit_bias},
        {"unit_output", &unit_output}};
    for (const auto& [key, values] : all) {
      if (name == key) return values;
    }
    return nullptr;
  }

  std::vector<double> hidden(const Token* context) const {
    const auto [V, D, K, H] = shape;
    std::vector<double> x, h = hidden_bias;
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t d = 0; d < D; ++d) {
        x.push_back(double{embedding_scale} * weight[context[k] * D + d]);
        h[d] += position[k * D + d] * x.back();
      }
    }
    for (int64_t j = 0; j < H; ++j) {
      double a = unit_bias[j];
      for (int64_t i = 0; i < K * D; ++i) a += unit_weight[j * K * D + i] * x[i];
      for (int64_t d = 0; d < D; ++d) h[d] += unit_output[d * H + j] * std::max(a, 0.0);
    }
    return h;
  }

  double mean_loss(const Batch& batch) const {
    const auto [V, D, K, H] = shape;
    double total = 0;
    for (size_t n = 0; n < batch.target.size(); ++n) {
      const std::vector<double> h = hidden(batch.context.data() + n * K);
      double sum = 0, target = 0;
      for (int64_t v = 0; v < V; ++v) {
        double z = bias[v];
        for (int64_t d = 0; d < D; ++d) z += weight[v * D + d] * h[d];
        sum += std::exp(z);
        if (v == batch.target[n]) target = z;
      }
      total += std::log(sum) - target;
    }
    return total / static_cast<double>(batch.target.size());
  }
};

Reference reference_of(Model* model) {
  Reference reference;
  reference.shape = model->shape();
  for (const Parameters::View& view : model->parameters().views) {
    reference.find(view.name)->assign(view.data, view.data + view.size());
  }
  return reference;
}

// Moves all parameters, because a missing bias of 0 would not show.
void disturb(Model* model) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal(0, 0.1f);
  for (float& p : model->parameters().all) p += normal(random);
}

// Compares about `most` elements of every parameter's gradient.
void expect_gradients(const Shape& shape, int64_t tokens, int64_t most) {
  const Text text = text_of(shape.vocab, 4 * tokens, 3);
  Model model(shape, text, tokens, DType::f32, 1);
  disturb(&model);
  std::vector<int64_t> at;
  for (int64_t i = 1; i <= tokens; ++i) at.push_back(i);
  const Batch batch = make_batch(text.train, at, shape.context);
  Reference reference = reference_of(&model);
  EXPECT_NEAR(model.gradients(batch), reference.mean_loss(batch), 1e-5);

  const float* base = model.parameters().all.data();
  for (const Parameters::View& view : model.parameters().views) {
    const float* gradient = model.gradient().all.data() + (view.data - base);
    std::vector<double>& values = *reference.find(view.name);
    const int64_t stride = std::max<int64_t>(1, view.size() / most);
    double largest = 0;
    for (int64_t i = 0; i < view.size(); i += stride) {
      constexpr double step = 1e-6;
      const double value = values[i];
      values[i] = value + step;
      const double above = reference.mean_loss(batch);
      values[i] = value - step;
      const double below = reference.mean_loss(batch);
      values[i] = value;
      const double expected = (above - below) / (2 * step);
      largest = std::max(largest, std::abs(expected));
      EXPECT_NEAR(gradient[i], expected, 2e-6 + 2e-5 * std::abs(expected))
          << view.name << "[" << i << "]";
    }
    EXPECT_GT(largest, 1e-4) << view.name << ": nothing was compared";
  }
}

TEST(DemoGradients, AreThoseOfTheFormula) { expect_gradients({11, 6, 3, 5}, 9, 1 << 20); }

TEST(DemoGradients, HoldWithoutUnits) { expect_gradients({11, 6, 4, 0}, 9, 1 << 20); }

TEST(DemoGradients, HoldOverSeveralTasksAndPanels) { expect_gradients({67, 37, 3, 35}, 41, 60); }

TEST(DemoPerplexity, IsThatOfEveryWord) {
  const Text text = text_of(23, 60, 4);
  Model model({23, 8, 3, 6}, text, 16, DType::f32, 1);
  disturb(&model);
  const std::vector<int64_t> at = countable(text.heldout);
  ASSERT_NE(at.size() % 16, 0u);
  const Batch all = make_batch(text.heldout, at, 3);
  EXPECT_NEAR(std::log(perplexity(text.heldout, at, &model)), reference_of(&model).mean_loss(all),
              1e-5);
}

TEST(DemoBatch, PutsTheNearestWordFirstAndPadsTheStart) {
  const std::vector<Token> words = {5, 6, 7, 8};
  const Batch batch = make_batch(words, std::vector<int64_t>{1, 3}, 3);
  EXPECT_EQ(batch.context, (std::vector<Token>{5, document_start, document_start, 7, 6, 5}));
  EXPECT_EQ(batch.target, (std::vector<Token>{6, 8}));
  EXPECT_EQ(countable({document_start, 4, document_start, 9}), (std::vector<int64_t>{1, 3}));
}

TEST(DemoAdam, FollowsItsFormula) {
  const int64_t size = 100003;  // enough for several tasks
  std::vector<float> p(size, 0), g(size);
  std::vector<double> expected(size, 0), m(size, 0), v(size, 0);
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  Adam adam(size);
  std::vector<int> told(size, 0);
  for (int step = 1; step <= 3; ++step) {
    for (float& value : g) value = normal(random);
    adam.step(0.01f, g, p, [&](int64_t first, int64_t count) {
      for (int64_t i = first; i < first + count; ++i) ++told[i];
    });
    for (int64_t i = 0; i < size; ++i) {
      m[i] = 0.9 * m[i] + 0.1 * g[i];
      v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
      expected[i] -= 0.01 * (m[i] / (1 - std::pow(0.9, step))) /
                     (std::sqrt(v[i] / (1 - std::pow(0.999, step))) + 1e-8);
    }
  }
  for (int64_t i = 0; i < size; ++i) {
    ASSERT_NEAR(p[i], expected[i], 1e-5) << i;
    ASSERT_EQ(told[i], 3) << i;
  }
}

std::vector<float> trained_parameters(int threads, DType dtype) {
  cpu::set_num_threads(threads);
  const Shape shape{300, 40, 4, 36};
  const Text text = text_of(shape.vocab, 3000, 7);
  Model model(shape, text, 96, dtype, 1);
  train(text, {.batch = 96, .steps = 5}, &model, [](const TrainProgress&) {});
  cpu::set_num_threads(0);
  return model.parameters().all;
}

TEST(DemoTraining, GivesTheSameBitsWithAnyNumberOfThreads) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::vector<float> one = trained_parameters(1, dtype);
    EXPECT_EQ(one, trained_parameters(3, dtype));
    EXPECT_EQ(one, trained_parameters(1, dtype));
  }
}

TEST(DemoTraining, LearnsASequenceThatRepeats) {
  Text text = text_of(50, 0, 1);
  for (int64_t i = 0; i < 4000; ++i) text.train.push_back(static_cast<Token>(2 + i * i % 41));
  text.heldout = text.train;
  Model model({50, 32, 4, 16}, text, 64, DType::bf16, 1);
  const TrainResult result = train(text, {.batch = 64, .steps = 300, .learning_rate = 0.003},
                                   &model, [](const TrainProgress&) {});
  EXPECT_EQ(result.loss.size(), 300u);
  EXPECT_GT(result.loss.front(), 3);
  // This loss comes from Forward, not from the training step.
  EXPECT_LT(perplexity(text.heldout, countable(text.heldout), &model), 1.2);
}

}  // namespace
}  // namespace logitless::cli::demo
