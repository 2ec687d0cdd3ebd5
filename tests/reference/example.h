// SPDX-License-Identifier: Apache-2.0
// One small loss problem that owns its data, the ops over it, and the scalar whose gradients
// Backward computes:
//   objective = sum_i grad_loss_i loss_i + grad_lse_i lse_i + grad_target_logit_i z_it +
//   grad_entropy_i H_i
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/reference/reference.h"

namespace logitless::reference {

struct Example {
  bool linear = true;
  int64_t tokens = 4, columns = 5, hidden = 3;
  std::vector<float> input, weight, bias;  // [N, D] [V, D] [V]; no bias where empty
  std::vector<float> logits;               // [N, V]; the ops on given logits
  std::vector<int64_t> target;             // [N]
  LossOptions options{};
  // Absent where empty.
  std::vector<float> token_weight, vocab_weight;                 // [N] [V or vocab_total]
  std::vector<float> normalizer;                                 // [1]
  std::vector<float> temperature;                                // [N]
  std::vector<float> grad_loss;                                  // [N] or [1]
  std::vector<float> grad_lse, grad_target_logit, grad_entropy;  // [N] each
  std::vector<float> row_reference, row_log_sum, entropy;        // [N] each, for Backward
  bool accumulate = false;
  std::vector<float> old_weight, old_bias;  // [V, D] [V] what accumulating adds to

  bool of_probabilities() const { return options.input_kind == InputKind::probabilities; }
};

// Data on a grid of 1/32, so that small perturbations are exact in f32.
Example linear_example(int64_t tokens, int64_t columns, int64_t hidden);
Example logits_example(int64_t tokens, int64_t columns);
// The same problem with its logits given; needs default softcap, scale and temperature to be the
// same loss.
std::vector<double> logits_of(const Example& example);  // [N, V] raw

TensorView view_of(const std::vector<float>& values, int64_t rows, int64_t columns);
TensorView view_of(const std::vector<float>& values);
TensorView view_of(const std::vector<int64_t>& values);

// Ops over the example's data, asking for everything it can give; output views have no memory
// behind them.
template <class Op>
Op make_op(const Example& example);

// By linear or not: the outputs of the Forward, Backward and ForwardBackward op. Fails the test on
// an error.
using Values = std::map<std::string, std::vector<double>>;
Values forward(const Example& example);
Values backward(const Example& example);
Values forward_backward(const Example& example);

double objective(const Example& example);

// |a - b| <= tolerance max(1, |b|) for every element; NaN equals NaN.
void expect_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                 const std::string& what);

}  // namespace logitless::reference
