// SPDX-License-Identifier: Apache-2.0
// Kernels know this of a call's tokens, in device memory: which count, in which order they are
// compacted, the map of each, the factor common to all gradients.
#pragma once

#include <cstdint>

#include "src/row/coefficients.h"

namespace logitless::cuda {

// These numbers are of all tokens.
struct TokenScalars {
  float zero, one;             // the matrix library reads them
  int32_t weight_is_infinite;  // it starts as 0; smoothing of a linear op looks for one
  int32_t valid;               // so many tokens count and are compacted
  // So many targets are outside the vocabulary where that is an error: loss NaN, gradient 0.
  int32_t outside;
  int32_t empty_mean;
  // Every dz is without it; the f32 sums are multiplied by it before they are rounded.
  float gradient_scale;
  float inv_gradient_scale;  // it is 0 where gradient_scale is 0
  float upstream;            // it is g_i / gradient_scale where that is the same for every row
  int32_t counted;           // so many tokens count, those without a gradient too
  double normalizer;
  LossConstants constants;
};

// A token's own temperature makes this of the map from raw to z (MapFactors); it is NaN where the
// temperature is none.
struct alignas(16) TokenMap {
  float slope, outward, outward_low, backward;
  float inverse, inverse_low;  // they are 1 / temperature in two parts
  float temperature, unused;
};

// Holds the sums of a block of tokens_per_block tokens, while more than one_launch_tokens are
// prepared.
struct TokenBlock {
  int32_t valid, outside, counted;
  float coolest;  // it is the least temperature, where each token has one
  // They are the largest |a| w, the largest |g| and the largest gradient of a statistic.
  float weights, upstream, statistics;
  double normalizer, class_weight_sum;
};
constexpr int tokens_per_block = 8192, one_launch_tokens = 65536;

// These arrays lie in the workspace, on the device.
struct Tokens {
  int64_t total = 0;  // it is N
  // [N]  it has the tokens' indices: those that count, ascending, then the others
  int32_t* row = nullptr;
  // These are by token, and there where they are needed: `inactive` is 1 where a token counts and
  // has no gradient, `map` is its map.
  uint8_t* inactive = nullptr;  // [N]
  TokenMap* map = nullptr;      // [N]
  int32_t* place = nullptr;     // [N]  so many tokens before it count, if it counts
  // The first scalars->valid tokens have these; behind them are -1 and 0.
  int32_t* target = nullptr;  // [N]  it is the column in the views, or -1 if another shard has it
  float* target_weight = nullptr;  // [N]  it is c_t
  float* token_weight = nullptr;   // [N]  it is a_i
  TokenScalars* scalars = nullptr;
  TokenBlock* blocks = nullptr;  // [token_blocks]
};

}  // namespace logitless::cuda
