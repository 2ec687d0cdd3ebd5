// SPDX-License-Identifier: Apache-2.0
// The chosen columns of a chunk's tokens ("Chosen columns" of docs/semantics.md), sorted by column
// within a token, so that a tile can find those within it.
#pragma once

#include <cstdint>
#include <span>

#include "src/cpu/tokens.h"

namespace logitless::cpu {

struct ChosenColumn {
  int64_t column;  // relative to the views
  int64_t k;
  float gradient;  // relative to gradient_scale; 0 in Forward
};

// Where token i's ids are, and the tensors indexed like them: a row, or a list that starts at
// id_offsets[i].
struct ChosenPlaces {
  int64_t row, step_of_k, count;  // the first element is `row` steps along axis 0
};
inline ChosenPlaces places_of(const Call& call, int64_t i) {
  if (!call.lists()) return {i, 1, call.chosen()};
  const int64_t first = int_at(call.id_offsets, i);
  return {first, 0, int_at(call.id_offsets, i + 1) - first};
}
// The offset of the k-th element, in elements.
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
// Sets every element of an f32 vector or matrix.
void fill(const TensorView& view, float value);
// Fails if id_offsets do not begin at 0, decrease, or do not end at the number of ids.
Status check_id_offsets(const Call& call);

inline bool is_column(const Call& call, int64_t id) { return id >= 0 && id < call.vocab_total(); }
// Returns the column in the views, or -1 if the id is absent or belongs to another shard.
int64_t chosen_column(const Call& call, int64_t id);

// Whether any chosen column of token i has a gradient other than 0.
bool has_chosen_gradient(const Call& call, int64_t i);
// The sum of the finite gradients' magnitudes.
double size_of_chosen_gradients(const Call& call, int64_t i);

class ChosenColumns {
 public:
  // Bytes for a chunk of `tokens` tokens with `chosen` columns in all.
  static uint64_t bytes(int64_t tokens, int64_t chosen) {
    return 2 * padded(tokens * sizeof(int64_t)) + padded(chosen * sizeof(ChosenColumn));
  }
  ChosenColumns() = default;
  // `memory` has bytes(tokens, ...) bytes.
  ChosenColumns(int64_t tokens, char* memory)
      : first_(reinterpret_cast<int64_t*>(memory)),
        count_(reinterpret_cast<int64_t*>(memory + padded(tokens * sizeof(int64_t)))),
        column_(reinterpret_cast<ChosenColumn*>(memory + 2 * padded(tokens * sizeof(int64_t)))) {}

  // Sets where each token's columns begin; token n of the chunk is row rows[n] of the views.
  void begin_chunk(const Call& call, const int64_t* rows, int64_t count) const;
  // Collects the columns of the chunk's n-th token, row `row` of the views, within the views.
  void find(const Call& call, int64_t n, int64_t row, float inv_gradient_scale) const;
  // Returns the columns of the chunk's n-th token in [first, first + width), by column, then by k.
  std::span<const ChosenColumn> within(int64_t n, int64_t first, int64_t width) const;

 private:
  int64_t* first_ = nullptr;        // [tokens]  null where no columns are chosen
  int64_t* count_ = nullptr;        // [tokens]
  ChosenColumn* column_ = nullptr;  // [all chosen columns of the chunk]
};

}  // namespace logitless::cpu
