// SPDX-License-Identifier: Apache-2.0
// What Forward wrote of shards of the vocabulary, and what it comes to ("Combine" and "Accuracy" of
// docs/semantics.md).
#pragma once

#include <vector>

#include "src/reference/row.h"

namespace logitless::reference {

// Each is [P, N]; those not given are empty.
struct Shards {
  int64_t count = 0, tokens = 0;
  std::vector<double> row_reference, row_log_sum, target_logit;
  std::vector<double> entropy, weighted_logit_sum, sum_p_squared, mean_logit;
  std::vector<int64_t> argmax;
};
Shards read_shards(const Call& call);

// This is a token's state on the whole vocabulary.
struct WholeRow {
  double reference = 0, target_logit = 0;  // they are exact
  Estimate log_sum, entropy, weighted_logit_sum, sum_p_squared, mean_logit;
  std::vector<int64_t> argmax;  // any of these may be named, the first one if there is no choice
};
WholeRow combine(const Shards& shards, int64_t token);

Estimate combined_lse(const WholeRow& row);
Estimate combined_logprob(const WholeRow& row);
Estimate combined_loss(const Call& call, const Tokens& tokens, const Token& token,
                       const WholeRow& row);

}  // namespace logitless::reference
