// SPDX-License-Identifier: Apache-2.0
// The demo's batches, its optimizer and its training loop.
#include "examples/demo/train.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "src/cpu/thread_pool.h"

namespace logitless::cli::demo {
namespace {

constexpr double warm_up = 0.03;        // share of the training during which the rate grows
constexpr double last_rate = 0.05;      // the rate ends at this share of the full one
constexpr int64_t adam_task = 1 << 15;  // elements of a task

// Returns every index once in a random order, then once more in another.
class Shuffle {
 public:
  Shuffle(std::vector<int64_t> at, uint64_t seed) : at_(std::move(at)), random_(seed) {}

  std::vector<int64_t> take(int64_t count) {
    std::vector<int64_t> taken;
    while (static_cast<int64_t>(taken.size()) < count) {
      if (next_ == 0) next_ = at_.size();
      const size_t chosen = random_() % next_;
      std::swap(at_[chosen], at_[--next_]);
      taken.push_back(at_[next_]);
    }
    return taken;
  }

 private:
  std::vector<int64_t> at_;
  std::mt19937_64 random_;
  size_t next_ = 0;  // at_[0] to at_[next_ - 1] are not taken yet
};

double step_size(double full, double done) {
  const double warm = std::min(1.0, (done + 1e-3) / warm_up);
  return full * warm * (last_rate + (1 - last_rate) * (1 - done));
}

}  // namespace

std::vector<int64_t> countable(const std::vector<Token>& words) {
  std::vector<int64_t> at;
  for (size_t i = 1; i < words.size(); ++i) {
    if (words[i] != document_start) at.push_back(static_cast<int64_t>(i));
  }
  return at;
}

Batch make_batch(const std::vector<Token>& words, std::span<const int64_t> at, int64_t context) {
  Batch batch;
  batch.context.reserve(at.size() * static_cast<size_t>(context));
  batch.target.reserve(at.size());
  for (const int64_t i : at) {
    for (int64_t k = 1; k <= context; ++k) {
      batch.context.push_back(i >= k ? words[static_cast<size_t>(i - k)] : document_start);
    }
    batch.target.push_back(words[static_cast<size_t>(i)]);
  }
  return batch;
}

Adam::Adam(int64_t size) : m_(static_cast<size_t>(size), 0), v_(static_cast<size_t>(size), 0) {}

void Adam::step(float rate, std::span<const float> g, std::span<float> p,
                const std::function<void(int64_t, int64_t)>& after) {
  constexpr float b1 = 0.9f, b2 = 0.999f, eps = 1e-8f;
  ++steps_;
  const auto n = static_cast<double>(steps_);
  const auto correct_m = static_cast<float>(rate / (1 - std::pow(double{b1}, n)));
  const auto correct_v = static_cast<float>(1 / (1 - std::pow(double{b2}, n)));
  const auto size = static_cast<int64_t>(p.size());
  const Executor& executor = cpu::default_executor();
  const auto update = [&](int64_t task, int64_t) {
    const int64_t first = task * adam_task, count = std::min(adam_task, size - first);
    float* m = m_.data() + first;
    float* v = v_.data() + first;
    const float* grad = g.data() + first;
    float* parameter = p.data() + first;
    for (int64_t i = 0; i < count; ++i) {
      m[i] = b1 * m[i] + (1 - b1) * grad[i];
      v[i] = b2 * v[i] + (1 - b2) * grad[i] * grad[i];
      parameter[i] -= correct_m * m[i] / (std::sqrt(correct_v * v[i]) + eps);
    }
    after(first, count);
  };
  cpu::for_each_task(executor, executor.num_threads, (size + adam_task - 1) / adam_task, update);
}

Model::Model(const Shape& shape, const Text& text, int64_t batch, DType dtype, uint64_t seed)
    : shape_(shape),
      parameters_(shape),
      gradient_(shape),
      network_(shape),
      head_(shape, batch, dtype),
      adam_(static_cast<int64_t>(parameters_.all.size())) {
  initialize(shape, text.count, seed, &parameters_);
  head_.round_weight(parameters_);
}

double Model::gradients(const Batch& batch) {
  const std::span<const float> hidden = network_.forward(parameters_, batch.context);
  const double loss = head_.loss_and_gradients(parameters_, hidden, batch.target, &gradient_);
  network_.backward(parameters_, batch.context, head_.grad_hidden(), &gradient_);
  return loss;
}

double Model::step(const Batch& batch, double rate) {
  const double loss = gradients(batch);
  const int64_t weights = shape_.vocab * shape_.hidden;
  adam_.step(static_cast<float>(rate), gradient_.all, parameters_.all,
             [&](int64_t first, int64_t count) {
               if (first < weights) {
                 head_.round_weight(parameters_, first, std::min(count, weights - first));
               }
             });
  return loss;
}

std::vector<float> Model::losses(const Batch& batch, DeviceType device) {
  return head_.losses(parameters_, hidden(batch.context), batch.target, device);
}

std::span<const float> Model::hidden(std::span<const Token> context) {
  return network_.forward(parameters_, context);
}

TrainResult train(const Text& text, const TrainOptions& options, Model* model,
                  const std::function<void(const TrainProgress&)>& report) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  Shuffle shuffle(countable(text.train), options.seed);
  TrainResult result;
  TrainProgress progress{.steps = options.steps};
  const auto steps = static_cast<double>(options.steps);
  while (progress.done < 1) {
    const Batch batch = make_batch(text.train, shuffle.take(options.batch), model->shape().context);
    const double loss = model->step(batch, step_size(options.learning_rate, progress.done));
    result.loss.push_back(static_cast<float>(loss));
    result.tokens += options.batch;
    ++progress.step;
    // A running mean over about the last hundred steps, not biased towards 0 at the start.
    const double weight = 1 / static_cast<double>(std::min<int64_t>(progress.step, 100));
    progress.loss += weight * (loss - progress.loss);
    progress.seconds = elapsed();
    progress.rate = static_cast<double>(result.tokens) / progress.seconds;
    const double by_steps = options.steps > 0 ? static_cast<double>(progress.step) / steps : 0;
    progress.done = std::min(1.0, std::max(by_steps, progress.seconds / options.seconds));
    report(progress);
  }
  result.seconds = elapsed();
  return result;
}

double perplexity(const std::vector<Token>& words, std::span<const int64_t> at, Model* model) {
  double sum = 0;
  const auto batch = static_cast<size_t>(model->head().batch());
  for (size_t i = 0; i < at.size(); i += batch) {
    const auto some = at.subspan(i, std::min(batch, at.size() - i));
    const auto losses = model->losses(make_batch(words, some, model->shape().context));
    sum += std::accumulate(losses.begin(), losses.end(), 0.0);
  }
  return std::exp(sum / static_cast<double>(at.size()));
}

}  // namespace logitless::cli::demo
