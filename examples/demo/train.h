// SPDX-License-Identifier: Apache-2.0
// Training draws batches without replacement, runs Forward and Backward, and updates by Adam, with
// a warm-up and a linear decay of its rate.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "examples/demo/head.h"
#include "examples/demo/network.h"
#include "examples/demo/text.h"

namespace logitless::cli::demo {

struct TrainOptions {
  int64_t batch = 1024;
  int64_t steps = 0;  // training ends after these or after `seconds`, whichever comes first
  double seconds = std::numeric_limits<double>::infinity();
  double learning_rate = 0.004;
  uint64_t seed = 1;
};

// A batch is words with their context [N, K], the nearest word first.
struct Batch {
  std::vector<Token> context;
  std::vector<Token> target;  // [N]
};

// Returns the indices of the words of a part that count: all but the first and the starts of
// documents.
std::vector<int64_t> countable(const std::vector<Token>& words);
// Returns the words at these indices; positions before the text's first word count as document
// starts.
Batch make_batch(const std::vector<Token>& words, std::span<const int64_t> at, int64_t context);

// Adam steps by m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p -= rate m' / (sqrt(v') + eps),
// where m', v' are corrected for their bias towards 0.
class Adam {
 public:
  explicit Adam(int64_t size);
  // p and g are [size]. after(first, count) is called on the thread of each finished range.
  void step(float rate, std::span<const float> g, std::span<float> p,
            const std::function<void(int64_t first, int64_t count)>& after);
  uint64_t bytes() const { return 2 * m_.size() * sizeof(float); }

 private:
  int64_t steps_ = 0;
  std::vector<float> m_, v_;
};

class Model {
 public:
  Model(const Shape& shape, const Text& text, int64_t batch, DType dtype, uint64_t seed);

  // Computes the loss and the gradients of one batch, and returns the mean loss.
  double gradients(const Batch& batch);
  double step(const Batch& batch, double rate);  // also takes one step of Adam
  std::vector<float> losses(const Batch& batch, DeviceType device = DeviceType::cpu);
  std::span<const float> hidden(std::span<const Token> context);

  const Shape& shape() const { return shape_; }
  const Head& head() const { return head_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& gradient() const { return gradient_; }
  uint64_t optimizer_bytes() const { return adam_.bytes(); }

 private:
  Shape shape_;
  Parameters parameters_, gradient_;
  Network network_;
  Head head_;
  Adam adam_;
};

struct TrainProgress {
  int64_t step = 0, steps = 0;
  double loss = 0;     // smoothed
  double done = 0;     // from 0 to 1
  double seconds = 0;  // since the start
  double rate = 0;     // tokens a second
};

struct TrainResult {
  std::vector<float> loss;  // of each step
  double seconds = 0;
  int64_t tokens = 0;
};

TrainResult train(const Text& text, const TrainOptions& options, Model* model,
                  const std::function<void(const TrainProgress&)>& report);

// Returns exp of the mean loss of these words.
double perplexity(const std::vector<Token>& words, std::span<const int64_t> at, Model* model);

}  // namespace logitless::cli::demo
