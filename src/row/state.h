// SPDX-License-Identifier: Apache-2.0
// A row's state, computed from its finished sums.
#pragma once

#include <cmath>
#include <cstdint>

#include "src/host_device.h"

namespace logitless {

// What the loss and the gradient of a row need.
struct RowState {
  float reference = 0;           // m, the row maximum or near it
  float log_sum = 0;             // log sum_j exp(z_j - m)
  float target_logit = 0;        // z_t
  float weighted_logit_sum = 0;  // sum_j c_j z_j, only if needed
  float entropy = 0;             // only if requested
  int64_t argmax = -1;           // only if requested
  LOGITLESS_HOST_DEVICE float lse() const { return reference + log_sum; }
  LOGITLESS_HOST_DEVICE float logprob() const {
    const float x = (target_logit - reference) - log_sum;
    return x > 0 ? 0 : x;
  }
  // The largest log-probability, if the reference is the row's maximum; NaN for a row of -inf.
  LOGITLESS_HOST_DEVICE float max_logprob() const {
    const float x = 0 - log_sum;
    return x > 0 ? (log_sum == -INFINITY ? NAN : 0) : x;
  }
};

// Few calls ask for these, and only those have memory for them.
struct RareStatistics {
  float sum_p_squared = 0, mean_logit = 0;
  float rank_logit = 0;  // z_t, with which rank compares
  int64_t rank = -1;
  float mass_above = 0;          // rounding may put it above 1
  float shards_max_logprob = 0;  // in Combine
  bool of_shards = false;
};

struct RowStatistics : RowState, RareStatistics {
  bool target_elsewhere = false;  // in another shard
};

}  // namespace logitless
