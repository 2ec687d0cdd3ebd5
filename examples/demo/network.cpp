// SPDX-License-Identifier: Apache-2.0
// Forward and Backward of the demo's network: Products, and loops over rows. Tasks depend only on
// the shape, so the number of threads changes no bit.
#include "examples/demo/network.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <utility>

#include "src/cpu/thread_pool.h"

namespace logitless::cli::demo {
namespace {

// Small, so that logits start small; embeddings are scaled to a deviation of a half.
constexpr float weight_deviation = 0.02f;
constexpr int64_t task_rows = 32;
constexpr int64_t task_columns = 32;

template <class F>
void for_tasks(int64_t tasks, F&& f) {
  const Executor& executor = cpu::default_executor();
  cpu::for_each_task(executor, executor.num_threads, tasks,
                     [&](int64_t task, int64_t) { f(task); });
}

// Calls f with the rows [first, last) of each task.
template <class F>
void for_rows(int64_t rows, F&& f) {
  for_tasks((rows + task_rows - 1) / task_rows,
            [&](int64_t task) { f(task * task_rows, std::min(rows, (task + 1) * task_rows)); });
}

void add_row(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace

int64_t Parameters::View::size() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Parameters::Parameters(const Shape& s) {
  const auto [V, D, K, H] = s;
  const std::pair<float**, View> entries[] = {
      {&weight, {"weight", {V, D}, nullptr}},
      {&bias, {"bias", {V}, nullptr}},
      {&position, {"position", {K, D}, nullptr}},
      {&hidden_bias, {"hidden_bias", {D}, nullptr}},
      {&unit_weight, {"unit_weight", {H, K * D}, nullptr}},
      {&unit_bias, {"unit_bias", {H}, nullptr}},
      {&unit_output, {"unit_output", {D, H}, nullptr}},
  };
  int64_t total = 0;
  for (const auto& [at, view] : entries) total += view.size();
  all.assign(static_cast<size_t>(total), 0);
  float* next = all.data();
  for (const auto& [at, view] : entries) {
    *at = next;
    if (view.size() > 0) views.push_back({view.name, view.shape, next});
    next += view.size();
  }
}

void initialize(const Shape& s, const std::vector<int64_t>& count, uint64_t seed, Parameters* p) {
  std::mt19937_64 random(seed);
  const auto fill = [&](float* data, int64_t size, float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    for (int64_t i = 0; i < size; ++i) data[i] = normal(random);
  };
  fill(p->weight, s.vocab * s.hidden, weight_deviation);
  std::fill_n(p->position, s.context * s.hidden, 1 / static_cast<float>(s.context));
  if (s.units > 0) {
    const auto inputs = static_cast<float>(s.context * s.hidden);
    fill(p->unit_weight, s.units * s.context * s.hidden, 1 / std::sqrt(inputs));
    fill(p->unit_output, s.hidden * s.units, 1 / std::sqrt(static_cast<float>(s.units)));
  }
  const double words = std::accumulate(count.begin(), count.end(), 0.0);
  for (size_t v = 0; v < count.size(); ++v) {
    p->bias[v] = static_cast<float>(
        std::log((static_cast<double>(count[v]) + 1) / (words + static_cast<double>(s.vocab))));
  }
}

void Network::gather(const Parameters& p, std::span<const Token> context) {
  const int64_t K = shape_.context, D = shape_.hidden;
  x_.resize(static_cast<size_t>(tokens_ * K * D));
  h_.resize(static_cast<size_t>(tokens_ * D));
  for_rows(tokens_, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) {
      float* h = h_.data() + n * D;
      std::copy_n(p.hidden_bias, D, h);
      for (int64_t k = 0; k < K; ++k) {
        const float* word = p.weight + int64_t{context[static_cast<size_t>(n * K + k)]} * D;
        const float* position = p.position + k * D;
        float* x = x_.data() + (n * K + k) * D;
        for (int64_t d = 0; d < D; ++d) {
          x[d] = embedding_scale * word[d];
          h[d] += position[d] * x[d];
        }
      }
    }
  });
}

std::span<const float> Network::forward(const Parameters& p, std::span<const Token> context) {
  const auto [V, D, K, H] = shape_;
  tokens_ = static_cast<int64_t>(context.size()) / K;
  gather(p, context);
  if (H == 0) return h_;
  a_.resize(static_cast<size_t>(tokens_ * H));
  products_.forward({x_.data(), tokens_, K * D}, {p.unit_weight, H, K * D}, false,
                    {a_.data(), tokens_, H});
  for_rows(tokens_, [&, units = H](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) {
      float* a = a_.data() + n * units;
      for (int64_t j = 0; j < units; ++j) a[j] = std::max(0.0f, a[j] + p.unit_bias[j]);
    }
  });
  products_.forward({a_.data(), tokens_, H}, {p.unit_output, D, H}, true, {h_.data(), tokens_, D});
  return h_;
}

