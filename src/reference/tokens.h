// SPDX-License-Identifier: Apache-2.0
// The tokens of a loss op: which count, and the constants of each.
#pragma once

#include <vector>

#include "src/reference/reference.h"

namespace logitless::reference {

struct Token {
  bool counts = false;      // neither ignored nor, by out_of_range = ignore, out of range
  bool active = true;       // Backward: some upstream gradient is not exactly 0
  int64_t target = -1;      // in the whole vocabulary
  int64_t column = -1;      // in the views; -1: on another shard
  double class_weight = 1;  // c_t
  double token_weight = 1;  // a_i
  double upstream = 1;      // g_i
  double temperature = 1;   // NaN where the one given is none
  double grad_lse = 0, grad_target_logit = 0, grad_entropy = 0;
  // As Forward wrote them, where the op has them.
  double row_reference = 0, row_log_sum = 0, entropy = 0;
};

struct Tokens {
  std::vector<Token> token;          // [N]
  std::vector<double> class_weight;  // [V] of the views' columns
  double class_weight_sum = 0;       // over the whole vocabulary
  int64_t counted = 0;               // tokens that count
  int64_t active = 0;                // those of them that have a gradient
  double normalizer = 1;             // of the mean; 1 for none and sum
  double normalizer_error = 0;       // relative, of summing class weights in f32
  bool empty_mean = false;           // a mean whose normalizer is exactly 0
  double upstream_scale = 0;         // max over tokens and statistics of |upstream gradient|
  double steepest = 0;               // max over tokens of |logit_scale| / temperature
  bool bad_temperature = false;      // of a token that counts
};

// Fails with target_out_of_range where the op says so.
Status read_tokens(const Call& call, Tokens* tokens);

}  // namespace logitless::reference
