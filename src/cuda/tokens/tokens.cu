// SPDX-License-Identifier: Apache-2.0
// Prepares tokens:
//   screen: each token's temperature, and whether it has a gradient; only if the call has
//           temperatures, or gradients that may be 0
//   classify: how many count, the sum of c_t, the largest factors of the gradients; the outputs of
//             tokens that do not count
//   compact: the arrays of compacted tokens, from the number before each; the scalars
// After screening, up to one_launch_tokens take one launch, a token a thread: every block counts
// all tokens, so that it needs no other block's result, and the last one makes the scalars. More
// tokens take two launches of blocks of tokens_per_block, the second of which uses what the first
// has found, and a third if `place` is asked for.
#include "src/cuda/runtime/early.cuh"
#include "src/cuda/tokens/token_scalars.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 1024, warps_per_block = threads / 32;
constexpr int rounds = tokens_per_block / threads;

// This thread's token in round r of block b.
__device__ int64_t token_of(int b, int r) {
  return int64_t{b} * tokens_per_block + r * threads + threadIdx.x;
}

// The sum of the whole vocabulary's class weights; every block computes it.
__device__ double class_weight_sum(const TokenInput& in) {
  if (!(in.options.label_smoothing > 0) || !present(in.vocab_weight)) {
    return static_cast<double>(in.whole());
  }
  double own = 0;
  for (int64_t j = threadIdx.x; j < in.whole(); j += threads) own += load(in.vocab_weight, j);
  return block_sum(own);
}

__device__ float finite_size(float x) { return isfinite(x) ? fabsf(x) : 0.0f; }

// Writes the outputs of a token that does not count.
__device__ void put_other(const TokenInput& in, const TokenOutputs& out, int64_t i,
                          TokenKind kind) {
  const float value = kind == TokenKind::outside ? nan_value() : 0.0f;
  if (in.options.reduction == Reduction::none) put(out.loss, i, value);
  put_statistics<false>(out.statistics, i, RowStatistics{});
  put(out.statistics.logprob, i, value);
}

__device__ TokenBlock warp_total(TokenBlock x) {
  x.valid = warp_sum(x.valid);
  x.outside = warp_sum(x.outside);
  x.counted = warp_sum(x.counted);
  x.coolest = -warp_max(-x.coolest);
  x.weights = warp_max(x.weights);
  x.upstream = warp_max(x.upstream);
  x.statistics = warp_max(x.statistics);
  x.normalizer = warp_sum(x.normalizer);
  return x;
}
// Call it at most once per kernel: each call site has its own shared memory.
__device__ TokenBlock block_total(const TokenBlock& own) {
  __shared__ TokenBlock warps[threads / 32];
  static_assert(threads / 32 == 32);
  const TokenBlock of_warp = warp_total(own);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return warp_total(warps[threadIdx.x % 32]);
}

// A thread's tokens, one per round.
struct OwnTokens {
  int64_t target[rounds];
  TokenKind kind[rounds];
};

template <class T>
__device__ void read_targets(const TensorView& view, int64_t total, int b,
                             int64_t (&target)[rounds]) {
  const int64_t end = present(view) ? total : 0;
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    target[r] = i < end ? *address<const T>(view, i) : 0;
  }
}
__device__ OwnTokens read_tokens(const TokenInput& in, const Tokens& t, int b) {
  OwnTokens own;
  if (in.target.dtype == DType::i64) {
    read_targets<int64_t>(in.target, t.total, b, own.target);
  } else {
    read_targets<int32_t>(in.target, t.total, b, own.target);
  }
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    own.kind[r] =
        i < t.total ? kind_of_token(in, t.inactive, i, own.target[r]) : TokenKind::ignored;
  }
  return own;
}

// Calls use(block, target) for each of this thread's tokens; a block is `threads` tokens.
template <class T, class F>
__device__ void for_targets_of(const TensorView& view, int total, int64_t ignored, F&& use) {
  const T* at = address<const T>(view, threadIdx.x);
  const int64_t step = threads * view.stride[0];
  const bool given = present(view);
#pragma unroll 1
  for (int block = 0; block * threads < total; block += rounds) {
    int64_t target[rounds];
#pragma unroll
    for (int r = 0; r < rounds; ++r, at += step) {
      const bool exists = (block + r) * threads + static_cast<int>(threadIdx.x) < total;
      target[r] = !exists ? ignored : given ? *at : 0;
    }
#pragma unroll
    for (int r = 0; r < rounds; ++r) use(block + r, target[r]);
  }
}
template <class F>
__device__ void for_targets(const TokenInput& in, const Tokens& t, F&& use) {
  const int total = static_cast<int>(t.total);
  if (in.target.dtype == DType::i64) {
    for_targets_of<int64_t>(in.target, total, in.options.ignore_index, use);
  } else {
    for_targets_of<int32_t>(in.target, total, in.options.ignore_index, use);
  }
}
// Whether this thread's token of such a block is inactive; the token counts.
__device__ bool is_inactive(const TokenInput& in, const Tokens& t, int block) {
  return is_inactive(in, t.inactive, int64_t{block} * threads + threadIdx.x);
}

