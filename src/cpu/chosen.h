// SPDX-License-Identifier: Apache-2.0
// The chosen columns of a chunk's tokens ("Chosen columns" of docs/semantics.md), each token's in
// the order of the vocabulary, so that a tile finds those that it has.
#pragma once

#include <cstdint>
#include <span>

#include "src/cpu/tokens.h"

namespace logitless::cpu {

struct ChosenColumn {
  int64_t column;  // it is counted in the views
  int32_t k;
  float gradient;  // it is relative to gradient_scale, and 0 in Forward
};

inline int64_t id_at(const TensorView& ids, int64_t i, int64_t k) {
  const int64_t at = i * ids.stride[0] + k * ids.stride[1];
  return ids.dtype == DType::i64 ? ids.as<const int64_t>()[at] : ids.as<const int32_t>()[at];
}
inline float& element_at(const TensorView& matrix, int64_t i, int64_t k) {
  return matrix.as<float>()[i * matrix.stride[0] + k * matrix.stride[1]];
}
void fill(const TensorView& matrix, float value);

// Returns whether an id is a column of the vocabulary, and not absent.
inline bool is_column(const Call& call, int64_t id) { return id >= 0 && id < call.vocab_total(); }
// Returns the column in the views of ids_ik, or -1 where they have none.
int64_t chosen_column(const Call& call, int64_t i, int64_t k);

// Says whether a column that is chosen of token i has a gradient other than 0.
bool has_chosen_gradient(const Call& call, int64_t i);
// Returns the sum of their magnitudes, of those that are finite.
double size_of_chosen_gradients(const Call& call, int64_t i);

class ChosenColumns {
 public:
  static uint64_t bytes(int64_t tokens, int64_t chosen) {
    return padded(tokens * sizeof(int64_t)) + padded(tokens * chosen * sizeof(ChosenColumn));
  }
  ChosenColumns() = default;
  // `memory` has room for so many tokens.
  ChosenColumns(const Call& call, int64_t tokens, char* memory)
      : most_(call.chosen()),
        count_(reinterpret_cast<int64_t*>(memory)),
        column_(reinterpret_cast<ChosenColumn*>(memory + padded(tokens * sizeof(int64_t)))) {}

  // Finds the columns of token `row` of the views, the n-th of the chunk, which lie in the views.
  void find(const Call& call, int64_t n, int64_t row, float inv_gradient_scale) const;
  // Returns those of the chunk's n-th token in [first, first + width), by column and then by k.
  std::span<const ChosenColumn> within(int64_t n, int64_t first, int64_t width) const;

 private:
  int64_t most_ = 0;                // it is K, or 0 where there are none
  int64_t* count_ = nullptr;        // [tokens]
  ChosenColumn* column_ = nullptr;  // [tokens, K]
};

}  // namespace logitless::cpu
