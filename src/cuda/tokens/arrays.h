// SPDX-License-Identifier: Apache-2.0
// What kernels know of a call's tokens, in device memory: which count, their compacted order, the
// map of each, the factor common to all gradients.
#pragma once

#include <cstdint>

#include "src/row/coefficients.h"

namespace logitless::cuda {

// Over all tokens.
struct TokenScalars {
  float zero, one;             // for the matrix library
  int32_t weight_is_infinite;  // 0 at first; set by a linear op with smoothing that finds one
  int32_t valid;               // tokens that count and are compacted
  // Targets outside the vocabulary where that is an error: loss NaN, gradient 0.
  int32_t outside;
  int32_t empty_mean;
  // Left out of every dz; the f32 sums are multiplied by it before they are rounded.
  float gradient_scale;
  float inv_gradient_scale;  // 0 where gradient_scale is 0
  float upstream;            // g_i / gradient_scale where that is the same for every row
  int32_t counted;           // tokens that count, also those without a gradient
  double normalizer;
  LossConstants constants;
};

// What a token's own temperature makes of the map from raw to z (MapFactors); NaN where the
// temperature is not allowed.
struct alignas(16) TokenMap {
  float slope, outward, outward_low, backward;
  float inverse, inverse_low;  // 1 / temperature in two parts
  float temperature, unused;
};

// Sums of a block of tokens_per_block tokens, when more than one_launch_tokens are prepared.
struct TokenBlock {
  int32_t valid, outside, counted;
  float coolest;  // the least temperature, where each token has one
  // The largest |a| w, the largest |g| and the largest gradient of a statistic.
  float weights, upstream, statistics;
  double normalizer, class_weight_sum;
};
constexpr int tokens_per_block = 8192, one_launch_tokens = 65536;

// In the workspace, on the device.
struct Tokens {
  int64_t total = 0;  // N
  // [N]  indices: the tokens that count, ascending, then the others
  int32_t* row = nullptr;
  // By token, where needed: `inactive` is 1 where a token counts and has no gradient, `map` is its
  // map.
  uint8_t* inactive = nullptr;  // [N]
  TokenMap* map = nullptr;      // [N]
  int32_t* place = nullptr;     // [N]  of a token that counts: the number of those before it
  // Of the first scalars->valid tokens; behind them are -1 and 0.
  int32_t* target = nullptr;       // [N]  the column in the views, or -1 if another shard has it
  float* target_weight = nullptr;  // [N]  c_t
  float* token_weight = nullptr;   // [N]  a_i
  TokenScalars* scalars = nullptr;
  TokenBlock* blocks = nullptr;  // [token_blocks]
};

}  // namespace logitless::cuda
