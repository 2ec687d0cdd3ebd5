// SPDX-License-Identifier: Apache-2.0
// Trains a language model on a text, with a plan for its steps and one for its evaluation:
//     example_cpp_training FILE [STEPS [BELOW]]
// A layer mixes the embeddings of the K tokens before the next, and the embedding is also the head:
//   h = tanh(sum over k of embedding[token k] mix[k])           [N, D]
//   loss = the mean of -log softmax(embedding h)[next token]
// The text's last tenth is held out. With BELOW the program fails unless the loss there ends below
// that. train.cpp trains a transformer on words.
#include <logitless/logitless.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <random>
#include <vector>

using namespace logitless;

constexpr int64_t V = 256;                 // a token is a byte; any tokenizer's will do
constexpr int64_t N = 256, K = 8, D = 32;  // tokens of a run, tokens before each, hidden size

template <int64_t size>
struct Parameter {
  void adam(int step, float rate) {
    rate *= std::sqrt(1 - std::pow(0.99f, step)) / (1 - std::pow(0.9f, step));
    for (int64_t i = 0; i < size; ++i) {
      first[i] += 0.1f * (grad[i] - first[i]);
      second[i] += 0.01f * (grad[i] * grad[i] - second[i]);
      value[i] -= rate * first[i] / (std::sqrt(second[i]) + 1e-8f);
    }
  }
  float value[size], grad[size], first[size], second[size];
};
Parameter<V * D> embedding;           // [V, D]
Parameter<K * D * D> mix;             // [K, D, D]
int32_t before[N * K], target[N];     // [N, K] [N]
float h[N * D], grad_h[N * D], loss;  // [N, D] [N, D] []

// Makes text[at] the target n, or none beyond the text's end: -100 is ignored.
void place(const std::vector<uint8_t>& text, size_t at, int64_t n) {
  target[n] = at < text.size() ? text[at] : -100;
  const size_t from = std::min(at, text.size()) - K;
  for (int64_t k = 0; k < K; ++k) before[n * K + k] = text[from + k];
}

void forward() {
  std::fill_n(h, N * D, 0.0f);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t i = 0; i < K * D; ++i) {
      const float x = embedding.value[before[n * K + i / D] * D + i % D];
      for (int64_t d = 0; d < D; ++d) h[n * D + d] += x * mix.value[i * D + d];
    }
    for (int64_t d = 0; d < D; ++d) h[n * D + d] = std::tanh(h[n * D + d]);
  }
}

// Adds the embedding's part to the head's gradient, which the plan has written.
void backward() {
  std::fill_n(mix.grad, K * D * D, 0.0f);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t d = 0; d < D; ++d) grad_h[n * D + d] *= 1 - h[n * D + d] * h[n * D + d];
    for (int64_t i = 0; i < K * D; ++i) {
      const int64_t at = before[n * K + i / D] * D + i % D;
      for (int64_t d = 0; d < D; ++d) {
        mix.grad[i * D + d] += embedding.value[at] * grad_h[n * D + d];
        embedding.grad[at] += mix.value[i * D + d] * grad_h[n * D + d];
      }
    }
  }
}

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(2);
}

// Returns the mean loss of the held-out text after the last step.
double train(const std::vector<uint8_t>& text, int steps) {
  const LinearCrossEntropyForwardBackward op{
      .input = matrix_view(h, DType::f32, N, D),
      .weight = matrix_view(embedding.value, DType::f32, V, D),
      .target = vector_view(target, DType::i32, N),
      .loss = scalar_view(&loss, DType::f32),
      .grad_input = matrix_view(grad_h, DType::f32, N, D),
      .grad_weight = matrix_view(embedding.grad, DType::f32, V, D)};
  const LinearCrossEntropyForward loss_op{.input = op.input,
                                          .weight = op.weight,
                                          .target = op.target,
                                          .loss = op.loss,
                                          .options = {.reduction = Reduction::sum}};
  Plan step_plan, loss_plan;
  WorkspaceSize step_size, loss_size;
  check(step_plan.create(op, {}));
  check(step_plan.size(&step_size));
  check(loss_plan.create(loss_op, {}));
  check(loss_plan.size(&loss_size));
  const Addresses step_addresses(op);
  const Addresses loss_addresses(loss_op);
  const size_t bytes = std::max(step_size.minimum, loss_size.minimum);
  const std::align_val_t alignment{std::max(step_size.alignment, loss_size.alignment)};
  const Workspace workspace{operator new(bytes, alignment), bytes};  // serves both plans

  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.15f);
  for (float& x : embedding.value) x = normal(random);
  for (float& x : mix.value) x = normal(random);
  const size_t seen = text.size() * 9 / 10;
  double held_out = 0;
  for (int step = 1; step <= steps; ++step) {
    for (int64_t n = 0; n < N; ++n) place(text, K + random() % (seen - K), n);
    forward();
    check(step_plan.run(step_addresses, workspace));
    backward();
    const float rate = 2e-2f * static_cast<float>(steps + 1 - step) / static_cast<float>(steps);
    embedding.adam(step, rate);
    mix.adam(step, rate);
    if (step % 50 != 0 && step != steps) continue;

    const float last = loss;
    held_out = 0;
    for (size_t at = seen; at < text.size(); at += N) {
      for (int64_t n = 0; n < N; ++n) place(text, at + n, n);
      forward();
      check(loss_plan.run(loss_addresses, workspace));
      held_out += double(loss) / double(text.size() - seen);
    }
    std::printf("step %4d: loss %.4f, of held-out text %.4f\n", step, last, held_out);
  }
  operator delete(workspace.data, alignment);
  return held_out;
}

int main(int argc, char** argv) {
  std::ifstream file(argc > 1 ? argv[1] : "", std::ios::binary);
  std::vector<uint8_t> text;
  for (char c; file.get(c);) text.push_back(static_cast<uint8_t>(c));
  const int steps = argc > 2 ? std::atoi(argv[2]) : 500;
  const double below = argc > 3 ? std::atof(argv[3]) : INFINITY;
  if (text.size() < 10 * K || steps < 1) {
    std::fprintf(stderr, "usage: %s FILE [STEPS [BELOW]]; FILE has 80 bytes or more\n", argv[0]);
    return 2;
  }
  return train(text, steps) < below ? 0 : 1;
}
