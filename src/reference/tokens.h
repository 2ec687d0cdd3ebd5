// SPDX-License-Identifier: Apache-2.0
// These are the tokens of a loss op: which count, and the constants of each.
#pragma once

#include <vector>

#include "src/reference/reference.h"

namespace logitless::reference {

// A column that is chosen of a token, by its place in `ids`.
struct Chosen {
  int64_t column = -1;  // it is counted in the views; -1 if it is absent or another shard has it
  double gradient = 0;  // it is 0 where the column is absent
};

struct Token {
  bool counts = false;      // it is neither ignored nor, by out_of_range = ignore, out of range
  bool active = true;       // in Backward, some upstream gradient is not exactly 0
  int64_t target = -1;      // it is counted in the whole vocabulary
  int64_t column = -1;      // it is counted in the views; -1 if another shard has it
  double class_weight = 1;  // it is c_t
  double token_weight = 1;  // it is a_i
  double upstream = 1;      // it is g_i
  double temperature = 1;   // it is NaN where the one given is none
  double teacher_temperature = 1;  // the same; LinearDivergence has it
  double grad_lse = 0, grad_target_logit = 0, grad_entropy = 0;
  // These are as Forward wrote them, where the op has them.
  double row_reference = 0, row_log_sum = 0, entropy = 0;
  double teacher_row_reference = 0, teacher_row_log_sum = 0, slope_mean = 0;
  std::vector<Chosen> chosen{};  // [K], or as long as the token's list
  int64_t first_chosen = 0;      // so many are chosen of the tokens before it
};

struct Tokens {
  std::vector<Token> token;          // [N]
  std::vector<double> class_weight;  // [V]  it is of the views' columns
  double class_weight_sum = 0;       // it is over the whole vocabulary
  int64_t counted = 0;               // so many tokens count
  int64_t active = 0;                // so many of them have a gradient
  double normalizer = 1;             // the mean divides by it; for none and sum it is 1
  double normalizer_error = 0;       // it is relative, and comes of summing class weights in f32
  bool empty_mean = false;           // a mean has a normalizer of exactly 0
  double upstream_scale = 0;     // it is the largest |upstream gradient| of any token or statistic
  double steepest = 0;           // it is the largest |logit_scale| / temperature of a token
  bool bad_temperature = false;  // a token that counts has one
};

// Fails with target_out_of_range where the op says so.
Status read_tokens(const Call& call, Tokens* tokens);

}  // namespace logitless::reference
