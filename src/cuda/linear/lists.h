// SPDX-License-Identifier: Apache-2.0
// Chosen columns come in rows of K or in lists of any length. Kernels treat both as places: token i
// has places [first_i, first_i + count_i).
#pragma once

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

struct IdLists {
  TensorView ids;            // [N, K], or [M]
  TensorView offsets;        // [N + 1]  absent if ids are rows
  int64_t places = 0;        // N K, or M
  int32_t* first = nullptr;  // [N]
  int32_t* count = nullptr;  // [N]  0 for a list with invalid offsets
  void set(const TensorView& own_ids, const TensorView& own_offsets) {
    ids = own_ids, offsets = own_offsets;
    places = offsets ? ids.shape[0] : ids.shape[0] * ids.shape[1];
  }
};
IdLists place_lists(Arena* arena, const TensorView& ids, const TensorView& offsets, int64_t tokens);
// Finds each token's places. Invalid offsets set `fault`.
void find_lists(const IdLists& lists, int64_t tokens, const TensorView& fault, Stream* stream);

// Sorts places by column, stably. `column` and `place` are the input. The sort alternates between
// the two pairs of arrays, and returns with the sorted pair first.
struct SortedPlaces {
  int32_t *column = nullptr, *place = nullptr;              // [places]
  int32_t *other_column = nullptr, *other_place = nullptr;  // [places]
  int32_t* counts = nullptr;                                // [digits, blocks]
};
SortedPlaces place_sorted(Arena* arena, int64_t places);
// No column is above `largest`.
SortedPlaces sort_places(SortedPlaces arrays, int64_t places, int64_t largest, Stream* stream);

}  // namespace logitless::cuda
