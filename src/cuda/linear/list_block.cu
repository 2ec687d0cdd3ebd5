// SPDX-License-Identifier: Apache-2.0
// Merges a block of logits into its rows' lists of the k largest ("Top-k" of docs/semantics.md),
// which stay in the outputs between blocks. A thread block handles one row:
//   bound   the k-th largest of the list and of the segments' maxima, which are partial sums of the
//           loss; k elements are not below it
//   found   the logits not below the bound, of segments whose maximum is not below it and above
//           the list's last entry; they are merged into the list when no more fit, and at the end
//   key     the bits of z, as an ordered integer, then those of ~column; greater keys come first
// No two keys are equal, so the list depends on the logits alone, not on the order in which threads
// find them.
#include <algorithm>

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/tokens/top.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int loads = 6;  // logits that a lane loads at once: a tile of Hopper's kernels
constexpr int step_columns = 32 * loads;
constexpr int most_keys = 2048;  // of a list and what is found
static_assert(most_listed + warps * step_columns <= most_keys);
constexpr int held = 8;  // segments of a thread
constexpr int most_segments = held * threads;
// Bits of the bound: fewer make it lower, by at most 2^-7 of its value.
constexpr int bound_bits = 16;
// As few segments as these are read without a search for a higher bound, which takes longer.
constexpr int few_segments = 16;

struct TopBlock {
  Block block;
  int segment = 0;         // columns of a partial sum
  bool is_mapped = false;  // the block holds z, not raw logits
};

__device__ uint32_t ordered_bits(float z) {
  const uint32_t bits = __float_as_uint(z + 0.0f);  // -0 becomes 0
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
// No column has a key without high bits: those are places without an entry.
__device__ uint64_t key_of(float z, int column) {
  return uint64_t{ordered_bits(z)} << 32 | ~static_cast<uint32_t>(column);
}
__device__ uint32_t bits_of(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
__device__ float logit_of(uint64_t key) {
  const uint32_t ordered = bits_of(key);
  return __uint_as_float((ordered >> 31) != 0 ? ordered & 0x7fffffffu : ~ordered);
}
__device__ int column_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

// Sorts `count` keys in descending order; there is room for the next power of two. All threads call
// it; it begins and ends with a barrier.
__device__ void sort(uint64_t* keys, int count) {
  int whole = 2;
  while (whole < count) whole *= 2;
  for (int n = count + static_cast<int>(threadIdx.x); n < whole; n += threads) keys[n] = 0;
  __syncthreads();
  for (int size = 2; size <= whole; size *= 2) {
    for (int apart = size / 2; apart > 0; apart /= 2) {
      for (int pair = threadIdx.x; pair < whole / 2; pair += threads) {
        const int first = 2 * pair - (pair & (apart - 1)), second = first + apart;
        const uint64_t a = keys[first], b = keys[second];
        if ((a < b) == ((first & size) == 0)) keys[first] = b, keys[second] = a;
      }
      __syncthreads();
    }
  }
}

// Makes the first `most` of `count` keys the list, where the list was, before what is found.
__device__ void merge(uint64_t* keys, int most, int count) {
  const int r = threadIdx.x, found = count - most;
  if (found > threads) return sort(keys, count);
  __syncthreads();
  const uint64_t listed = r < most ? keys[r] : 0, other = r < found ? keys[most + r] : 0;
  // A key's place is the number of keys above it.
  int place = r, other_place = 0;
  for (int n = 0; n < found; ++n) {
    const uint64_t key = keys[most + n];
    place += key > listed ? 1 : 0;
    other_place += key > other ? 1 : 0;
  }
  int above = 0;  // of the list, by bisection
  for (int end = most; above < end;) {
    const int middle = (above + end) / 2;
    if (keys[middle] > other) {
      above = middle + 1;
    } else {
      end = middle;
    }
  }
  other_place += above;
  __syncthreads();
  if (r < most && place < most) keys[place] = listed;
  if (r < found && other_place < most) keys[other_place] = other;
  __syncthreads();
}

struct Shared {
  uint64_t keys[most_keys];      // the list, then what is found
  uint16_t hits[most_segments];  // the segments to read
  int hit_count, count, has_nan, reaching;
  int counts[bound_bits];
};

// The segments of a thread: `threads` i + threadIdx.x.
struct Segments {
  uint32_t maximum[held];  // in ordered bits; 0 if there is none
  unsigned unsure = 0;     // bit i: the segment may have a NaN, which is in its sum alone

  __device__ Segments(const Partials& partials, int64_t base, int count) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      const int s = threads * i + static_cast<int>(threadIdx.x);
      const bool is_there = s < count;
      maximum[i] = is_there ? ordered_bits(partials.maximum[base + s]) : 0;
      if (is_there && !(partials.sum[base + s] < infinity())) unsure |= 1u << i;
    }
  }
};

