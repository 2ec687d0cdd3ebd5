// SPDX-License-Identifier: Apache-2.0
// The demo's model is compared with two counting models on the same words.
//   unigram  p(w)     = (count(w) + 1) / (words + V)
//   bigram   p(w | v) = (count(v, w) + k) / (count(v) + k V)
#pragma once

#include <cstdint>
#include <span>

#include "examples/demo/text.h"

namespace logitless::cli::demo {

struct Baselines {
  double unigram = 0;  // perplexity, like bigram
  double bigram = 0;
  double k = 0;  // added to the counts; the best for the held-out words
};

// heldout_at has the indices of the held-out words that count, each > 0.
Baselines measure_baselines(const Text& text, std::span<const int64_t> heldout_at);

}  // namespace logitless::cli::demo
