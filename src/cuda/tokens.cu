// SPDX-License-Identifier: Apache-2.0
// Tokens prepared a block of tokens_per_block at a time:
//   classify: how many count, the sum of c_t, the largest factors of the gradients; the outputs of
//             tokens that do not count
//   compact: the arrays of those that do, from the blocks before; by the first block the scalars
// In one launch where one block holds all, else in two.
#include "src/cuda/early.cuh"
#include "src/cuda/tokens.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 1024, rounds = tokens_per_block / threads;

// Token of this thread in round r of block b.
__device__ int64_t token_of(int b, int r) {
  return int64_t{b} * tokens_per_block + r * threads + threadIdx.x;
}

__device__ double normalizer_of(const TokenInput& in, double counted) {
  if (in.options.reduction != Reduction::mean) return 1;
  if (present(in.normalizer)) {
    return in.normalizer.dtype == DType::i64 ? static_cast<double>(load_int(in.normalizer, 0))
                                             : static_cast<double>(load(in.normalizer));
  }
  return in.options.normalizer != 0 ? in.options.normalizer : counted;
}

__device__ LossConstants constants_of(const TokenInput& in, double class_weight_sum) {
  LossConstants c;
  c.smoothing = in.options.label_smoothing;
  c.z_loss = in.options.z_loss;
  if (c.smoothing > 0) {
    c.smoothing_per_class = static_cast<float>(static_cast<double>(in.options.label_smoothing) /
                                               static_cast<double>(in.whole()));
    c.class_weight_sum = static_cast<float>(class_weight_sum);
  }
  return c;
}

// Of the whole vocabulary; every block for itself.
__device__ double class_weight_sum(const TokenInput& in) {
  if (!(in.options.label_smoothing > 0) || !present(in.vocab_weight)) {
    return static_cast<double>(in.whole());
  }
  double own = 0;
  for (int64_t j = threadIdx.x; j < in.whole(); j += threads) own += load(in.vocab_weight, j);
  return block_sum(own);
}

__device__ float finite_size(float x) { return isfinite(x) ? fabsf(x) : 0.0f; }

// What a token that does not count gets.
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

__device__ OwnTokens read_tokens(const TokenInput& in, const Tokens& t, int b) {
  OwnTokens own;
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    own.target[r] = i < t.total ? load_int(in.target, i) : 0;
  }
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    own.kind[r] = token_of(b, r) < t.total ? kind_of_target(in, own.target[r]) : TokenKind::ignored;
  }
  return own;
}

__device__ TokenBlock classify(const TokenInput& in, const Tokens& t, const TokenOutputs& out,
                               int b, const OwnTokens& tokens) {
  TokenBlock own{};
  own.class_weight_sum = class_weight_sum(in);
  const LossConstants constants = constants_of(in, own.class_weight_sum);
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r), target = tokens.target[r];
    if (i >= t.total) break;
    const TokenKind kind = tokens.kind[r];
    if (kind != TokenKind::counts) put_other(in, out, i, kind);
    if (kind == TokenKind::outside) {
      // It counts as a token; it has no class weight.
      ++own.outside;
      if (!present(in.vocab_weight)) own.normalizer += 1;
    }
    if (kind != TokenKind::counts) continue;
    ++own.valid;
    const float c = target_weight(in, target);
    own.normalizer += c;
    if (!in.gradients) continue;
    const float a = token_weight(in, i);
    const float w = (1 - constants.smoothing) * fabsf(c) +
                    constants.smoothing_per_class * constants.class_weight_sum;
    own.weights = fmaxf(own.weights, finite_size(a * w));
    const auto largest = [&](const TensorView& view, float* most) {
      if (present(view)) *most = fmaxf(*most, finite_size(load(view, i)));
    };
    if (in.per_row_upstream) largest(in.grad_loss, &own.upstream);
    largest(in.grad_lse, &own.statistics);
    largest(in.grad_target_logit, &own.statistics);
    largest(in.grad_entropy, &own.statistics);
  }
  const TokenBlock all = block_total(own);
  if (threadIdx.x == 0 && all.outside > 0 && present(in.fault)) {
    atomicOr(address<int>(in.fault), 1);
  }
  return all;
}

// Of all tokens; `before`: how many count in the blocks before b.
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

// The least power of two >= x; 0 for 0. Kept where it and its inverse are normal numbers.
__device__ double power_of_two_above(double x) {
  if (!(x > 0)) return 0;
  int exponent;
  const double mantissa = frexp(x, &exponent);
  exponent = mantissa == 0.5 ? exponent - 1 : exponent;
  return ldexp(1.0, min(max(exponent, -100), 100));
}

