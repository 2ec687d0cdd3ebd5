// SPDX-License-Identifier: Apache-2.0
// Cross-entropy on given probabilities p [N, V], with one block for each token that counts:
//   q_j = onehot [j=t] + (eps/V) c_j      loss = -a sum_j q_j log(p_j + floor)
//   draw_j = -g a q_j / (p_j + floor)
// Sums are in double. Without label smoothing only the target's column is read.
#pragma once

#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

constexpr int probability_threads = 256;

// The target distribution of compacted token k.
struct TargetDistribution {
  const TensorView& class_weight;
  int target;
  double onehot, smoothing;
  __device__ TargetDistribution(const TokenInput& in, const Tokens& tokens, int64_t k)
      : class_weight(in.vocab_weight),
        target(tokens.target[k]),
        onehot((1 - static_cast<double>(tokens.scalars->constants.smoothing)) *
               tokens.target_weight[k]),
        smoothing(tokens.scalars->constants.smoothing_per_class) {}
  __device__ double operator()(int64_t j) const {
    double q = smoothing;
    if (smoothing != 0 && present(class_weight)) q *= load(class_weight, j);
    return j == target ? onehot + q : q;
  }
};

__global__ void __launch_bounds__(probability_threads)
    probability_loss_kernel(const __grid_constant__ TensorView probabilities,
                            const __grid_constant__ TokenInput in, Tokens tokens, float* losses,
                            const __grid_constant__ TensorView loss) {
  const int64_t k = blockIdx.x;
  if (k >= tokens.scalars->valid) return;
  const TargetDistribution q(in, tokens, k);
  const int64_t i = tokens.row[k], columns = probabilities.shape[1];
  const double floor = in.options.probability_floor;
  double sum = 0;
  const auto add = [&](int64_t j) {
    const double weight = q(j);
    if (weight == 0) return;
    sum -= weight * logf(static_cast<float>(load(probabilities, i, j) + floor));
  };
  if (q.smoothing != 0) {
    for (int64_t j = threadIdx.x; j < columns; j += probability_threads) add(j);
  } else if (threadIdx.x == 0 && q.target >= 0) {
    add(q.target);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    *loss_of(losses, loss, i) = static_cast<float>(tokens.token_weight[k] * sum);
  }
}

__global__ void __launch_bounds__(probability_threads)
    probability_gradient_kernel(const __grid_constant__ TensorView probabilities,
                                const __grid_constant__ TensorView gradient,
                                const __grid_constant__ TokenInput in, Tokens tokens) {
  const int64_t k = blockIdx.x;
  const TokenScalars& scalars = *tokens.scalars;
  if (k >= scalars.valid) return;
  const TargetDistribution q(in, tokens, k);
  const int64_t i = tokens.row[k], columns = probabilities.shape[1];
  const double floor = in.options.probability_floor;
  const float upstream =
      in.per_row_upstream ? load(in.grad_loss, i) * scalars.inv_gradient_scale : scalars.upstream;
  const double scale =
      -static_cast<double>(upstream) * scalars.gradient_scale * tokens.token_weight[k];
  for (int64_t j = threadIdx.x; j < columns; j += probability_threads) {
    const double weight = q(j);
    float value = 0;
    if (weight != 0)
      value = static_cast<float>(scale * weight / (load(probabilities, i, j) + floor));
    store(gradient, i, j, value);
  }
}

}  // namespace logitless::cuda
