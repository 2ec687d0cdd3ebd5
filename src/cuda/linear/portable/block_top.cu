// SPDX-License-Identifier: Apache-2.0
// Merges a block of raw logits into its rows' lists of the k largest ("Top-k" of
// docs/semantics.md), which stay in the outputs between blocks of logits. A thread block handles
// one row: logits above the list's last entry become candidates, appended to the list; when no more
// fit, and at the end, all are sorted and the first k stay.
//   key = the bits of z, as an ordered integer, then those of ~column; greater keys come first
// No two keys are equal, so the list depends on the logits alone, not on the order in which threads
// find candidates.
#include "src/cuda/linear/portable/block.cuh"
#include "src/cuda/linear/portable/kernels.h"
#include "src/cuda/tokens/top.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256, columns_per_step = 4 * threads;
constexpr int steps = 4;         // steps whose columns a thread loads at once
constexpr int most_keys = 2048;  // of a list and its candidates
static_assert(most_listed + columns_per_step <= most_keys);

// No column has the key 0, which is smaller than all others.
__device__ uint64_t key_of(float z, int column) {
  const uint32_t bits = __float_as_uint(z + 0.0f);  // -0 becomes 0
  const uint32_t ordered = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(column);
}
__device__ float logit_of(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
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
        const int first = pair / apart * 2 * apart + pair % apart, second = first + apart;
        const uint64_t a = keys[first], b = keys[second];
        if ((a < b) == ((first & size) == 0)) keys[first] = b, keys[second] = a;
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(threads)
    top_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Chunk chunk,
               Block block, const float* target_logit) {
  __shared__ uint64_t keys[most_keys];
  __shared__ int count, has_nan;
  const int row = block.row + static_cast<int>(blockIdx.x);
  if (!is_valid(chunk, row)) return;
  const int64_t k = chunk.first + row, i = chunk.tokens.row[k];
  const int most = static_cast<int>(call.top.logits.shape[1]);
  const int64_t start = call.in.start();
  if (threadIdx.x == 0) count = most, has_nan = 0;
  bool had_nan = false;  // apart from has_nan, which threads ahead may already set
  for (int r = threadIdx.x; r < most; r += threads) {
    const Listed entry = entry_of(call.top, i, r);
    keys[r] = entry.id < 0 ? 0 : key_of(entry.logit, static_cast<int>(entry.id - start));
    had_nan |= isnan(entry.logit);
  }
  if (__syncthreads_or(had_nan) != 0) return;  // an earlier block has marked the list as unordered

  const WarpTile tile{row, block.column, static_cast<int>(block.columns),
                      block.logits + blockIdx.x * block.pitch};
  const MapFactors map = map_of_token(call.map, chunk.tokens, k);
  const int64_t target = chunk.tokens.target[k] - block.column;
  uint64_t last = keys[most - 1];
  bool changed = false;
  for (int first = 0; first < tile.count; first += steps * columns_per_step) {
    float z[steps][4];
    const auto column_of_step = [&](int step) {
      return first + step * columns_per_step + static_cast<int>(threadIdx.x) * 4;
    };
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int j = column_of_step(step);
      if (j < tile.count) load_four<false>(call, map, tile, j, z[step]);
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const int j = column_of_step(step);
      int place = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (j + n >= tile.count) continue;
        if (j + n == target) z[step][n] = target_logit[row];  // the same bits as in the loss
        if (isnan(z[step][n])) has_nan = 1;
        const uint64_t key = key_of(z[step][n], static_cast<int>(block.column) + j + n);
        if (key <= last) continue;
        place = atomicAdd(&count, 1);
        keys[place] = key;
      }
      // The next step may find as many candidates as it has columns.
      if (__syncthreads_or(place >= most_keys - columns_per_step) == 0) continue;
      sort(keys, count);
      changed = true;
      last = keys[most - 1];
      __syncthreads();
      if (threadIdx.x == 0) count = most;
      __syncthreads();
    }
  }
  const int all = count;
  if (has_nan == 0 && all == most && !changed) return;
  if (has_nan == 0 && all > most) sort(keys, all);
  for (int r = threadIdx.x; r < most; r += threads) {
    const Listed entry = has_nan != 0   ? Listed{nan_value(), r}
                         : keys[r] == 0 ? Listed{-infinity(), -1}
                                        : Listed{logit_of(keys[r]), start + column_of(keys[r])};
    put_entry(call.top, i, r, entry);
  }
}

}  // namespace

void list_block(const LinearWork& work, const Block& block) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  stream->launch("list_block", top_kernel, static_cast<unsigned>(block.rows), threads, call, chunk,
                 block, m.target_logit);
}

}  // namespace logitless::cuda
