// SPDX-License-Identifier: Apache-2.0
// The layout of the tokens' arrays; host arithmetic that planners use too.
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

Tokens place_tokens(Arena* arena, int64_t tokens, const TokenArrays& arrays) {
  Tokens t;
  t.total = tokens;
  t.row = arena->take<int32_t>(tokens);
  t.target = arena->take<int32_t>(tokens);
  t.target_weight = arena->take<float>(tokens);
  t.token_weight = arena->take<float>(tokens);
  if (arrays.inactive) t.inactive = arena->take<uint8_t>(tokens);
  if (arrays.maps) t.map = arena->take<TokenMap>(tokens);
  if (arrays.places) t.place = arena->take<int32_t>(tokens);
  t.scalars = arena->take<TokenScalars>(1);
  t.blocks = arena->take<TokenBlock>(token_blocks(tokens));
  return t;
}

}  // namespace logitless::cuda
