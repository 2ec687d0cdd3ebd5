// SPDX-License-Identifier: Apache-2.0
// Where the tokens' arrays lie: host arithmetic, of which the plans are made too.
#include "src/cuda/tokens/tokens.h"

namespace logitless::cuda {

Tokens place_tokens(Arena* arena, int64_t tokens) {
  Tokens t;
  t.total = tokens;
  t.row = arena->take<int32_t>(tokens);
  t.target = arena->take<int32_t>(tokens);
  t.target_weight = arena->take<float>(tokens);
  t.token_weight = arena->take<float>(tokens);
  t.scalars = arena->take<TokenScalars>(1);
  t.blocks = arena->take<TokenBlock>(token_blocks(tokens));
  return t;
}

}  // namespace logitless::cuda
