// SPDX-License-Identifier: Apache-2.0
// The order of a token's largest logits, and how the lists of its shards merge (docs/semantics.md,
// "Top-k" and "Combine"), for the CPU and CUDA.
#pragma once

#include <cstdint>

#include "src/host_device.h"

namespace logitless {

struct Listed {
  float logit;
  int64_t id;  // a column of the whole vocabulary; -1 is none
};

// Whether `a` comes first. The id -1 comes after every column. No logit is NaN.
LOGITLESS_HOST_DEVICE inline bool comes_before(const Listed& a, const Listed& b) {
  if (a.logit != b.logit) return a.logit > b.logit;
  return static_cast<uint64_t>(a.id) < static_cast<uint64_t>(b.id);
}

// Returns the rank of entry r of shard s among the entries of all shards. entry_of(s, r) reads one;
// each shard has `count` in order. Entries without a column come last and may share a rank.
template <class EntryOf>
LOGITLESS_HOST_DEVICE inline int64_t place_among_shards(int64_t shards, int64_t count, int64_t s,
                                                        int64_t r, const EntryOf& entry_of) {
  const Listed own = entry_of(s, r);
  int64_t place = r;
  for (int64_t other = 0; other < shards; ++other) {
    if (other == s) continue;
    int64_t first = 0, end = count;  // bisection: the answer is in [first, end]
    while (first < end) {
      const int64_t middle = (first + end) / 2;
      const bool before = comes_before(entry_of(other, middle), own);
      (before ? first : end) = before ? middle + 1 : middle;
    }
    place += first;
  }
  return place;
}

}  // namespace logitless
