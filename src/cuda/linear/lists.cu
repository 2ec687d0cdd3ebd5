// SPDX-License-Identifier: Apache-2.0
// Finds the lists of chosen columns, and sorts their places by column: a radix sort from the lowest
// digit, whose passes count the digits of blocks of places, sum the counts and move the places. Not
// CUB's: it launches by itself, not through runtime/api.h, so tests could not record it.
#include "src/cuda/linear/lists.cuh"

#include <utility>

namespace logitless::cuda {
namespace {

constexpr int scan_threads = 1024, sort_threads = 256, sort_warps = sort_threads / 32;
constexpr int digit_bits = 8, digits = 1 << digit_bits;
constexpr int places_of_warp = 512, places_of_block = sort_warps * places_of_warp;

// An exclusive scan over the block's threads with `combine`, starting from *carry, which becomes
// the total.
template <class T, class Combine>
__device__ T scan_before(T x, T* carry, Combine&& combine) {
  __shared__ T warps[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int step = 1; step < 32; step *= 2) {
    const T left = __shfl_up_sync(whole_warp, x, step);
    if (lane >= step) x = combine(left, x);
  }
  if (lane == 31) warps[warp] = x;
  const T left = __shfl_up_sync(whole_warp, x, 1);
  __syncthreads();
  T before = *carry, all = *carry;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    if (w == warp) before = all;
    all = combine(all, warps[w]);
  }
  __syncthreads();  // `warps` is free after this
  *carry = all;
  return lane == 0 ? before : combine(before, left);
}

// One block checks all offsets. No earlier list may start beyond the start of a valid list, so that
// valid lists share no place.
__global__ void __launch_bounds__(scan_threads)
    lists_kernel(const __grid_constant__ IdLists lists, int tokens, TensorView fault) {
  const bool rows = !present(lists.offsets);
  int64_t highest = 0;
  bool is_wrong = false;
  for (int base = 0; base < tokens; base += scan_threads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const bool exists = i < tokens;
    if (rows) {
      const int64_t columns = lists.ids.shape[1];
      if (exists) lists.first[i] = static_cast<int32_t>(i * columns);
      if (exists) lists.count[i] = static_cast<int32_t>(columns);
      continue;
    }
    const int64_t first = exists ? load_int(lists.offsets, i) : 0;
    const int64_t end = exists ? load_int(lists.offsets, i + 1) : 0;
    const int64_t before =
        scan_before(first, &highest, [](int64_t a, int64_t b) { return a > b ? a : b; });
    if (!exists) continue;
    const bool is_right = first >= before && end >= first && end <= lists.places;
    lists.first[i] = is_right ? static_cast<int32_t>(first) : 0;
    lists.count[i] = is_right ? static_cast<int32_t>(end - first) : 0;
    is_wrong |= !is_right;
  }
  if (!rows && threadIdx.x == 0) {
    is_wrong |= load_int(lists.offsets, 0) != 0 || load_int(lists.offsets, tokens) != lists.places;
  }
  if (is_wrong) set_fault(fault, 1);
}

__device__ int digit_of(int column, int shift) { return (column >> shift) & (digits - 1); }

__global__ void __launch_bounds__(sort_threads)
    count_kernel(const int32_t* column, int places, int shift, int32_t* counts) {
  __shared__ int count[digits];
  for (int d = threadIdx.x; d < digits; d += sort_threads) count[d] = 0;
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * places_of_block;
  const int64_t end = min(int64_t{places}, first + places_of_block);
  for (int64_t p = first + threadIdx.x; p < end; p += sort_threads) {
    atomicAdd(&count[digit_of(column[p], shift)], 1);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < digits; d += sort_threads) {
    counts[int64_t{d} * gridDim.x + blockIdx.x] = count[d];
  }
}

// One block turns each count into the number of places that come before: those with smaller digits,
// and those with the same digit in earlier blocks.
__global__ void __launch_bounds__(scan_threads) sum_kernel(int32_t* counts, int64_t size) {
  constexpr int each = 8;
  int carry = 0;
  for (int64_t base = 0; base < size; base += scan_threads * each) {
    const int64_t first = base + int64_t{threadIdx.x} * each;
    int own[each], sum = 0;
#pragma unroll
    for (int n = 0; n < each; ++n) {
      own[n] = first + n < size ? counts[first + n] : 0;
      sum += own[n];
    }
    int before = scan_before(sum, &carry, [](int a, int b) { return a + b; });
#pragma unroll
    for (int n = 0; n < each; ++n) {
      if (first + n < size) counts[first + n] = before;
      before += own[n];
    }
  }
}

// Moves a block's places. A warp has consecutive places, 32 at a time; places of one digit keep
// their order.
__global__ void __launch_bounds__(sort_threads)
    move_kernel(const int32_t* column, const int32_t* place, int places, int shift,
                const int32_t* counts, int32_t* to_column, int32_t* to_place) {
  __shared__ int next[sort_warps][digits];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int d = lane; d < digits; d += 32) next[warp][d] = 0;
  __syncwarp();
  const int64_t first = int64_t{blockIdx.x} * places_of_block + warp * places_of_warp;
  const int64_t end = min(int64_t{places}, first + places_of_warp);
  for (int64_t p = first + lane; p < end; p += 32) {
    atomicAdd(&next[warp][digit_of(column[p], shift)], 1);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < digits; d += sort_threads) {
    int before = counts[int64_t{d} * gridDim.x + blockIdx.x];
    for (int w = 0; w < sort_warps; ++w) {
      const int own = next[w][d];
      next[w][d] = before;
      before += own;
    }
  }
  __syncthreads();
  for (int64_t base = first; base < end; base += 32) {
    const int64_t p = base + lane;
    const bool exists = p < end;
    const int own = exists ? column[p] : 0;
    const int digit = exists ? digit_of(own, shift) : digits;
    const unsigned alike = __match_any_sync(whole_warp, digit);
    const int before = __popc(alike & ((1u << lane) - 1));
    const int64_t to = exists ? next[warp][digit] + before : 0;
    __syncwarp();
    if (exists && before == 0) next[warp][digit] += __popc(alike);
    __syncwarp();
    if (!exists) continue;
    to_column[to] = own;
    to_place[to] = place[p];
  }
}

}  // namespace

