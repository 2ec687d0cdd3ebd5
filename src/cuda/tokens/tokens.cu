// SPDX-License-Identifier: Apache-2.0
// Tokens prepared:
//   classify: how many count, the sum of c_t, the largest factors of the gradients; the outputs of
//             tokens that do not count
//   compact: the arrays of those that do, from how many are before them; the scalars
// Up to one_launch_tokens in one launch, a token a thread: every block counts all tokens, which is
// little beside what it does for its own, and the last one makes the scalars. Beyond, two launches
// of blocks of tokens_per_block, the second from what the first has found.
#include "src/cuda/runtime/early.cuh"
#include "src/cuda/tokens/token_scalars.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 1024, warps_per_block = threads / 32;
constexpr int rounds = tokens_per_block / threads;

// Token of this thread in round r of block b.
__device__ int64_t token_of(int b, int r) {
  return int64_t{b} * tokens_per_block + r * threads + threadIdx.x;
}

// Adds up the whole vocabulary; every block for itself.
__device__ double class_weight_sum(const TokenInput& in) {
  if (!(in.options.label_smoothing > 0) || !present(in.vocab_weight)) {
    return static_cast<double>(in.whole());
  }
  double own = 0;
  for (int64_t j = threadIdx.x; j < in.whole(); j += threads) own += load(in.vocab_weight, j);
  return block_sum(own);
}

__device__ float finite_size(float x) { return isfinite(x) ? fabsf(x) : 0.0f; }

// Writes what a token that does not count gets.
__device__ void put_other(const TokenInput& in, const TokenOutputs& out, int64_t i,
                          TokenKind kind) {
  const float value = kind == TokenKind::outside ? nan_value() : 0.0f;
  if (in.options.reduction == Reduction::none) put(out.loss, i, value);
  put_statistics(out.statistics, i, RowState{}, 0, -1);
}

__device__ TokenBlock warp_total(TokenBlock x) {
  x.valid = warp_sum(x.valid);
  x.outside = warp_sum(x.outside);
  x.weights = warp_max(x.weights);
  x.upstream = warp_max(x.upstream);
  x.statistics = warp_max(x.statistics);
  x.normalizer = warp_sum(x.normalizer);
  return x;
}
// Once a kernel.
__device__ TokenBlock block_total(const TokenBlock& own) {
  __shared__ TokenBlock warps[threads / 32];
  static_assert(threads / 32 == 32);
  const TokenBlock of_warp = warp_total(own);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return warp_total(warps[threadIdx.x % 32]);
}

// The tokens of a thread, one a round.
struct OwnTokens {
  int64_t target[rounds];
  TokenKind kind[rounds];
};

template <class T>
__device__ void read_targets(const TensorView& view, int64_t total, int b,
                             int64_t (&target)[rounds]) {
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    target[r] = i < total ? *address<const T>(view, i) : 0;
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
    own.kind[r] = token_of(b, r) < t.total ? kind_of_target(in, own.target[r]) : TokenKind::ignored;
  }
  return own;
}

