// SPDX-License-Identifier: Apache-2.0
// Tokens prepared in four small kernels, each a pass over [N]:
//   classify: valid, outside and sum of c_t of every block of tokens
//   scan: offsets of the blocks, normalizer, constants
//   compact: the arrays of the valid tokens; the largest factors of a block's gradients
//   scale: the factor common to all gradients
#include "src/cuda/tokens.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = tokens_per_block;

__global__ void __launch_bounds__(threads) classify(TokenInput in, Tokens t) {
  const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
  TokenKind kind = TokenKind::ignored;
  double weight = 0;
  if (i < t.total) {
    const int64_t target = load_int(in.target, i);
    kind = kind_of_target(in, target);
    // A target outside counts as a token; it has no class weight.
    if (kind == TokenKind::counts) {
      weight = present(in.vocab_weight) ? load(in.vocab_weight, target) : 1;
    } else if (kind == TokenKind::outside && !present(in.vocab_weight)) {
      weight = 1;
    }
  }
  const int valid = block_sum(kind == TokenKind::counts ? 1 : 0);
  const int outside = block_sum(kind == TokenKind::outside ? 1 : 0);
  const double normalizer = block_sum(weight);
  if (threadIdx.x == 0) {
    t.block_valid[blockIdx.x] = valid;
    t.block_outside[blockIdx.x] = outside;
    t.block_normalizer[blockIdx.x] = normalizer;
    if (outside > 0 && present(in.fault)) atomicOr(address<int>(in.fault), 1);
  }
}

__device__ double normalizer_of(const TokenInput& in, double counted) {
  if (in.options.reduction != Reduction::mean) return 1;
  if (present(in.normalizer)) {
    return in.normalizer.dtype == DType::i64 ? static_cast<double>(load_int(in.normalizer, 0))
                                             : static_cast<double>(load(in.normalizer));
  }
  return in.options.normalizer != 0 ? in.options.normalizer : counted;
}

// One block. Offsets replace the blocks' counts.
__global__ void __launch_bounds__(threads) scan(TokenInput in, Tokens t, int blocks) {
  __shared__ int inclusive[threads];
  int before = 0, outside = 0;
  double counted = 0;
  for (int first = 0; first < blocks; first += threads) {
    const int b = first + static_cast<int>(threadIdx.x);
    const int own = b < blocks ? t.block_valid[b] : 0;
    outside += b < blocks ? t.block_outside[b] : 0;
    counted += b < blocks ? t.block_normalizer[b] : 0;
    __syncthreads();
    inclusive[threadIdx.x] = own;
    __syncthreads();
    for (int step = 1; step < threads; step *= 2) {
      const int left = static_cast<int>(threadIdx.x) >= step ? inclusive[threadIdx.x - step] : 0;
      __syncthreads();
      inclusive[threadIdx.x] += left;
      __syncthreads();
    }
    if (b < blocks) t.block_valid[b] = before + inclusive[threadIdx.x] - own;
    before += inclusive[threads - 1];
  }
  outside = block_sum(outside);
  counted = block_sum(counted);
  double weight_sum = static_cast<double>(in.whole());
  const bool smooths = in.options.label_smoothing > 0;
  if (smooths && present(in.vocab_weight)) {
    double own = 0;
    for (int64_t j = threadIdx.x; j < in.whole(); j += threads) own += load(in.vocab_weight, j);
    weight_sum = block_sum(own);
  }
  if (threadIdx.x != 0) return;
  TokenScalars& s = *t.scalars;
  s.valid = before;
  s.outside = outside;
  s.normalizer = normalizer_of(in, counted);
  s.empty_mean = s.normalizer == 0;
  s.constants = {};
  s.constants.smoothing = in.options.label_smoothing;
  s.constants.z_loss = in.options.z_loss;
  if (smooths) {
    s.constants.smoothing_per_class = static_cast<float>(
        static_cast<double>(in.options.label_smoothing) / static_cast<double>(in.whole()));
    s.constants.class_weight_sum = static_cast<float>(weight_sum);
  }
  s.gradient_scale = s.inv_gradient_scale = s.upstream = 0;
}

__device__ float finite_size(float x) { return isfinite(x) ? fabsf(x) : 0.0f; }

