// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/top.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "src/cpu/chosen.h"
#include "src/cpu/row_kernels.h"

namespace logitless::cpu {
namespace {

constexpr float least = -std::numeric_limits<float>::infinity();

// Row i of a list's view.
ChosenPlaces row(int64_t i) { return {i, 1, 0}; }

void write_entry(const Call& call, int64_t i, int64_t r, const Listed& entry) {
  const TensorView& ids = call.top_ids;
  const int64_t at = i * ids.stride[0] + r * ids.stride[1];
  element_at(call.top_logits, row(i), r) = entry.logit;
  if (ids.dtype == DType::i64) {
    ids.as<int64_t>()[at] = entry.id;
  } else {
    ids.as<int32_t>()[at] = static_cast<int32_t>(entry.id);
  }
}

}  // namespace

void TopLists::clear(int64_t tokens) const { std::fill_n(count_, tokens, 0); }

void TopLists::push(int64_t n, const Listed& entry) const {
  Listed* const heap = entry_ + n * most_;
  int64_t& count = count_[n];
  if (count == most_) {
    if (!comes_before(entry, heap[0])) return;
    std::pop_heap(heap, heap + count, comes_before);
    --count;
  }
  heap[count++] = entry;
  std::push_heap(heap, heap + count, comes_before);
}

void TopLists::add(int64_t n, const float* z, int64_t width, int64_t id) const {
  const auto lowest = [&] { return count_[n] == most_ ? entry_[n * most_].logit : least; };
  // find_at_least skips NaN; a row with NaN is written without order.
  for (int64_t j = find_at_least(z, 0, width, lowest()); j < width;
       j = find_at_least(z, j + 1, width, lowest())) {
    push(n, {z[j], id + j});
  }
}

void TopLists::add(int64_t n, const TopLists& other) const {
  for (int64_t r = 0; r < other.count_[n]; ++r) push(n, other.entry_[n * most_ + r]);
}

void TopLists::write(const Call& call, int64_t n, int64_t i) const {
  Listed* const list = entry_ + n * most_;
  std::sort_heap(list, list + count_[n], comes_before);
  for (int64_t r = 0; r < count_[n]; ++r) write_entry(call, i, r, list[r]);
}

void clear_lists(const Call& call) {
  for (int64_t i = 0; i < call.tokens(); ++i) {
    for (int64_t r = 0; r < call.listed(); ++r) write_entry(call, i, r, {least, -1});
  }
}

void write_without_order(const Call& call, int64_t i) {
  for (int64_t r = 0; r < call.listed(); ++r) {
    write_entry(call, i, r, {std::numeric_limits<float>::quiet_NaN(), r});
  }
}

void combine_lists(const Call& call, int64_t i) {
  const int64_t shards = call.shards(), count = call.listed();
  const TensorView &logits = call.shard_top_logits, &ids = call.shard_top_ids;
  const auto entry_of = [&](int64_t s, int64_t r) -> Listed {
    return {element_at(logits, row(s), i * count + r), id_at(ids, row(s), i * count + r)};
  };
  for (int64_t s = 0; s < shards; ++s) {
    if (std::isnan(entry_of(s, 0).logit)) return write_without_order(call, i);
  }
  for (int64_t s = 0; s < shards; ++s) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t place = place_among_shards(shards, count, s, r, entry_of);
      if (place < count) write_entry(call, i, place, entry_of(s, r));
    }
  }
}

}  // namespace logitless::cpu
