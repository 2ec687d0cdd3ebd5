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
  int64_t k;
  float gradient;  // it is relative to gradient_scale, and 0 in Forward
};

// What token i has in `ids` and in what goes with it: a row, or a list from id_offsets[i] on.
struct ChosenPlaces {
  int64_t row, step_of_k, count;  // `row` steps along the first axis come before it
};
inline ChosenPlaces places_of(const Call& call, int64_t i) {
  if (!call.lists()) return {i, 1, call.chosen()};
  const int64_t first = int_at(call.id_offsets, i);
  return {first, 0, int_at(call.id_offsets, i + 1) - first};
}
// Returns where the k-th of these is, in elements.
inline int64_t element_of(const TensorView& view, const ChosenPlaces& places, int64_t k) {
  return places.row * view.stride[0] + k * view.stride[places.step_of_k];
}
inline int64_t id_at(const TensorView& ids, const ChosenPlaces& places, int64_t k) {
  const int64_t at = element_of(ids, places, k);
  return ids.dtype == DType::i64 ? ids.as<const int64_t>()[at] : ids.as<const int32_t>()[at];
}
inline float& element_at(const TensorView& view, const ChosenPlaces& places, int64_t k) {
  return view.as<float>()[element_of(view, places, k)];
}
// Fills logits_at where no token has one.
void fill(const TensorView& view, float value);
// Fails where id_offsets do not begin at 0, fall, or do not end with the ids.
Status check_id_offsets(const Call& call);

// Returns whether an id is a column of the vocabulary, and not absent.
inline bool is_column(const Call& call, int64_t id) { return id >= 0 && id < call.vocab_total(); }
// Returns the column in the views of an id, or -1 where they have none.
int64_t chosen_column(const Call& call, int64_t id);

// Says whether a column that is chosen of token i has a gradient other than 0.
bool has_chosen_gradient(const Call& call, int64_t i);
// Returns the sum of their magnitudes, of those that are finite.
double size_of_chosen_gradients(const Call& call, int64_t i);

class ChosenColumns {
 public:
  // Counts the bytes for a chunk of tokens, which have so many columns together.
  static uint64_t bytes(int64_t tokens, int64_t chosen) {
    return 2 * padded(tokens * sizeof(int64_t)) + padded(chosen * sizeof(ChosenColumn));
  }
  ChosenColumns() = default;
  // `memory` has room for so many tokens.
  ChosenColumns(int64_t tokens, char* memory)
      : first_(reinterpret_cast<int64_t*>(memory)),
        count_(reinterpret_cast<int64_t*>(memory + padded(tokens * sizeof(int64_t)))),
        column_(reinterpret_cast<ChosenColumn*>(memory + 2 * padded(tokens * sizeof(int64_t)))) {}

  // Says where the columns of the chunk's tokens, rows [count] of the views, go.
  void begin_chunk(const Call& call, const int64_t* rows, int64_t count) const;
  // Finds the columns of token `row` of the views, the n-th of the chunk, which lie in the views.
  void find(const Call& call, int64_t n, int64_t row, float inv_gradient_scale) const;
  // Returns those of the chunk's n-th token in [first, first + width), by column and then by k.
  std::span<const ChosenColumn> within(int64_t n, int64_t first, int64_t width) const;

 private:
  int64_t* first_ = nullptr;        // [tokens]  it is null where there are no columns
  int64_t* count_ = nullptr;        // [tokens]
  ChosenColumn* column_ = nullptr;  // [what the chunk's tokens have]
};

}  // namespace logitless::cpu
