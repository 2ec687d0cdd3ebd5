// SPDX-License-Identifier: Apache-2.0
// Top-k lists that need no logits: empty lists, and merged lists of shards. Each entry of a shard's
// list finds its own rank (src/row/top.h).
#include "src/cuda/tokens/tokens.cuh"
#include "src/cuda/tokens/top.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 128;

__global__ void __launch_bounds__(threads) clear_kernel(TopLists lists) {
  const int64_t i = blockIdx.x;
  for (int64_t r = threadIdx.x; r < lists.logits.shape[1]; r += threads) {
    put_entry(lists, i, r, {-infinity(), -1});
  }
}

__global__ void __launch_bounds__(threads)
    combine_kernel(const __grid_constant__ TokenInput in, const __grid_constant__ TopLists shards,
                   const __grid_constant__ TopLists to) {
  const int64_t i = blockIdx.x, all = shards.logits.shape[0], count = to.logits.shape[1];
  if (kind_of_target(in, target_of(in, i)) != TokenKind::counts) return;
  const auto of_shard = [&](int64_t s, int64_t r) { return entry_of(shards, s, i * count + r); };
  bool has_nan = false;
  for (int64_t s = threadIdx.x; s < all; s += threads) has_nan |= isnan(of_shard(s, 0).logit);
  has_nan = __syncthreads_or(has_nan) != 0;
  for (int64_t at = threadIdx.x; at < (has_nan ? count : all * count); at += threads) {
    if (has_nan) {
      put_entry(to, i, at, {nan_value(), at});
      continue;
    }
    const int64_t place = place_among_shards(all, count, at / count, at % count, of_shard);
    if (place < count) put_entry(to, i, place, of_shard(at / count, at % count));
  }
}

}  // namespace

void clear_lists(const TopLists& lists, Stream* stream) {
  if (lists.logits.shape[0] == 0) return;
  stream->launch("clear_lists", clear_kernel, static_cast<unsigned>(lists.logits.shape[0]), threads,
                 lists);
}

void combine_lists(const TokenInput& in, const TopLists& shards, const TopLists& to,
                   Stream* stream) {
  clear_lists(to, stream);
  if (to.logits.shape[0] == 0) return;
  stream->launch("combine_lists", combine_kernel, static_cast<unsigned>(to.logits.shape[0]),
                 threads, in, shards, to);
}

}  // namespace logitless::cuda
