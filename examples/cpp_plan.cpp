// SPDX-License-Identifier: Apache-2.0
// A head is trained for many steps of one shape: the step is planned once and run by its plan.
// docs/cpp.md shows a part of this file.
#include <logitless/logitless.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

using namespace logitless;

class Step {
 public:
  // Plans the loss and the gradients of N tokens; the tensors need have no memory yet.
  Status create(int64_t tokens, int64_t hidden, int64_t vocab) {
    const LinearCrossEntropyForwardBackward op{
        .input = matrix_view(nullptr, DType::f32, tokens, hidden),
        .weight = matrix_view(nullptr, DType::f32, vocab, hidden),
        .target = vector_view(nullptr, DType::i32, tokens),
        .loss = scalar_view(nullptr, DType::f32),
        .grad_weight = matrix_view(nullptr, DType::f32, vocab, hidden),
        .options = {.normalizer = 1}};
    WorkspaceSize size;
    Status status = plan_.create(op, {});
    if (status.ok()) status = plan_.size(&size);
    if (status.ok()) memory_.resize(size.minimum + size.alignment), alignment_ = size.alignment;
    return status;
  }
  // The addresses stand in the order in which logitless_op lists the tensors.
  Status run(float* input, float* weight, int32_t* target, float* loss, float* grad_weight,
             double tokens_that_count) {
    void* start = memory_.data();
    size_t bytes = memory_.size();
    std::align(alignment_, 1, start, bytes);
    void* const addresses[] = {input, weight, target, loss, grad_weight};
    return plan_.run(addresses, {start, bytes}, nullptr, tokens_that_count);
  }

 private:
  Plan plan_;
  std::vector<char> memory_;
  size_t alignment_ = 1;
};

int main() {
  constexpr int64_t N = 32, D = 16, V = 500;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> input(N * D), weight(V * D), grad_weight(V * D);
  std::vector<int32_t> target(N);
  for (float& x : input) x = normal(random);
  for (int32_t& t : target) t = static_cast<int32_t>(random() % V);

  Step step;
  Status status = step.create(N, D, V);
  float first = 0, loss = 0;
  for (int k = 0; k < 50 && status.ok(); ++k) {
    target[0] = k % 2 == 0 ? -100 : 7;  // one token less counts at every other step
    const double counted = k % 2 == 0 ? N - 1 : N;
    status =
        step.run(input.data(), weight.data(), target.data(), &loss, grad_weight.data(), counted);
    if (k == 0) first = loss;
    for (size_t i = 0; i < weight.size(); ++i) weight[i] -= grad_weight[i];
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message());
    return 1;
  }
  std::printf("loss %.4f, log V %.4f, after 50 steps %.4f\n", first, std::log(double(V)), loss);
  return std::abs(first - std::log(double(V))) < 1e-4 && loss < 1 ? 0 : 1;
}
