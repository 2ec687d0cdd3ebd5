// SPDX-License-Identifier: Apache-2.0
// One small loss problem that owns its data, its ops, and the scalar whose gradients Backward
// computes:
//   objective = sum_i grad_loss_i loss_i + grad_lse_i lse_i + grad_target_logit_i z_it
//               + grad_entropy_i H_i + sum_k grad_logits_at_ik logits_at_ik
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
  std::vector<float> input, weight, bias;  // [N, D] [V, D] [V]; an empty bias is none
  std::vector<float> logits;               // [N, V]; the ops on given logits have it
  std::vector<int64_t> target;             // [N]
  LossOptions options{};
  // An empty vector means an absent tensor.
  std::vector<float> token_weight, vocab_weight;                 // [N] [V or vocab_total]
  std::vector<float> normalizer;                                 // [1]
  std::vector<float> temperature;                                // [N]
  std::vector<float> grad_loss;                                  // [N] or [1]
  std::vector<float> grad_lse, grad_target_logit, grad_entropy;  // each is [N]
  std::vector<float> row_reference, row_log_sum, entropy;        // each is [N], read by Backward
  std::vector<int64_t> ids;                                      // [N, K]
  std::vector<float> grad_logits_at;                             // [N, K], for `ids`
  bool accumulate = false;
  std::vector<float> old_weight, old_bias;  // [V, D] [V], to accumulate into

  // Returns K, the number of chosen columns per token.
  int64_t chosen() const { return ids.empty() ? 0 : static_cast<int64_t>(ids.size()) / tokens; }
  bool of_probabilities() const { return options.input_kind == InputKind::probabilities; }
};

// The data are multiples of 1/32, so that small perturbations are exact in f32.
Example linear_example(int64_t tokens, int64_t columns, int64_t hidden);
Example logits_example(int64_t tokens, int64_t columns);
// Returns the logits of the same problem. To have the same loss, softcap, scale and temperature
// must have their defaults.
std::vector<double> logits_of(const Example& example);  // [N, V], raw

TensorView view_of(const std::vector<float>& values, int64_t rows, int64_t columns);
TensorView view_of(const std::vector<float>& values);
TensorView view_of(const std::vector<int64_t>& values);

// Makes an op over the example's data with the outputs that these tests compare. Output views have
// no memory, except gradients that are accumulated.
template <class Op>
Op make_op(const Example& example);

// Return the outputs of Forward, Backward and ForwardBackward, linear or on given logits as the
// example is. Errors fail the test.
using Values = std::map<std::string, std::vector<double>>;
Values forward(const Example& example);
Values backward(const Example& example);
Values forward_backward(const Example& example);

double objective(const Example& example);

// Expects |a - b| <= tolerance max(1, |b|) for every element; NaN equals NaN.
void expect_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                 const std::string& what);

}  // namespace logitless::reference
