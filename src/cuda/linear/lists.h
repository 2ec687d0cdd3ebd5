// SPDX-License-Identifier: Apache-2.0
// Chosen columns lie in rows or in lists of any length; kernels see both alike: the places of token
// i are [first_i, first_i + count_i) of all of them.
#pragma once

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

struct IdLists {
  TensorView ids;            // [N, K], or [M]
  TensorView offsets;        // [N + 1]  it is absent where ids are rows
  int64_t places = 0;        // it is N K, or M
  int32_t* first = nullptr;  // [N]
  int32_t* count = nullptr;  // [N]  a list whose offsets break the rule has none
  void set(const TensorView& own_ids, const TensorView& own_offsets) {
    ids = own_ids, offsets = own_offsets;
    places = offsets ? ids.shape[0] : ids.shape[0] * ids.shape[1];
  }
};
IdLists place_lists(Arena* arena, const TensorView& ids, const TensorView& offsets, int64_t tokens);
// Finds where each token's places are. Offsets that break the rule set `fault`.
void find_lists(const IdLists& lists, int64_t tokens, const TensorView& fault, Stream* stream);

// Sorts places by their columns; those of one column stay in their order. The arrays are [places];
// what lies in `column` and `place` is brought in order by way of the other two, and the sorted
// arrays are returned.
struct SortedPlaces {
  int32_t *column = nullptr, *place = nullptr;              // [places]
  int32_t *other_column = nullptr, *other_place = nullptr;  // [places]
  int32_t* counts = nullptr;                                // [digits, blocks]
};
SortedPlaces place_sorted(Arena* arena, int64_t places);
// No column is above `largest`.
SortedPlaces sort_places(SortedPlaces arrays, int64_t places, int64_t largest, Stream* stream);

}  // namespace logitless::cuda