__global__ void __launch_bounds__(threads) compact(TokenInput in, Tokens t) {
  __shared__ int warp_valid[threads / 32];
  const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t target = 0;
  TokenKind kind = TokenKind::ignored;
  if (i < t.total) {
    target = load_int(in.target, i);
    kind = kind_of_target(in, target);
  }
  const unsigned ballot = __ballot_sync(whole_warp, kind == TokenKind::counts);
  if (lane == 0) warp_valid[warp] = __popc(ballot);
  __syncthreads();
  float weights = 0, upstream = 0, statistics = 0;
  if (kind == TokenKind::counts) {
    int k = t.block_valid[blockIdx.x] + __popc(ballot & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) k += warp_valid[w];
    const int64_t column = target - in.start();
    const float c = present(in.vocab_weight) ? load(in.vocab_weight, target) : 1.0f;
    const float a = present(in.token_weight) ? load(in.token_weight, i) : 1.0f;
    t.row[k] = static_cast<int32_t>(i);
    t.target[k] = column >= 0 && column < in.vocab ? static_cast<int32_t>(column) : -1;
    t.target_weight[k] = c;
    t.token_weight[k] = a;
    const LossConstants& constants = t.scalars->constants;
    weights = finite_size(a * ((1 - constants.smoothing) * fabsf(c) +
                               constants.smoothing_per_class * constants.class_weight_sum));
    if (in.per_row_upstream) upstream = finite_size(load(in.grad_loss, i));
    if (present(in.grad_lse)) statistics = finite_size(load(in.grad_lse, i));
    if (present(in.grad_target_logit)) {
      statistics = fmaxf(statistics, finite_size(load(in.grad_target_logit, i)));
    }
    if (present(in.grad_entropy)) {
      statistics = fmaxf(statistics, finite_size(load(in.grad_entropy, i)));
    }
  }
  if (!in.gradients) return;
  weights = block_max(weights);
  upstream = block_max(upstream);
  statistics = block_max(statistics);
  if (threadIdx.x == 0) {
    float* largest = t.block_largest + 3 * int64_t{blockIdx.x};
    largest[0] = weights;
    largest[1] = upstream;
    largest[2] = statistics;
  }
}

// The least power of two >= x; 0 for 0. Kept where it and its inverse are normal numbers.
__device__ double power_of_two_above(double x) {
  if (!(x > 0)) return 0;
  int exponent;
  const double mantissa = frexp(x, &exponent);
  exponent = mantissa == 0.5 ? exponent - 1 : exponent;
  return ldexp(1.0, min(max(exponent, -100), 100));
}

// See gradient_scale in src/cpu/tokens.h: the same rule. One block.
__global__ void __launch_bounds__(threads) scale(TokenInput in, Tokens t, int blocks) {
  float largest[3] = {0, 0, 0};
  for (int b = threadIdx.x; b < blocks; b += threads) {
    for (int k = 0; k < 3; ++k) largest[k] = fmaxf(largest[k], t.block_largest[3 * b + k]);
  }
  for (float& x : largest) x = block_max(x);
  if (threadIdx.x != 0) return;
  const LossOptions& o = in.options;
  TokenScalars& s = *t.scalars;
  double common = 1;
  if (o.reduction != Reduction::none) {
    common = present(in.grad_loss) ? load(in.grad_loss) : 1;
    if (o.reduction == Reduction::mean) common /= s.normalizer;
    if (s.empty_mean) common = o.empty_mean == EmptyMean::zero ? 0 : nan("");
  }
  const double steepest = fabs(static_cast<double>(o.logit_scale)) / o.temperature;
  const double magnitude = largest[0] * steepest;
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
    double g = largest[1];
    if (!in.per_row_upstream && s.valid > 0 && isfinite(common)) g = fabs(common);
    scale = power_of_two_above(fmax(g * weights, static_cast<double>(largest[2]) / in.lift));
  }
  if (s.valid == 0) scale = 0;  // NaN of an empty mean must not reach sums over no token
  s.gradient_scale = static_cast<float>(scale);
  s.inv_gradient_scale = scale == 0 ? 0 : static_cast<float>(1 / scale);
  float upstream =
      apart ? static_cast<float>(common) * s.inv_gradient_scale : static_cast<float>(1 / weights);
  const bool flat = o.input_kind == InputKind::logits && in.whole() == 1 && o.z_loss == 0;
  if (flat && isfinite(upstream)) upstream = 0;
  s.upstream = upstream;
}

__global__ void __launch_bounds__(256)
    loss_of_rows(Tokens t, const RowState* states, float* losses) {
  const int64_t k = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (k >= t.scalars->valid) return;
  const float weight = t.target[k] < 0 ? 0 : t.target_weight[k];
  losses[k] = row_loss(t.scalars->constants, states[k], weight, t.token_weight[k]);
}

// One block; per thread in token order, then over the threads: the order is that of the positions
// among the valid tokens alone.
__global__ void __launch_bounds__(threads)
    reduce_losses(TokenInput in, Tokens t, const float* losses, TensorView loss) {
  double sum = 0;
  const int valid = t.scalars->valid;
  for (int k = threadIdx.x; k < valid; k += threads) sum += losses[k];
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  const TokenScalars& s = *t.scalars;
  if (in.options.reduction == Reduction::mean) sum /= s.normalizer;
  if (s.empty_mean) sum = in.options.empty_mean == EmptyMean::zero ? 0 : nan("");
  if (s.outside > 0) sum = nan("");
  *address<float>(loss) = static_cast<float>(sum);
}

