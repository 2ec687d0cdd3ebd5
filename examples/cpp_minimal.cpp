// SPDX-License-Identifier: Apache-2.0
// This program takes one step of gradient descent on a language model's head. With zero weights
// every token costs exactly log V; after the step the loss is lower. docs/cpp.md shows it whole.
#include <logitless/logitless.h>

#include <cmath>
#include <cstdio>
#include <new>
#include <random>

using namespace logitless;

constexpr int64_t N = 64, D = 32, V = 1000;             // tokens, hidden size, vocabulary
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
  const std::align_val_t alignment{size.alignment};
  void* memory = operator new(size.recommended, alignment);
  if (status.ok()) status = run(op, {memory, size.recommended}, {});
  operator delete(memory, alignment);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message());
  return status.ok();
}

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& x : input) x = normal(random);
  for (int32_t& t : target) t = static_cast<int32_t>(random() % V);

  float before = 0, after = 0;
  if (!loss_and_gradient(&before)) return 1;
  for (int64_t k = 0; k < V * D; ++k) weight[k] -= grad_weight[k];
  if (!loss_and_gradient(&after)) return 1;
  const double log_v = std::log(double(V));
  std::printf("loss %.4f, log V %.4f, loss after the step %.4f\n", before, log_v, after);
  return std::abs(before - log_v) < 1e-5 && after < before - 0.1 ? 0 : 1;
}
