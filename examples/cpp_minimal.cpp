// SPDX-License-Identifier: Apache-2.0
// This program takes one step of gradient descent on a language model's head. With zero weights
// every token costs exactly log V and grad_weight_jd = 1/N sum_i (1/V - [target_i = j]) input_id;
// after the step the loss is lower.
#include "logitless/logitless.h"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

using namespace logitless;

struct alignas(64) CacheLine {
  char bytes[64];
};

constexpr int64_t N = 64, D = 32, V = 1000;
float input[N * D], weight[V * D], grad_weight[V * D];  // [N, D] [V, D] [V, D]
int32_t target[N];                                      // [N]

bool loss_and_gradient(float* loss) {
  const LinearCrossEntropyForwardBackward op{
      .input = matrix_view(input, DType::f32, N, D),
      .weight = matrix_view(weight, DType::f32, V, D),
      .target = vector_view(target, DType::i32, N),
      .loss = scalar_view(loss, DType::f32),
      .grad_weight = matrix_view(grad_weight, DType::f32, V, D)};
  WorkspaceSize size;
  Status status = workspace(op, {}, &size);
  std::vector<CacheLine> memory(size.recommended / sizeof(CacheLine) + 1);
  if (status.ok()) status = run(op, {memory.data(), size.recommended}, {});
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message());
  return status.ok();
}

// Returns the largest difference between grad_weight and its closed form at zero weights.
double gradient_error() {
  std::vector<double> expected(V * D);  // [V, D]
  for (int64_t i = 0; i < N; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      const double dz = (1.0 / V - (target[i] == j)) / N;
      for (int64_t d = 0; d < D; ++d) expected[j * D + d] += dz * input[i * D + d];
    }
  }
  double error = 0;
  for (int64_t k = 0; k < V * D; ++k) {
    const double difference = std::abs(grad_weight[k] - expected[k]);
    if (difference > error) error = difference;
  }
  return error;
}

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& x : input) x = normal(random);
  for (int32_t& t : target) t = static_cast<int32_t>(random() % V);

  float before = 0, after = 0;
  if (!loss_and_gradient(&before)) return 1;
  const double error = gradient_error();
  for (int64_t k = 0; k < V * D; ++k) weight[k] -= grad_weight[k];
  if (!loss_and_gradient(&after)) return 1;
  std::printf("loss %.4f, log V %.4f, gradient error %.1e, loss after the step %.4f\n", before,
              std::log(double(V)), error, after);
  return std::abs(before - std::log(double(V))) < 1e-5 && error < 1e-7 && after < before - 0.1 ? 0
                                                                                               : 1;
}
