// SPDX-License-Identifier: Apache-2.0
// How kernels read the chosen columns of a token.
#pragma once

#include "src/cuda/linear/lists.h"
#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

// The k-th element of token i in a view that has the layout of the ids.
template <class T>
__device__ inline T* element_of(const IdLists& lists, const TensorView& view, int64_t i,
                                int64_t k) {
  return present(lists.offsets) ? address<T>(view, lists.first[i] + k) : address<T>(view, i, k);
}
__device__ inline int64_t id_of(const IdLists& lists, int64_t i, int64_t k) {
  return lists.ids.dtype == DType::i64 ? *element_of<const int64_t>(lists, lists.ids, i, k)
                                       : *element_of<const int32_t>(lists, lists.ids, i, k);
}

struct ChosenColumn {
  int column;       // of the views, or -1
  bool is_outside;  // the id is an error
  bool is_given;    // not absent; some shard has the column
};
__device__ inline ChosenColumn column_of(const TokenInput& in, int64_t id) {
  if (id >= 0 && id < in.whole()) return {column_of_target(in, id), false, true};
  return {-1, id != -1 && in.options.out_of_range == OutOfRange::error, false};
}
__device__ inline void set_fault(const TensorView& fault, int bits) {
  if (present(fault)) atomicOr(address<int>(fault), bits);
}

}  // namespace logitless::cuda