__device__ void put(const TensorView& view, int64_t i, float x) {
  if (present(view)) *address<float>(view, i) = x;
}

__device__ void put_statistics(const TokenStatistics& out, int64_t i, const RowState& s, float lse,
                               int64_t argmax) {
  put(out.lse, i, lse);
  put(out.target_logit, i, s.target_logit);
  put(out.entropy, i, s.entropy);
  put(out.row_reference, i, s.reference);
  put(out.row_log_sum, i, s.log_sum);
  put(out.weighted_logit_sum, i, s.weighted_logit_sum);
  if (present(out.argmax)) store_int(out.argmax, i, argmax);
}

// Compacted token k: its statistics, and its loss where every token has one.
__global__ void __launch_bounds__(256) scatter(TokenInput in, Tokens t, const RowState* states,
                                               const float* losses, TokenOutputs out) {
  const int64_t k = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (k >= t.scalars->valid) return;
  const int64_t i = t.row[k];
  if (losses != nullptr) put(out.loss, i, losses[k]);
  if (states == nullptr) return;
  RowState s = states[k];
  if (t.target[k] < 0) s.target_logit = -infinity();
  put_statistics(out.statistics, i, s, s.lse(), s.argmax + in.start());
}

// The other tokens.
__global__ void __launch_bounds__(256) fill_others(TokenInput in, int64_t total, TokenOutputs out) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= total) return;
  const TokenKind kind = kind_of_target(in, load_int(in.target, i));
  if (kind == TokenKind::counts) return;
  const float value = kind == TokenKind::outside ? nan_value() : 0.0f;
  put(out.loss, i, value);
  RowState s{};
  put_statistics(out.statistics, i, s, 0, -1);
}

template <class T>
__global__ void __launch_bounds__(256) clear_rows(TokenInput in, TensorView gradient) {
  const int64_t i = blockIdx.x;
  if (kind_of_target(in, load_int(in.target, i)) == TokenKind::counts) return;
  for (int64_t j = threadIdx.x; j < gradient.shape[1]; j += 256) {
    *address<T>(gradient, i, j) = from_f32<T>(0.0f);
  }
}

}  // namespace

void prepare_tokens(const TokenInput& input, const Tokens& tokens, Stream* stream) {
  const unsigned blocks = blocks_for(tokens.total, tokens_per_block);
  stream->launch("classify", classify, blocks, threads, input, tokens);
  stream->launch("scan", scan, 1, threads, input, tokens, static_cast<int>(blocks));
  stream->launch("compact", compact, blocks, threads, input, tokens);
  if (input.gradients) {
    stream->launch("scale", scale, 1, threads, input, tokens, static_cast<int>(blocks));
  }
}

void write_losses(const TokenInput& input, const Tokens& tokens, const float* losses,
                  const TensorView& loss, Stream* stream) {
  if (!loss) return;
  if (input.options.reduction != Reduction::none) {
    stream->launch("reduce_losses", reduce_losses, 1, threads, input, tokens, losses, loss);
    return;
  }
  const unsigned blocks = blocks_for(tokens.total, 256);
  const TokenOutputs outputs{loss, {}};
  stream->launch("scatter", scatter, blocks, 256, input, tokens,
                 static_cast<const RowState*>(nullptr), losses, outputs);
  stream->launch("fill_others", fill_others, blocks, 256, input, tokens.total, outputs);
}

void write_tokens(const TokenInput& input, const Tokens& tokens, const RowState* states,
                  const TokenOutputs& outputs, float* losses, Stream* stream) {
  const unsigned blocks = blocks_for(tokens.total, 256);
  if (outputs.loss) {
    stream->launch("loss_of_rows", loss_of_rows, blocks, 256, tokens, states, losses);
  }
  write_losses(input, tokens, losses, outputs.loss, stream);
  const TokenOutputs statistics{{}, outputs.statistics};
  stream->launch("scatter", scatter, blocks, 256, input, tokens, states,
                 static_cast<const float*>(nullptr), statistics);
  stream->launch("fill_others", fill_others, blocks, 256, input, tokens.total, statistics);
}

void clear_other_rows(const TokenInput& input, const TensorView& gradient, Stream* stream) {
  if (!gradient) return;
  with_dtype(gradient.dtype, [&](auto element) {
    stream->launch("clear_rows", clear_rows<decltype(element)>,
                   static_cast<unsigned>(gradient.shape[0]), 256, input, gradient);
  });
}

}  // namespace logitless::cuda
