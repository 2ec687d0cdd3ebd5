// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of probability_rows.cuh.
#include "src/cuda/rows/probability_rows.cuh"

#include "src/cuda/rows/logit_rows.h"

namespace logitless::cuda {

void launch_probability_losses(const TensorView& probabilities, const TokenInput& in,
                               const Tokens& tokens, float* losses, const TensorView& loss,
                               Stream* stream) {
  stream->launch("probability_loss", probability_loss_kernel, static_cast<unsigned>(tokens.total),
                 probability_threads, probabilities, in, tokens, losses, loss);
}

void launch_probability_gradient(const TensorView& probabilities, const TensorView& gradient,
                                 const TokenInput& in, const Tokens& tokens, Stream* stream) {
  stream->launch("probability_gradient", probability_gradient_kernel,
                 static_cast<unsigned>(tokens.total), probability_threads, probabilities, gradient,
                 in, tokens);
}

}  // namespace logitless::cuda