// Whether all tokens that count have the same weight.
__device__ bool weighs_alike(const TokenInput& in) {
  if (present(in.vocab_weight)) return false;
  if (in.gradients && present(in.temperature)) return false;
  return !in.gradients ||
         !(present(in.token_weight) || in.per_row_upstream || in.statistics_gradients);
}

// Updates the maxima of |a| w and of the gradients' other factors, and the lowest temperature.
__device__ void weigh(const TokenInput& in, const LossConstants& constants, int64_t i, float c,
                      const TokenMap* map, TokenBlock* own) {
  const float a = token_weight(in, i);
  const float w = (1 - constants.smoothing) * fabsf(c) +
                  constants.smoothing_per_class * constants.class_weight_sum;
  own->weights = fmaxf(own->weights, finite_size(a * w));
  if (map != nullptr) own->coolest = fminf(own->coolest, map->temperature);
  const auto largest = [&](const TensorView& view, float* most) {
    if (present(view)) *most = fmaxf(*most, finite_size(load(view, i)));
  };
  if (in.per_row_upstream) largest(in.grad_loss, &own->upstream);
  largest(in.grad_lse, &own->statistics);
  largest(in.grad_target_logit, &own->statistics);
  largest(in.grad_entropy, &own->statistics);
  if (in.chosen_sizes != nullptr) {
    own->statistics = fmaxf(own->statistics, finite_size(in.chosen_sizes[i]));
  }
}

// Without class weights the mean also counts tokens out of range. These set the fault word.
__device__ void finish_total(const TokenInput& in, TokenBlock* all) {
  if (!present(in.vocab_weight)) all->normalizer = all->counted + all->outside;
  if (threadIdx.x == 0 && all->outside > 0 && present(in.fault)) {
    atomicOr(address<int>(in.fault), 1);
  }
}

// Sums over the tokens of blocks [first, end).
__device__ TokenBlock classify(const TokenInput& in, const Tokens& t, int first, int end) {
  TokenBlock own{.coolest = FLT_MAX};
  own.class_weight_sum = class_weight_sum(in);
  const LossConstants constants = constants_of(in, own.class_weight_sum);
#pragma unroll 1
  for (int b = first; b < end; ++b) {
    const OwnTokens tokens = read_tokens(in, t, b);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      if (tokens.kind[r] == TokenKind::outside) ++own.outside;
      const bool counts = tokens.kind[r] == TokenKind::counts;
      if (!counts && tokens.kind[r] != TokenKind::inactive) continue;
      ++own.counted;
      const float c = target_weight(in, tokens.target[r]);
      own.normalizer += c;
      if (!counts) continue;
      ++own.valid;
      const int64_t i = token_of(b, r);
      if (in.gradients) weigh(in, constants, i, c, t.map == nullptr ? nullptr : t.map + i, &own);
    }
  }
  TokenBlock all = block_total(own);
  finish_total(in, &all);
  return all;
}

// classify for all tokens, if they have equal weights.
__device__ TokenBlock count_alike(const TokenInput& in, const Tokens& t) {
  TokenBlock all{};
  int valid = 0, meant = 0, active = 0;
  for_targets(in, t, [&](int block, int64_t target) {
    const bool counts = kind_of_target(in, target) == TokenKind::counts;
    valid += counts;
    active += counts && !is_inactive(in, t, block);
    meant += target != in.options.ignore_index;
  });
  all.counted = block_sum(valid);
  meant = block_sum(meant);
  if (in.options.out_of_range == OutOfRange::error) all.outside = meant - all.counted;
  all.valid = block_sum(active);
  all.class_weight_sum = static_cast<double>(in.whole());
  const LossConstants constants = constants_of(in, all.class_weight_sum);
  // Any token will do, as all have the same weight.
  if (in.gradients && all.valid > 0) weigh(in, constants, 0, 1, nullptr, &all);
  finish_total(in, &all);
  return all;
}

