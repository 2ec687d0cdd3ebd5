// SPDX-License-Identifier: Apache-2.0
// The largest logits of a chunk's tokens ("Top-k" of docs/semantics.md), as far as one thread has
// seen them. A list is a heap, whose first entry is the last in order: what is less is nothing new.
#pragma once

#include <cstdint>

#include "src/cpu/tokens.h"
#include "src/row/top.h"

namespace logitless::cpu {

class TopLists {
 public:
  static uint64_t bytes(int64_t tokens, int64_t count) {
    return padded(tokens * sizeof(int64_t)) + padded(tokens * count * sizeof(Listed));
  }
  // `memory` has room for so many tokens.
  TopLists(const Call& call, int64_t tokens, char* memory)
      : most_(call.listed()),
        count_(reinterpret_cast<int64_t*>(memory)),
        entry_(reinterpret_cast<Listed*>(memory + padded(tokens * sizeof(int64_t)))) {}

  void clear(int64_t tokens) const;
  // Adds the logits z [width] of the chunk's n-th token, of columns from `id` on.
  void add(int64_t n, const float* z, int64_t width, int64_t id) const;
  // Adds what another thread has of it.
  void add(int64_t n, const TopLists& other) const;
  // Writes the list of the n-th token, in order and for good, to row i.
  void write(const Call& call, int64_t n, int64_t i) const;

 private:
  void push(int64_t n, const Listed& entry) const;

  int64_t most_;
  int64_t* count_;  // [tokens]
  Listed* entry_;   // [tokens, k]
};

// Writes that no token has a list.
void clear_lists(const Call& call);
// Writes the list of row i, which holds a NaN.
void write_without_order(const Call& call, int64_t i);
// Writes the list of row i that its shards' lists come to.
void combine_lists(const Call& call, int64_t i);

}  // namespace logitless::cpu
