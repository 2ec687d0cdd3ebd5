// SPDX-License-Identifier: Apache-2.0
// Where the tokens' arrays lie: host arithmetic, of which the plans are made too.
#include "src/cuda/tokens.h"

namespace logitless::cuda {

Tokens place_tokens(Arena* arena, int64_t tokens) {
  const int64_t blocks = blocks_for(tokens, tokens_per_block);
  Tokens t;
  t.total = tokens;
  t.row = arena->take<int32_t>(tokens);
  t.target = arena->take<int32_t>(tokens);
  t.target_weight = arena->take<float>(tokens);
  t.token_weight = arena->take<float>(tokens);
  t.scalars = arena->take<TokenScalars>(1);
  t.block_valid = arena->take<int32_t>(blocks);
  t.block_outside = arena->take<int32_t>(blocks);
  t.block_normalizer = arena->take<double>(blocks);
  t.block_largest = arena->take<float>(3 * blocks);
  return t;
}

}  // namespace logitless::cuda