// Returns how many of all threads' values are not below `bound`. `sum` is 0; a barrier precedes.
__device__ int count_above(const Segments& own, uint32_t entry, uint32_t bound, int* sum) {
  int above = entry >= bound ? 1 : 0;
#pragma unroll
  for (int i = 0; i < held; ++i) above += own.maximum[i] >= bound ? 1 : 0;
  above = __reduce_add_sync(whole_warp, above);
  if (threadIdx.x % 32 == 0 && above > 0) atomicAdd(sum, above);
  __syncthreads();
  return *sum;
}

// The largest number of bound_bits high bits that `most` of the maxima and the list's entries are
// not below; 0 if there are fewer. If few maxima are above the list's last entry, that is the
// bound.
__device__ uint32_t find_bound(const Segments& own, uint32_t entry, uint32_t last, int most,
                               Shared* shared) {
  if (last > 0 && count_above(own, 0, last + 1, &shared->reaching) <= few_segments) return last;
  uint32_t bound = 0;
  for (int n = 0; n < bound_bits; ++n) {
    const uint32_t next = bound | 0x80000000u >> n;
    if (count_above(own, entry, next, shared->counts + n) >= most) bound = next;
  }
  return max(bound, last);
}

struct TopRow {
  const float* logits;  // of the block's first column
  MapFactors map;
  int target;  // its column in the block, or another number
};

// Appends this warp's keys.
__device__ void append(uint64_t key, bool wants, Shared* shared) {
  const unsigned all = __ballot_sync(whole_warp, wants);
  if (all == 0) return;
  const int lane = threadIdx.x % 32;
  int first = 0;
  if (lane == 0) first = atomicAdd(&shared->count, __popc(all));
  first = __shfl_sync(whole_warp, first, 0);
  if (wants) shared->keys[first + __popc(all & ((1u << lane) - 1))] = key;
}

// Appends the columns [first, end) of the block that may be in the list: at most step_columns.
__device__ void find(const LinearCall& call, const TopBlock& b, const TopRow& row, int first,
                     int end, uint32_t bound, uint64_t last, Shared* shared) {
  const int lane = threadIdx.x % 32;
  float z[loads];
#pragma unroll
  for (int n = 0; n < loads; ++n) {
    const int j = first + 32 * n + lane;
    if (j < end) z[n] = row.logits[j];
  }
#pragma unroll
  for (int n = 0; n < loads; ++n) {
    const int j = first + 32 * n + lane, column = static_cast<int>(b.block.column) + j;
    const bool is_there = j < end && j != row.target;
    if (is_there && !b.is_mapped) {
      if (present(call.bias)) z[n] += load(call.bias, column);
      z[n] = map_raw(row.map, z[n]);
    }
    if (is_there && isnan(z[n])) shared->has_nan = 1;
    const uint64_t key = key_of(z[n], column);
    append(key, is_there && bits_of(key) >= bound && key > last, shared);
  }
}

