// SPDX-License-Identifier: Apache-2.0
// What kernels know of a call's tokens, in device memory: which count, in which order they are
// compacted, the map of each, the factor common to all gradients.
#pragma once

#include <cstdint>

#include "src/coefficients.h"

namespace logitless::cuda {

// Numbers of all of them.
struct TokenScalars {
  float zero, one;             // for the matrix library
  int32_t weight_is_infinite;  // 0; a linear op's smoothing looks
  int32_t valid;               // tokens that count, compacted
  int32_t outside;  // targets outside the vocabulary where that is an error: loss NaN, gradient 0
  int32_t empty_mean;
  float gradient_scale;      // left out of every dz, a factor of the f32 sums before their rounding
  float inv_gradient_scale;  // 0 where gradient_scale is 0
  float upstream;            // g_i / gradient_scale where it is the same for every row
  int32_t counted;           // tokens that count, those without a gradient too
  double normalizer;
  LossConstants constants;
};

// What a token's own temperature makes of the map from raw to z (MapFactors); NaN where it is none.
struct alignas(16) TokenMap {
  float slope, outward, outward_low, backward;
  float inverse, inverse_low;  // 1 / temperature in two parts
  float temperature, unused;
};

// Holds the sums of a block of tokens_per_block tokens, while more than one_launch_tokens are
// prepared.
struct TokenBlock {
  int32_t valid, outside, counted;
  float coolest;                        // the least temperature, where each token has one
  float weights, upstream, statistics;  // the largest |a| w, |g|, statistics' gradient
  double normalizer, class_weight_sum;
};
constexpr int tokens_per_block = 8192, one_launch_tokens = 65536;

// Device arrays in the workspace.
struct Tokens {
  int64_t total = 0;       // N
  int32_t* row = nullptr;  // [N]  index of the token: those that count, ascending, then the others
  // By token, where there are such: 1 where it counts and has no gradient; its map.
  uint8_t* inactive = nullptr;  // [N]
  TokenMap* map = nullptr;      // [N]
  int32_t* place = nullptr;     // [N]  how many before it count, of one that counts
  // The first scalars->valid have these; behind them are -1 and 0:
  int32_t* target = nullptr;       // [N]  column in the views; -1: on another shard
  float* target_weight = nullptr;  // [N]  c_t
  float* token_weight = nullptr;   // [N]  a_i
  TokenScalars* scalars = nullptr;
  TokenBlock* blocks = nullptr;  // [token_blocks]
};

}  // namespace logitless::cuda
