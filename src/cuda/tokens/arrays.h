// SPDX-License-Identifier: Apache-2.0
// A call's tokens in device memory: which count, their compacted order, the map of each, and the
// factor common to all gradients.
#pragma once

#include <cstdint>

#include "src/row/coefficients.h"

namespace logitless::cuda {

// Values for all tokens.
struct TokenScalars {
  float zero, one;             // alpha and beta of cuBLASLt's products
  int32_t weight_is_infinite;  // initially 0; set by a linear op with smoothing
  int32_t valid;               // the number of compacted tokens
  // Tokens whose target is out of range where that is an error: loss NaN, gradient 0.
  int32_t outside;
  int32_t empty_mean;
  // A common factor that dz leaves out; the f32 sums are multiplied by it before they are rounded.
  float gradient_scale;
  float inv_gradient_scale;  // 0 if gradient_scale is 0
  float upstream;            // g_i / gradient_scale if it is equal for all rows
  int32_t counted;           // tokens that count, including inactive ones
  double normalizer;
  LossConstants constants;
};

// The map from raw to z of a token with its own temperature (MapFactors); NaN if the temperature is
// invalid.
struct alignas(16) TokenMap {
  float slope, outward, outward_low, backward;
  float inverse, inverse_low;  // 1 / temperature in two parts
  float temperature, unused;
};

// Sums of a block of tokens_per_block tokens, if there are more than one_launch_tokens.
struct TokenBlock {
  int32_t valid, outside, counted;
  float coolest;  // the lowest temperature, if each token has one
  // The largest |a| ((1 - eps) |c_t| + (eps/V) sum_j c_j), |g| and gradient of a statistic.
  float weights, upstream, statistics;
  double normalizer, class_weight_sum;
};
constexpr int tokens_per_block = 8192, one_launch_tokens = 65536;

// Arrays in the workspace, on the device.
struct Tokens {
  int64_t total = 0;  // N
  // [N]  indices: the compacted tokens, ascending, then the others
  int32_t* row = nullptr;
  // By token, if needed: `inactive` is 1 if a token counts and has no gradient.
  uint8_t* inactive = nullptr;  // [N]
  TokenMap* map = nullptr;      // [N]
  int32_t* place = nullptr;     // [N]  index among the tokens that count
  // Of the scalars->valid compacted tokens, in order, followed by -1 and 0.
  int32_t* target = nullptr;       // [N]  the column in the views, or -1 if in another shard
  float* target_weight = nullptr;  // [N]  c_t
  float* token_weight = nullptr;   // [N]  a_i
  TokenScalars* scalars = nullptr;
  TokenBlock* blocks = nullptr;  // [token_blocks]
};

}  // namespace logitless::cuda