// Sums over all tokens. *before becomes the number of tokens compacted in the blocks before b or,
// if kPlaces, of those that count there.
template <bool kPlaces>
__device__ TokenBlock total_of(const Tokens& t, int b, int blocks, int* before) {
  *before = 0;
  TokenBlock all{.coolest = FLT_MAX};
  for (int other = threadIdx.x; other < blocks; other += threads) {
    const TokenBlock& block = t.blocks[other];
    all.valid += block.valid;
    all.outside += block.outside;
    all.counted += block.counted;
    all.coolest = fminf(all.coolest, block.coolest);
    all.normalizer += block.normalizer;
    all.weights = fmaxf(all.weights, block.weights);
    all.upstream = fmaxf(all.upstream, block.upstream);
    all.statistics = fmaxf(all.statistics, block.statistics);
    if (other < b) *before += kPlaces ? block.counted : block.valid;
  }
  all.class_weight_sum = t.blocks[0].class_weight_sum;
  *before = block_sum(*before);
  return block_total(all);
}

// Turns the counts of the rounds' warps, in the order of their tokens, into exclusive prefix sums.
__device__ void scan_warps(int (&counts)[rounds * threads / 32]) {
  constexpr int each = rounds * threads / 32 / 32;
  __syncthreads();
  if (threadIdx.x < 32) {
    int own[each], sum = 0;
    for (int n = 0; n < each; ++n) {
      own[n] = counts[threadIdx.x * each + n];
      sum += own[n];
    }
    int inclusive = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(whole_warp, inclusive, step);
      if (static_cast<int>(threadIdx.x) >= step) inclusive += left;
    }
    int before = inclusive - sum;
    for (int n = 0; n < each; ++n) {
      counts[threadIdx.x * each + n] = before;
      before += own[n];
    }
  }
  __syncthreads();
}

// Writes token i, which has k compacted tokens before it, of `valid` in all.
__device__ void put_token(const TokenInput& in, const Tokens& t, int64_t i, int64_t target,
                          TokenKind kind, int64_t k, int valid) {
  const bool counts = kind == TokenKind::counts;
  const int64_t at = counts ? k : valid + (i - k);
  t.row[at] = static_cast<int32_t>(i);
  // Other tokens get defaults, since they may be read before the number of valid tokens is known.
  t.target[at] = counts ? column_of_target(in, target) : -1;
  t.target_weight[at] = counts ? target_weight(in, target) : 0.0f;
  t.token_weight[at] = counts ? token_weight(in, i) : 0.0f;
}

__device__ inline bool counts_at_all(TokenKind kind) {
  return kind == TokenKind::counts || kind == TokenKind::inactive;
}

// `before` is the number of tokens before block b: with kPlaces of those that count, whose places
// are found; else of those compacted, `valid` in all.
template <bool kPlaces>
__device__ void compact(const TokenInput& in, const Tokens& t, int b, int valid, int before) {
  __shared__ int warps[rounds * warps_per_block];
  const OwnTokens tokens = read_tokens(in, t, b);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto ballot_of = [&](int r) {
    const TokenKind kind = tokens.kind[r];
    return __ballot_sync(whole_warp, kPlaces ? counts_at_all(kind) : kind == TokenKind::counts);
  };
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const unsigned ballot = ballot_of(r);
    if (lane == 0) warps[r * warps_per_block + warp] = __popc(ballot);
  }
  scan_warps(warps);
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    // Computed again: keeping eight ballots would take registers.
    const unsigned ballot = ballot_of(r);
    if (i >= t.total) continue;
    const int64_t k =
        before + warps[r * warps_per_block + warp] + __popc(ballot & ((1u << lane) - 1));
    if constexpr (kPlaces) {
      t.place[i] = static_cast<int32_t>(k);
    } else {
      put_token(in, t, i, tokens.target[r], tokens.kind[r], k, valid);
    }
  }
}