// All but the arrays. The gradients' factors: see gradient_scale in src/cpu/tokens.h, the same
// rule.
__device__ TokenScalars scalars_of(const TokenInput& in, const TokenBlock& all) {
  const LossOptions& o = in.options;
  TokenScalars s{};
  s.one = 1;
  s.valid = all.valid;
  s.outside = all.outside;
  s.normalizer = normalizer_of(in, all.normalizer);
  s.empty_mean = s.normalizer == 0;
  s.constants = constants_of(in, all.class_weight_sum);
  if (!in.gradients) return s;
  double common = 1;
  if (o.reduction != Reduction::none) {
    common = present(in.grad_loss) ? load(in.grad_loss) : 1;
    if (o.reduction == Reduction::mean) common /= s.normalizer;
    if (s.empty_mean) common = o.empty_mean == EmptyMean::zero ? 0 : nan("");
  }
  const double steepest = fabs(static_cast<double>(o.logit_scale)) / o.temperature;
  const double magnitude = all.weights * steepest;
  const double most = 8192 / in.lift;  // f16 ends at 65504
  double weights = 1;
  if (magnitude > most) {
    weights = power_of_two_above(magnitude / most);
  } else if (magnitude > 0 && magnitude < 0.125) {
    weights = power_of_two_above(magnitude);
  }
  const bool apart = in.per_row_upstream || in.statistics_gradients;
  weights /= in.lift;
  double scale = static_cast<float>(common) * weights;
  if (apart) {
    double g = all.upstream;
    if (!in.per_row_upstream && s.valid > 0 && isfinite(common)) g = fabs(common);
    // The map's slope comes on top of the statistics' gradients, as it is part of `magnitude`.
    const double slope = fmax(1.0, steepest * in.lift / 1024);
    scale = power_of_two_above(fmax(g * weights, all.statistics * slope / in.lift));
  }
  if (s.valid == 0) scale = 0;  // NaN of an empty mean must not reach sums over no token
  s.gradient_scale = static_cast<float>(scale);
  s.inv_gradient_scale = scale == 0 ? 0 : static_cast<float>(1 / scale);
  float upstream =
      apart ? static_cast<float>(common) * s.inv_gradient_scale : static_cast<float>(1 / weights);
  const bool flat = o.input_kind == InputKind::logits && in.whole() == 1 && o.z_loss == 0;
  if (flat && isfinite(upstream)) upstream = 0;
  s.upstream = upstream;
  return s;
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

// `before`: how many count in front of block b, of `all`.
__device__ void compact(const TokenInput& in, const Tokens& t, int b, const OwnTokens& tokens,
                        const TokenBlock& all, int before) {
  __shared__ int warps[rounds * threads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned ballots[rounds];
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    ballots[r] = __ballot_sync(whole_warp, tokens.kind[r] == TokenKind::counts);
    if (lane == 0) warps[r * (threads / 32) + warp] = __popc(ballots[r]);
  }
  scan_warps(warps);
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    const int64_t i = token_of(b, r);
    if (i >= t.total) break;
    const int64_t k =
        before + warps[r * (threads / 32) + warp] + __popc(ballots[r] & ((1u << lane) - 1));
    if ((ballots[r] >> lane & 1) == 0) {
      t.row[all.valid + (i - k)] = static_cast<int32_t>(i);
      continue;
    }
    const int64_t target = tokens.target[r];
    t.row[k] = static_cast<int32_t>(i);
    t.target[k] = column_of_target(in, target);
    t.target_weight[k] = target_weight(in, target);
    t.token_weight[k] = token_weight(in, i);
  }
  if (b == 0 && threadIdx.x == 0) *t.scalars = scalars_of(in, all);
}

__global__ void __launch_bounds__(threads)
    prepare_kernel(const __grid_constant__ TokenInput in, Tokens t,
                   const __grid_constant__ TokenOutputs out) {
  let_next_start();
  const OwnTokens tokens = read_tokens(in, t, 0);
  const TokenBlock all = classify(in, t, out, 0, tokens);
  compact(in, t, 0, tokens, all, 0);
}
__global__ void __launch_bounds__(threads)
    classify_kernel(const __grid_constant__ TokenInput in, Tokens t,
                    const __grid_constant__ TokenOutputs out) {
  const int b = static_cast<int>(blockIdx.x);
  const TokenBlock all = classify(in, t, out, b, read_tokens(in, t, b));
  if (threadIdx.x == 0) t.blocks[b] = all;
}
__global__ void __launch_bounds__(threads)
    compact_kernel(const __grid_constant__ TokenInput in, Tokens t) {
  let_next_start();
  const int b = static_cast<int>(blockIdx.x);
  int before;
  const TokenBlock all = total_of(t, b, static_cast<int>(gridDim.x), &before);
  compact(in, t, b, read_tokens(in, t, b), all, before);
}

__global__ void __launch_bounds__(threads)
    reduce_kernel(const __grid_constant__ TokenInput in, Tokens t, const float* losses,
                  TensorView loss) {
  wait_for_kernel_before();
  reduce_losses<threads>(in, t, losses, loss);
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
  const auto blocks = static_cast<unsigned>(token_blocks(tokens.total));
  if (blocks == 1) {
    return stream->launch("prepare_tokens", prepare_kernel, 1, threads, input, tokens, outputs);
  }
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
