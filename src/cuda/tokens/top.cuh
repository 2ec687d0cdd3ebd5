// SPDX-License-Identifier: Apache-2.0
// Reading and writing an entry of a token's list of largest logits.
#pragma once

#include "src/cuda/tokens/tokens.h"
#include "src/cuda/views.cuh"
#include "src/row/top.h"

namespace logitless::cuda {

__device__ inline Listed entry_of(const TopLists& lists, int64_t i, int64_t r) {
  return {*address<const float>(lists.logits, i, r), load_int(lists.ids, i, r)};
}
__device__ inline void put_entry(const TopLists& lists, int64_t i, int64_t r, const Listed& entry) {
  *address<float>(lists.logits, i, r) = entry.logit;
  if (lists.ids.dtype == DType::i64) {
    *address<int64_t>(lists.ids, i, r) = entry.id;
  } else {
    *address<int32_t>(lists.ids, i, r) = static_cast<int32_t>(entry.id);
  }
}

}  // namespace logitless::cuda