void Network::position_gradients(std::span<const float> grad_hidden, Parameters* g) const {
  const int64_t K = shape_.context, D = shape_.hidden;
  for_tasks(K + 1, [&](int64_t k) {
    float* sum = k < K ? g->position + k * D : g->hidden_bias;
    std::fill_n(sum, D, 0.0f);
    for (int64_t n = 0; n < tokens_; ++n) {
      const float* grad = grad_hidden.data() + n * D;
      if (k == K) {
        add_row(grad, D, sum);
        continue;
      }
      const float* x = x_.data() + (n * K + k) * D;
      for (int64_t d = 0; d < D; ++d) sum[d] += grad[d] * x[d];
    }
  });
}

void Network::unit_gradients(const Parameters& p, std::span<const float> grad_hidden,
                             Parameters* g) {
  const auto [V, D, K, H] = shape_;
  const Matrix<const float> grad_h{grad_hidden.data(), tokens_, D};
  grad_a_.resize(static_cast<size_t>(tokens_ * H));
  products_.weight_gradient(grad_h, {a_.data(), tokens_, H}, {g->unit_output, D, H});
  products_.input_gradient(grad_h, {p.unit_output, D, H}, {grad_a_.data(), tokens_, H});
  std::fill_n(g->unit_bias, H, 0.0f);
  for (int64_t n = 0; n < tokens_; ++n) {
    const float* a = a_.data() + n * H;
    float* grad = grad_a_.data() + n * H;
    for (int64_t j = 0; j < H; ++j) grad[j] = a[j] > 0 ? grad[j] : 0;
    add_row(grad, H, g->unit_bias);
  }
  const Matrix<const float> grad_a{grad_a_.data(), tokens_, H};
  products_.weight_gradient(grad_a, {x_.data(), tokens_, K * D}, {g->unit_weight, H, K * D});
  products_.input_gradient(grad_a, {p.unit_weight, H, K * D}, {grad_x_.data(), tokens_, K * D});
}

// Each task handles some columns for all tokens, so no two tasks write one element.
void Network::scatter(std::span<const Token> context, Parameters* g) const {
  const int64_t K = shape_.context, D = shape_.hidden;
  for_tasks((D + task_columns - 1) / task_columns, [&](int64_t task) {
    const int64_t first = task * task_columns, count = std::min(task_columns, D - first);
    for (int64_t i = 0; i < tokens_ * K; ++i) {
      float* to = g->weight + int64_t{context[static_cast<size_t>(i)]} * D + first;
      const float* from = grad_x_.data() + i * D + first;
      for (int64_t d = 0; d < count; ++d) to[d] += embedding_scale * from[d];
    }
  });
}

void Network::backward(const Parameters& p, std::span<const Token> context,
                       std::span<const float> grad_hidden, Parameters* g) {
  const int64_t K = shape_.context, D = shape_.hidden;
  grad_x_.assign(static_cast<size_t>(tokens_ * K * D), 0);
  position_gradients(grad_hidden, g);
  if (shape_.units > 0) unit_gradients(p, grad_hidden, g);
  for_rows(tokens_, [&](int64_t first, int64_t last) {
    for (int64_t i = first * K; i < last * K; ++i) {
      const float* grad = grad_hidden.data() + i / K * D;
      const float* position = p.position + i % K * D;
      float* to = grad_x_.data() + i * D;
      for (int64_t d = 0; d < D; ++d) to[d] += position[d] * grad[d];
    }
  });
  scatter(context, g);
}

}  // namespace logitless::cli::demo