// use(its block of `threads`, target) with this thread's share of all tokens.
template <class T, class F>
__device__ void for_targets_of(const TensorView& view, int total, int64_t ignored, F&& use) {
  const T* at = address<const T>(view, threadIdx.x);
  const int64_t step = threads * view.stride[0];
#pragma unroll 1
  for (int block = 0; block * threads < total; block += rounds) {
    int64_t target[rounds];
#pragma unroll
    for (int r = 0; r < rounds; ++r, at += step) {
      const bool exists = (block + r) * threads + static_cast<int>(threadIdx.x) < total;
      target[r] = exists ? *at : ignored;
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
// Every token that counts is weighed like any other.
__device__ bool weighs_alike(const TokenInput& in) {
  if (present(in.vocab_weight)) return false;
  return !in.gradients ||
         !(present(in.token_weight) || in.per_row_upstream || in.statistics_gradients);
}

// |a| w of a token, and the largest factors of what else is asked for.
__device__ void weigh(const TokenInput& in, const LossConstants& constants, int64_t i, float c,
                      TokenBlock* own) {
  const float a = token_weight(in, i);
  const float w = (1 - constants.smoothing) * fabsf(c) +
                  constants.smoothing_per_class * constants.class_weight_sum;
  own->weights = fmaxf(own->weights, finite_size(a * w));
  const auto largest = [&](const TensorView& view, float* most) {
    if (present(view)) *most = fmaxf(*most, finite_size(load(view, i)));
  };
  if (in.per_row_upstream) largest(in.grad_loss, &own->upstream);
  largest(in.grad_lse, &own->statistics);
  largest(in.grad_target_logit, &own->statistics);
  largest(in.grad_entropy, &own->statistics);
}

// One outside counts as a token; it has no class weight.
__device__ void finish_total(const TokenInput& in, TokenBlock* all) {
  if (!present(in.vocab_weight)) all->normalizer = all->valid + all->outside;
  if (threadIdx.x == 0 && all->outside > 0 && present(in.fault)) {
    atomicOr(address<int>(in.fault), 1);
  }
}

// Adds up what the tokens of blocks [first, end) come to.
__device__ TokenBlock classify(const TokenInput& in, const Tokens& t, int first, int end) {
  TokenBlock own{};
  own.class_weight_sum = class_weight_sum(in);
  const LossConstants constants = constants_of(in, own.class_weight_sum);
#pragma unroll 1
  for (int b = first; b < end; ++b) {
    const OwnTokens tokens = read_tokens(in, t, b);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      if (tokens.kind[r] == TokenKind::outside) ++own.outside;
      if (tokens.kind[r] != TokenKind::counts) continue;
      ++own.valid;
      const float c = target_weight(in, tokens.target[r]);
      own.normalizer += c;
      if (in.gradients) weigh(in, constants, token_of(b, r), c, &own);
    }
  }
  TokenBlock all = block_total(own);
  finish_total(in, &all);
  return all;
}

// The same of all tokens where they weigh alike.
__device__ TokenBlock count_alike(const TokenInput& in, const Tokens& t) {
  TokenBlock all{};
  int valid = 0, meant = 0;
  for_targets(in, t, [&](int, int64_t target) {
    valid += kind_of_target(in, target) == TokenKind::counts;
    meant += target != in.options.ignore_index;
  });
  all.valid = block_sum(valid);
  meant = block_sum(meant);
  if (in.options.out_of_range == OutOfRange::error) all.outside = meant - all.valid;
  all.class_weight_sum = static_cast<double>(in.whole());
  const LossConstants constants = constants_of(in, all.class_weight_sum);
  if (in.gradients && all.valid > 0) weigh(in, constants, 0, 1, &all);  // any token
  finish_total(in, &all);
  return all;
}

// Serves all tokens; `before`: how many count in the blocks before b.
__device__ TokenBlock total_of(const Tokens& t, int b, int blocks, int* before) {
  *before = 0;
  TokenBlock all{};
  for (int other = threadIdx.x; other < blocks; other += threads) {
    const TokenBlock& block = t.blocks[other];
    all.valid += block.valid;
    all.outside += block.outside;
    all.normalizer += block.normalizer;
    all.weights = fmaxf(all.weights, block.weights);
    all.upstream = fmaxf(all.upstream, block.upstream);
    all.statistics = fmaxf(all.statistics, block.statistics);
    if (other < b) *before += block.valid;
  }
  all.class_weight_sum = t.blocks[0].class_weight_sum;
  *before = block_sum(*before);
  return block_total(all);
}

// Counts of the rounds' warps, in the order of their tokens, become sums of those before.
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

// Token i, of which k count before it, of `valid`.
__device__ void put_token(const TokenInput& in, const Tokens& t, int64_t i, int64_t target,
                          TokenKind kind, int64_t k, int valid) {
  const bool counts = kind == TokenKind::counts;
  const int64_t at = counts ? k : valid + (i - k);
  t.row[at] = static_cast<int32_t>(i);
  // The others get nothing: they may be read before it is known how many count.
  t.target[at] = counts ? column_of_target(in, target) : -1;
  t.target_weight[at] = counts ? target_weight(in, target) : 0.0f;
  t.token_weight[at] = counts ? token_weight(in, i) : 0.0f;
}

// `before`: how many count in front of block b, of `valid`.
__device__ void compact(const TokenInput& in, const Tokens& t, int b, int valid, int before) {
  __shared__ int warps[rounds * warps_per_block];
  const OwnTokens tokens = read_tokens(in, t, b);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned ballots[rounds];
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    ballots[r] = __ballot_sync(whole_warp, tokens.kind[r] == TokenKind::counts);
    if (lane == 0) warps[r * warps_per_block + warp] = __popc(ballots[r]);
  }
  scan_warps(warps);
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    if (i >= t.total) break;
    const int64_t k =
        before + warps[r * warps_per_block + warp] + __popc(ballots[r] & ((1u << lane) - 1));
    put_token(in, t, i, tokens.target[r], tokens.kind[r], k, valid);
  }
}