// Classifies and compacts the tokens of block b, after counting all tokens.
__device__ void count_and_compact(const TokenInput& in, const Tokens& t, const TokenOutputs& out,
                                  int b) {
  __shared__ int warps[warps_per_block], before_block[warps_per_block], valid[warps_per_block];
  __shared__ int places[warps_per_block], counted_before[warps_per_block];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t i = int64_t{b} * threads + threadIdx.x;
  const int64_t target = i < t.total ? target_of(in, i) : 0;
  const TokenKind kind =
      i < t.total ? kind_of_token(in, t.inactive, i, target) : TokenKind::ignored;
  int before = 0, all = 0, counted = 0;
  for_targets(in, t, [&](int block, int64_t target) {
    const bool counts = kind_of_target(in, target) == TokenKind::counts;
    const bool active = counts && !is_inactive(in, t, block);
    all += active;
    before += active && block < b;
    counted += counts && block < b;
  });
  before = warp_sum(before);
  all = warp_sum(all);
  counted = warp_sum(counted);
  const unsigned ballot = __ballot_sync(whole_warp, kind == TokenKind::counts);
  const unsigned counting = __ballot_sync(whole_warp, counts_at_all(kind));
  const unsigned lanes_before = (1u << lane) - 1;
  if (lane == 0) {
    warps[warp] = __popc(ballot), before_block[warp] = before, valid[warp] = all;
    places[warp] = __popc(counting), counted_before[warp] = counted;
  }
  __syncthreads();
  static_assert(warps_per_block == 32);
  before = warp_sum(before_block[lane] + (lane < warp ? warps[lane] : 0));
  all = warp_sum(valid[lane]);
  counted = warp_sum(counted_before[lane] + (lane < warp ? places[lane] : 0));
  if (i >= t.total) return;
  put_token(in, t, i, target, kind, before + __popc(ballot & lanes_before), all);
  if (t.place != nullptr) t.place[i] = counted + __popc(counting & lanes_before);
  if (!counts_at_all(kind)) put_other(in, out, i, kind);
}

// Whether every upstream gradient of the token in Backward is exactly 0. A 0 times infinity is a
// gradient, and so is a product that underflows.
__device__ bool has_no_gradient(const TokenInput& in, int64_t i) {
  const int64_t at = in.options.reduction == Reduction::none ? i : 0;
  const float g = present(in.grad_loss) ? load(in.grad_loss, at) : 1.0f;
  const float a = token_weight(in, i);
  if ((g != 0 && a != 0) || g * a != 0) return false;
  const auto is_zero = [&](const TensorView& v) { return !present(v) || load(v, i) == 0; };
  return is_zero(in.grad_lse) && is_zero(in.grad_target_logit) && is_zero(in.grad_entropy) &&
         (in.chosen_sizes == nullptr || in.chosen_sizes[i] == 0);
}

// Runs before tokens are counted: finds each token's temperature and whether it has a gradient.
__global__ void __launch_bounds__(256)
    screen_kernel(const __grid_constant__ TokenInput in, Tokens t) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= t.total) return;
  const bool counts = kind_of_target(in, target_of(in, i)) == TokenKind::counts;
  const bool inactive = counts && in.skips_inactive && has_no_gradient(in, i);
  if (t.inactive != nullptr) t.inactive[i] = inactive;
  if (t.map == nullptr) return;
  TokenMap map{};
  if (counts && !inactive) {
    const float temperature =
        present(in.temperature) ? load(in.temperature, i) : in.options.temperature;
    map = map_of_temperature(in, temperature);
  }
  t.map[i] = map;
}

__global__ void __launch_bounds__(threads)
    prepare_kernel(const __grid_constant__ TokenInput in, Tokens t,
                   const __grid_constant__ TokenOutputs out) {
  let_next_start();
  const int b = static_cast<int>(blockIdx.x), last = static_cast<int>(gridDim.x) - 1;
  if (b < last) return count_and_compact(in, t, out, b);
  const int blocks = (last * threads + tokens_per_block - 1) / tokens_per_block;
  const TokenBlock all = weighs_alike(in) ? count_alike(in, t) : classify(in, t, 0, blocks);
  if (threadIdx.x == 0) *t.scalars = scalars_of(in, all);
}

__global__ void __launch_bounds__(threads)
    classify_kernel(const __grid_constant__ TokenInput in, Tokens t,
                    const __grid_constant__ TokenOutputs out) {
  const int b = static_cast<int>(blockIdx.x);
  const TokenBlock all = classify(in, t, b, b + 1);
  if (threadIdx.x == 0) t.blocks[b] = all;
  const OwnTokens tokens = read_tokens(in, t, b);
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    if (i < t.total && !counts_at_all(tokens.kind[r])) put_other(in, out, i, tokens.kind[r]);
  }
}
template <bool kPlaces>
__global__ void __launch_bounds__(threads)
    compact_kernel(const __grid_constant__ TokenInput in, Tokens t) {
  let_next_start();
  const int b = static_cast<int>(blockIdx.x);
  int before;
  const TokenBlock all = total_of<kPlaces>(t, b, static_cast<int>(gridDim.x), &before);
  if (!kPlaces && b == 0 && threadIdx.x == 0) *t.scalars = scalars_of(in, all);
  compact<kPlaces>(in, t, b, all.valid, before);
}