IdLists place_lists(Arena* arena, const TensorView& ids, const TensorView& offsets,
                    int64_t tokens) {
  IdLists lists;
  lists.set(ids, offsets);
  lists.first = arena->take<int32_t>(tokens);
  lists.count = arena->take<int32_t>(tokens);
  return lists;
}

void find_lists(const IdLists& lists, int64_t tokens, const TensorView& fault, Stream* stream) {
  stream->launch("find_lists", lists_kernel, 1, scan_threads, lists, static_cast<int>(tokens),
                 fault);
}

SortedPlaces place_sorted(Arena* arena, int64_t places) {
  SortedPlaces made;
  for (int32_t** array : {&made.column, &made.place, &made.other_column, &made.other_place}) {
    *array = arena->take<int32_t>(places);
  }
  made.counts = arena->take<int32_t>(digits * int64_t{blocks_for(places, places_of_block)});
  return made;
}

SortedPlaces sort_places(SortedPlaces a, int64_t places, int64_t largest, Stream* stream) {
  const unsigned blocks = blocks_for(places, places_of_block);
  const auto count = static_cast<int>(places);
  for (int shift = 0; blocks > 0 && largest >> shift > 0; shift += digit_bits) {
    stream->launch("count_digits", count_kernel, blocks, sort_threads, a.column, count, shift,
                   a.counts);
    stream->launch("sum_digits", sum_kernel, 1, scan_threads, a.counts, int64_t{digits} * blocks);
    stream->launch("move_places", move_kernel, blocks, sort_threads, a.column, a.place, count,
                   shift, a.counts, a.other_column, a.other_place);
    std::swap(a.column, a.other_column);
    std::swap(a.place, a.other_place);
  }
  return a;
}

}  // namespace logitless::cuda
