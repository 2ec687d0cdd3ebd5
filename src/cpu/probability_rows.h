// SPDX-License-Identifier: Apache-2.0
// CrossEntropy on given probabilities (input_kind = probabilities), a row at a time:
//   loss = -a sum_j q_j log(p_j + floor),   grad_j = -g a q_j / (p_j + floor)
//   q_j = (1 - eps) c_t [j = t] + (eps / V) c_j
#pragma once

#include "src/cpu/tokens.h"

namespace logitless::cpu {

struct ProbabilityRow {
  const TensorView& probabilities;  // [N, V]
  const float* class_weight;        // [V]  null if all are 1
  float floor;
};

float probability_loss(const ProbabilityRow& view, const Tokens& tokens, int64_t k);

// Writes the token's row of `gradient` [N, V], which may be the probabilities themselves.
void probability_gradient(const ProbabilityRow& view, const Tokens& tokens, int64_t k,
                          const TensorView& gradient);

}  // namespace logitless::cpu
