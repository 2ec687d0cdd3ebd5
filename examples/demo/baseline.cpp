// SPDX-License-Identifier: Apache-2.0
// Counting language models. The pairs of the training part are sorted, so that a pair's count is a
// binary search.
#include "examples/demo/baseline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace logitless::cli::demo {
namespace {

uint64_t pair_of(Token first, Token second) {
  return static_cast<uint64_t>(first) << 32 | static_cast<uint32_t>(second);
}

std::vector<uint64_t> sorted_pairs(const std::vector<Token>& words) {
  std::vector<uint64_t> pairs(words.size() - 1);
  for (size_t i = 0; i + 1 < words.size(); ++i) pairs[i] = pair_of(words[i], words[i + 1]);
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

}  // namespace

Baselines measure_baselines(const Text& text, std::span<const int64_t> heldout_at) {
  const std::vector<uint64_t> pairs = sorted_pairs(text.train);
  const auto vocab = static_cast<double>(text.vocab());
  const auto words = static_cast<double>(text.train.size());
  struct Counts {
    double pair, first;
  };
  std::vector<Counts> counts;
  double log_unigram = 0;
  for (const int64_t i : heldout_at) {
    const Token first = text.heldout[static_cast<size_t>(i - 1)];
    const Token second = text.heldout[static_cast<size_t>(i)];
    log_unigram += std::log((static_cast<double>(text.count[static_cast<size_t>(second)]) + 1) /
                            (words + vocab));
    const auto [low, high] = std::equal_range(pairs.begin(), pairs.end(), pair_of(first, second));
    counts.push_back({static_cast<double>(high - low),
                      static_cast<double>(text.count[static_cast<size_t>(first)])});
  }
  const auto size = static_cast<double>(heldout_at.size());
  Baselines result{.unigram = std::exp(-log_unigram / size),
                   .bigram = std::numeric_limits<double>::infinity()};
  for (double k = 1; k > 1e-6; k /= 2) {
    double log_bigram = 0;
    for (const Counts& c : counts) log_bigram += std::log((c.pair + k) / (c.first + k * vocab));
    const double perplexity = std::exp(-log_bigram / size);
    if (perplexity < result.bigram) {
      result.bigram = perplexity;
      result.k = k;
    }
  }
  return result;
}

}  // namespace logitless::cli::demo
