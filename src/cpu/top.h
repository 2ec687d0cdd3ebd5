// SPDX-License-Identifier: Apache-2.0
// The largest logits of a chunk's tokens ("Top-k" of docs/semantics.md), of the columns that one
// thread has seen. A list is a heap whose first entry comes last in order, so that most logits are
// rejected by one comparison.
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
  // `memory` has room for the lists of `tokens` tokens.
  TopLists(const Call& call, int64_t tokens, char* memory)
      : most_(call.listed()),
        count_(reinterpret_cast<int64_t*>(memory)),
        entry_(reinterpret_cast<Listed*>(memory + padded(tokens * sizeof(int64_t)))) {}

  void clear(int64_t tokens) const;
  // Adds the logits z [width] of the chunk's n-th token, of the columns from `id` on.
  void add(int64_t n, const float* z, int64_t width, int64_t id) const;
  // Adds the logits that another thread has found.
  void add(int64_t n, const TopLists& other) const;
  // Writes the list of the n-th token, in order, to row i, and destroys the list.
  void write(const Call& call, int64_t n, int64_t i) const;

 private:
  void push(int64_t n, const Listed& entry) const;

  int64_t most_;
  int64_t* count_;  // [tokens]
  Listed* entry_;   // [tokens, k]
};

// Writes an empty list (-inf, id -1) for every token.
void clear_lists(const Call& call);
// Writes the list of row i, whose logits include a NaN.
void write_without_order(const Call& call, int64_t i);
// Merges the lists of row i's shards and writes the result.
void combine_lists(const Call& call, int64_t i);

}  // namespace logitless::cpu