__global__ void __launch_bounds__(threads, 6)
    top_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Chunk chunk,
               TopBlock b, Partials partials, const float* target_logit) {
  __shared__ Shared shared;
  const Block& block = b.block;
  const int warp = threadIdx.x / 32, r = threadIdx.x;
  const int n = block.row + static_cast<int>(blockIdx.x);  // the row of the chunk
  if (!is_valid(chunk, n)) return;
  const int64_t k = chunk.first + n, i = chunk.tokens.row[k];
  const int most = static_cast<int>(call.top.logits.shape[1]);
  const int64_t start = call.in.start();
  const int columns = static_cast<int>(block.columns);
  const int segments = (columns + b.segment - 1) / b.segment;

  if (r == 0) shared.hit_count = shared.has_nan = shared.reaching = 0, shared.count = most;
  if (r < bound_bits) shared.counts[r] = 0;
  uint64_t own = static_cast<uint64_t>(most - r);  // of a place without an entry
  bool had_nan = false;
  if (r < most) {
    const Listed entry = entry_of(call.top, i, r);
    if (entry.id >= 0) own = key_of(entry.logit, static_cast<int>(entry.id - start));
    had_nan = isnan(entry.logit);
    shared.keys[r] = own;
  }
  const Segments all(partials, n * partials.segments + block.column / b.segment, segments);
  if (__syncthreads_or(had_nan) != 0) return;  // an earlier block has marked the list as unordered
  uint64_t last = shared.keys[most - 1];
  const uint32_t bound = find_bound(all, r < most ? bits_of(own) : 0, bits_of(last), most, &shared);
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int s = threads * i + r;
    // A column as high as the last entry comes after it, for its number is higher.
    const bool may_enter = all.maximum[i] >= bound && all.maximum[i] > bits_of(last);
    if (s < segments && (may_enter || (all.unsure >> i & 1) != 0)) {
      shared.hits[atomicAdd(&shared.hit_count, 1)] = static_cast<uint16_t>(s);
    }
  }
  const TopRow row{.logits = block.logits + blockIdx.x * block.pitch,
                   .map = map_of_token(call.map, chunk.tokens, k),
                   .target = static_cast<int>(chunk.tokens.target[k] - block.column)};
  if (r == 0 && row.target >= 0 && row.target < columns) {
    const float z = target_logit[n];  // the same bits as in the loss
    if (isnan(z)) shared.has_nan = 1;
    const uint64_t key = key_of(z, static_cast<int>(block.column) + row.target);
    if (key > last) shared.keys[atomicAdd(&shared.count, 1)] = key;
  }
  __syncthreads();
  bool changed = false;
  for (int first = 0; first < shared.hit_count; first += warps) {
    const int hit = first + warp < shared.hit_count ? shared.hits[first + warp] : segments;
    for (int step = 0; step < b.segment; step += step_columns) {
      const int from = hit * b.segment + step, end = min(columns, (hit + 1) * b.segment);
      if (from < end) find(call, b, row, from, end, bound, last, &shared);
      // The warp that appended last sees the whole count.
      const bool is_full = shared.count + warps * step_columns > most_keys;
      if (__syncthreads_or(is_full) == 0) continue;
      merge(shared.keys, most, shared.count);
      changed = true;
      last = shared.keys[most - 1];
      if (r == 0) shared.count = most;
      __syncthreads();
    }
  }
  const int count = shared.count, has_nan = shared.has_nan;
  if (has_nan == 0 && count == most && !changed) return;
  if (has_nan == 0 && count > most) merge(shared.keys, most, count);
  if (r >= most) return;
  const uint64_t key = shared.keys[r];
  const Listed entry = has_nan != 0        ? Listed{nan_value(), r}
                       : bits_of(key) == 0 ? Listed{-infinity(), -1}
                                           : Listed{logit_of(key), start + column_of(key)};
  put_entry(call.top, i, r, entry);
}

}  // namespace

void list_block(const LinearWork& work, const Block& block, int64_t segment, bool mapped) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const int64_t most = most_segments * segment;
  for (int64_t first = 0; first < block.columns; first += most) {
    Block some = block;
    some.logits += first;
    some.column += first;
    some.columns = std::min(most, block.columns - first);
    stream->launch("list_block", top_kernel, static_cast<unsigned>(block.rows), threads, call,
                   chunk, TopBlock{some, static_cast<int>(segment), mapped}, m.partials,
                   m.target_logit);
  }
}

}  // namespace logitless::cuda