// The same of `threads` tokens, block b, from all of them.
__device__ void count_and_compact(const TokenInput& in, const Tokens& t, const TokenOutputs& out,
                                  int b) {
  __shared__ int warps[warps_per_block], before_block[warps_per_block], valid[warps_per_block];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t i = int64_t{b} * threads + threadIdx.x;
  const int64_t target = i < t.total ? load_int(in.target, i) : 0;
  const TokenKind kind = i < t.total ? kind_of_target(in, target) : TokenKind::ignored;
  int before = 0, all = 0;
  for_targets(in, t, [&](int block, int64_t target) {
    const bool counts = kind_of_target(in, target) == TokenKind::counts;
    all += counts;
    before += counts && block < b;
  });
  before = warp_sum(before);
  all = warp_sum(all);
  const unsigned ballot = __ballot_sync(whole_warp, kind == TokenKind::counts);
  if (lane == 0) warps[warp] = __popc(ballot), before_block[warp] = before, valid[warp] = all;
  __syncthreads();
  static_assert(warps_per_block == 32);
  before = warp_sum(before_block[lane] + (lane < warp ? warps[lane] : 0));
  all = warp_sum(valid[lane]);
  if (i >= t.total) return;
  put_token(in, t, i, target, kind, before + __popc(ballot & ((1u << lane) - 1)), all);
  if (kind != TokenKind::counts) put_other(in, out, i, kind);
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
    if (i < t.total && tokens.kind[r] != TokenKind::counts) put_other(in, out, i, tokens.kind[r]);
  }
}
__global__ void __launch_bounds__(threads)
    compact_kernel(const __grid_constant__ TokenInput in, Tokens t) {
  let_next_start();
  const int b = static_cast<int>(blockIdx.x);
  int before;
  const TokenBlock all = total_of(t, b, static_cast<int>(gridDim.x), &before);
  if (b == 0 && threadIdx.x == 0) *t.scalars = scalars_of(in, all);
  compact(in, t, b, all.valid, before);
}

__global__ void __launch_bounds__(threads)
    reduce_kernel(const __grid_constant__ TokenInput in, Tokens t, const float* losses,
                  TensorView loss) {
  wait_for_kernel_before();
  reduce_losses<threads, false>(in.options.reduction, in.options.empty_mean, t, losses,
                                address<float>(loss));
}

// Block n: the row of the n-th token that does not count.
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

void prepare_tokens(const TokenInput& input, const Tokens& tokens, const TokenOutputs& outputs,
                    Stream* stream) {
  if (tokens.total <= one_launch_tokens) {
    const unsigned blocks = blocks_for(tokens.total, threads) + 1;
    return stream->launch("prepare_tokens", prepare_kernel, blocks, threads, input, tokens,
                          outputs);
  }
  const auto blocks = static_cast<unsigned>(token_blocks(tokens.total));
  stream->launch("classify", classify_kernel, blocks, threads, input, tokens, outputs);
  stream->launch("compact", compact_kernel, blocks, threads, input, tokens);
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
