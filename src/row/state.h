// SPDX-License-Identifier: Apache-2.0
// What is known of a row once its sums are.
#pragma once

#include <cmath>
#include <cstdint>

#include "src/host_device.h"

namespace logitless {

// The loss and the gradient of a row need this of it.
struct RowState {
  float reference = 0;           // it is m, the row maximum or near it
  float log_sum = 0;             // it is log sum_j exp(z_j - m)
  float target_logit = 0;        // it is z_t
  float weighted_logit_sum = 0;  // it is sum_j c_j z_j, made only with label smoothing
  float entropy = 0;             // it is made only where asked for
  int64_t argmax = -1;           // it is made only where asked for
  LOGITLESS_HOST_DEVICE float lse() const { return reference + log_sum; }
  LOGITLESS_HOST_DEVICE float logprob() const {
    const float x = (target_logit - reference) - log_sum;
    return x > 0 ? 0 : x;
  }
  // Returns the largest log-probability, where the reference is the maximum. A row of -inf has
  // none.
  LOGITLESS_HOST_DEVICE float max_logprob() const {
    const float x = 0 - log_sum;
    return x > 0 ? (log_sum == -INFINITY ? NAN : 0) : x;
  }
};

// Few calls ask for these: they have memory only then.
struct RareStatistics {
  float sum_p_squared = 0, mean_logit = 0;
  float rank_logit = 0;  // it is z_t as the rank is counted with it
  int64_t rank = -1;
  float mass_above = 0;          // rounding may bring it above 1
  float shards_max_logprob = 0;  // Combine makes it
  bool of_shards = false;
};

struct RowStatistics : RowState, RareStatistics {
  bool target_elsewhere = false;  // another shard has it
};

}  // namespace logitless
