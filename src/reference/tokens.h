// SPDX-License-Identifier: Apache-2.0
// The tokens of a loss op: which count, and each one's values.
#pragma once

#include <vector>

#include "src/reference/reference.h"

namespace logitless::reference {

// A token's chosen column, one for each of its ids.
struct Chosen {
  int64_t column = -1;  // in the views; -1 if it is absent or in another shard
  double gradient = 0;  // 0 if the column is absent
};

struct Token {
  bool counts = false;             // neither ignored nor, by out_of_range = ignore, out of range
  bool active = true;              // in Backward, some upstream gradient is not exactly 0
  int64_t target = -1;             // in the whole vocabulary
  int64_t column = -1;             // in the views; -1 if in another shard
  double class_weight = 1;         // c_t
  double token_weight = 1;         // a_i
  double upstream = 1;             // g_i
  double temperature = 1;          // NaN if the given one is invalid
  double teacher_temperature = 1;  // the same, in LinearDivergence
  double grad_lse = 0, grad_target_logit = 0, grad_entropy = 0;
  // As Forward wrote them, if the op has them.
  double row_reference = 0, row_log_sum = 0, entropy = 0;
  double teacher_row_reference = 0, teacher_row_log_sum = 0, slope_mean = 0;
  std::vector<Chosen> chosen{};  // [K], or as long as the token's list
  int64_t first_chosen = 0;      // the number of earlier tokens' chosen columns
};

struct Tokens {
  std::vector<Token> token;          // [N]
  std::vector<double> class_weight;  // [V]  of the views' columns
  double class_weight_sum = 0;       // over the whole vocabulary
  int64_t counted = 0;               // tokens that count
  int64_t active = 0;                // tokens that count and have a gradient
  double normalizer = 1;             // the divisor of the mean; 1 for none and sum
  double normalizer_error = 0;       // relative, from summing class weights in f32
  bool empty_mean = false;           // the reduction is mean and the normalizer exactly 0
  double upstream_scale = 0;         // the largest |upstream gradient| of any token or statistic
  double steepest = 0;               // the largest |logit_scale| / temperature of a token
  bool bad_temperature = false;      // an active token has an invalid one
};

// Fails if id_offsets are invalid or, by out_of_range = error, a target or id is out of range.
Status read_tokens(const Call& call, Tokens* tokens);

}  // namespace logitless::reference