// Finds, among `valid` compacted tokens with ascending places, the first with a place >= p.
__device__ int first_from(const Tokens& t, int valid, int p) {
  int first = 0;
  for (int count = valid; count > 0;) {
    const int half = count / 2;
    if (t.place[t.row[first + half]] < p) {
      first += half + 1, count -= half + 1;
    } else {
      count = half;
    }
  }
  return first;
}

// There are as many places as compacted tokens. A token whose place is below their number gets that
// place; the j-th free place goes to the j-th token whose own place is past the end.
__global__ void __launch_bounds__(256) arrange_kernel(Tokens from, Tokens to) {
  const int64_t p = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (p >= from.total) return;
  const int valid = from.scalars->valid;
  int64_t k = p;
  if (p < valid) {
    k = first_from(from, valid, static_cast<int>(p));
    if (k == valid || from.place[from.row[k]] != p) k = first_from(from, valid, valid) + (p - k);
  }
  to.row[p] = from.row[k];
  to.target[p] = from.target[k];
  to.target_weight[p] = from.target_weight[k];
  to.token_weight[p] = from.token_weight[k];
}

__global__ void __launch_bounds__(threads)
    reduce_kernel(const __grid_constant__ TokenInput in, Tokens t, const float* losses,
                  TensorView loss) {
  wait_for_kernel_before();
  reduce_losses<threads, false>(in.options.reduction, in.options.empty_mean, t, losses,
                                address<float>(loss));
}

// Block n clears the row of the n-th token that is not compacted.
template <class T>
__global__ void __launch_bounds__(256) clear_rows(Tokens t, TensorView gradient) {
  const int64_t k = t.scalars->valid + int64_t{blockIdx.x};
  if (k >= t.total) return;
  const int64_t i = t.row[k];
  for (int64_t j = threadIdx.x; j < gradient.shape[1]; j += 256) {
    *address<T>(gradient, i, j) = from_f32<T>(0.0f);
  }
}

}  // namespace

void screen_tokens(const TokenInput& input, const Tokens& tokens, Stream* stream) {
  stream->launch("screen_tokens", screen_kernel, blocks_for(tokens.total, 256), 256, input, tokens);
}

void prepare_tokens(const TokenInput& input, const Tokens& tokens, const TokenOutputs& outputs,
                    Stream* stream) {
  if (tokens.inactive != nullptr || tokens.map != nullptr) screen_tokens(input, tokens, stream);
  if (tokens.total <= one_launch_tokens) {
    const unsigned blocks = blocks_for(tokens.total, threads) + 1;
    return stream->launch("prepare_tokens", prepare_kernel, blocks, threads, input, tokens,
                          outputs);
  }
  const auto blocks = static_cast<unsigned>(token_blocks(tokens.total));
  stream->launch("classify", classify_kernel, blocks, threads, input, tokens, outputs);
  stream->launch("compact", compact_kernel<false>, blocks, threads, input, tokens);
  if (tokens.place == nullptr) return;
  stream->launch("places", compact_kernel<true>, blocks, threads, input, tokens);
}

void arrange_tokens(const Tokens& from, const Tokens& to, Stream* stream) {
  stream->launch("arrange_tokens", arrange_kernel, blocks_for(from.total, 256), 256, from, to);
}

void write_loss(const TokenInput& input, const Tokens& tokens, const float* losses,
                const TensorView& loss, Stream* stream, bool early) {
  if (!loss || input.options.reduction == Reduction::none) return;
  stream->launch_config("reduce_losses", reduce_kernel,
                        LaunchShape{.blocks = 1, .threads = threads, .early = early}, input, tokens,
                        losses, loss);
}

void clear_other_rows(const Tokens& tokens, const TensorView& gradient, Stream* stream) {
  if (!gradient) return;
  with_dtype(gradient.dtype, [&](auto element) {
    stream->launch("clear_rows", clear_rows<decltype(element)>, static_cast<unsigned>(tokens.total),
                   256, tokens, gradient);
  });
}

}  // namespace logitless::cuda
