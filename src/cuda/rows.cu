// SPDX-License-Identifier: Apache-2.0
// From the partial sums of a row to its state, and from the state to the factors of its gradient.
#include "src/cuda/linear.cuh"
#include "src/cuda/row_segments.cuh"
#include "src/cuda/sm90/forward.h"

namespace logitless::cuda {
namespace {

__device__ bool find_row(const Chunk& chunk, int k) { return k < chunk.rows && is_valid(chunk, k); }

struct RowsArguments {
  LinearCall call;
  Chunk chunk;
  Partials partials;        // maximum null: Backward was given the state
  int32_t tiles, clusters;  // of units: columns, and what shared them out
  const float* target_logit;
  float* losses;  // null: each to the caller
  int32_t* finished;
  bool last;  // chunk: the losses are reduced
  // Null where no gradient is wanted; factors: where E is not kept.
  RowGradient* gradients;
  float* target_gradient;
  RowFactors* factors;
  int32_t* again;
  // Input times v; null: not here.
  const char* input;
  char* scaled;
  int64_t pitch;
  int32_t behind;  // rows behind the chunk's to be cleared with it
};

// Segments l, l + 32, ... by lane l, then the tree over the lanes: an order that depends on the
// vocabulary alone.
//   m = max m_b   S = sum s_b exp(m_b - m)   T = sum exp(m_b - m) (t_b + (m_b - m) s_b)
// Every lane gets the state; `rest`: 1 - p_t.
__device__ RowState state_of_sums(const RowsArguments& a, int row, int lane, float* rest) {
  const Chunk& chunk = a.chunk;
  const Partials& partials = a.partials;
  const bool vocab_is_whole = a.call.in.options.vocab_total == 0;
  const int64_t k = chunk.first + row;
  const int64_t base = row * partials.segments;  // of what is not summed in units
  // Loaded before they are asked for, beside the sums.
  const int64_t target = chunk.tokens.target[k];
  const float z = a.target_logit[row], weight = chunk.tokens.target_weight[k];
  const RowSegments segments(partials, row, valid_rows(chunk), a.tiles, a.clusters);
  float maximum = -infinity();
  for (int b = lane; b < segments.count(); b += 32) {
    maximum = fmaxf(maximum, segments(b).maximum);
  }
  maximum = warp_max(maximum);
  const bool here = target >= 0;
  const float others = maximum;
  if (here) maximum = fmaxf(maximum, z);
  // A NaN anywhere leaves no maximum to name.
  if (here && z != z) maximum = nan_value();
  float sum = 0, shifted = 0, weighted = 0;
  int argmax = INT32_MAX;
  for (int b = lane; b < segments.count(); b += 32) {
    const auto [own, s] = segments(b);
    // A segment of -inf alone adds 0; its NaN, if it has one, stays.
    const float lift = own == -infinity() ? 1.0f : exp_nonpositive(own - maximum);
    sum = fmaf(s, lift, sum);
    if (partials.shifted != nullptr && own != -infinity()) {
      const float distance = fmaxf(own - maximum, least_exponent);
      shifted = fmaf(lift, fmaf(distance, s, partials.shifted[base + b]), shifted);
    }
    if (partials.weighted != nullptr) weighted += partials.weighted[base + b];
    if (partials.argmax != nullptr && own == others) {
      argmax = min(argmax, partials.argmax[base + b]);
    }
  }
  sum = warp_sum(sum);
  // The maxima have missed it.
  if (sum != sum && maximum != infinity()) maximum = nan_value();
  shifted = warp_sum(shifted);
  weighted = warp_sum(weighted);
  argmax = warp_min(argmax);
  const float distance = z - maximum;
  float at_target = here ? exp_nonpositive(distance) : 0.0f;
  const float total = sum + at_target;
  RowState state;
  state.reference = maximum;
  state.log_sum = here && z == maximum ? log1pf(sum) : logf(total);
  if (maximum != maximum || maximum == infinity()) state.log_sum = nan_value();
  // Every column -inf: no probability to speak of. A shard's other columns may have some.
  if (maximum == -infinity() && (here || vocab_is_whole)) state.log_sum = nan_value();
  state.target_logit = z;
  const float c = here ? weight : 0.0f;
  if (partials.weighted != nullptr && c != 0) weighted = fmaf(c, z, weighted);
  state.weighted_logit_sum = weighted;
  if (here && at_target > 0) shifted = fmaf(at_target, fmaxf(distance, least_exponent), shifted);
  state.entropy = partials.shifted != nullptr ? state.log_sum - shifted / total : 0;
  if (here && (z > others || (z == others && target < argmax))) argmax = static_cast<int>(target);
  state.argmax = partials.argmax != nullptr ? (argmax == INT32_MAX ? 0 : argmax) : -1;
  *rest = sum / total;
  return state;
}

// Coefficients of draw without the softcap's slope.
__device__ RowGradient sloped(const RowGradient& g, float slope) {
  RowGradient s = g;
  s.probability *= slope;
  s.smoothing *= slope;
  s.onehot *= slope;
  s.entropy *= slope;
  return s;
}

// E = exp(z - z_t) serves a loss up to this many nats; beyond, the row is made again.
constexpr float most_nats = 60;
// And a one-hot part up to this many times the probability's: E of the target is 1 - o / v.
constexpr float most_onehot = 4096;

// By one lane; v of the row.
__device__ float write_factors(const RowsArguments& a, int row, const RowState& state, float rest) {
  const LinearCall& call = a.call;
  const Tokens& tokens = a.chunk.tokens;
  RowGradient g =
      sloped(token_gradient(call.in, tokens, a.chunk.first + row, state), call.map.slope);
  // Without its term the caller's entropy may be anything.
  if (g.entropy == 0) g.entropy_value = 0;
  a.gradients[row] = g;
  if (a.target_gradient != nullptr) {
    float log_p = (a.target_logit[row] - g.reference) - g.log_sum;
    log_p = log_p > 0 ? 0.0f : log_p;
    const float p = exp_any(log_p);
    float draw = target_draw(g.probability, g.onehot, p, -expm1f(log_p));
    const int target = tokens.target[a.chunk.first + row];  // negative: another shard's
    if (g.smoothing != 0 && target >= 0) {
      draw = fmaf(-g.smoothing, class_weight(call.in, target), draw);
    }
    if (g.entropy != 0) {
      const float information = fmaxf(log_p, least_exponent) + g.entropy_value;
      draw = fmaf(-(g.entropy * p), information, draw);
    }
    a.target_gradient[row] = draw * cap_slope(call.map, a.target_logit[row]);
  }
  if (a.factors == nullptr) return 0;
  const float z = state.target_logit;
  const float p = exp_any((z - state.reference) - state.log_sum);
  RowFactors f{g.probability * p, g.smoothing, 0, 0};
  const float onehot = fabsf(g.onehot), probability = fabsf(g.probability);
  const bool far = state.reference - z > most_nats || fabsf(z) >= most_anchor;
  const bool steep = onehot > most_onehot * probability;
  // A factor that f32, or the scaled input's 16 bits, would lose: a tiny token weight, say.
  const bool faint = fabsf(f.scale) < 0x1p-96f && fmaxf(onehot, probability) > 0;
  // With an infinite weight the smoothing's term cannot stand apart: 0 inf is not -s c inf.
  const bool infinite = tokens.scalars->weight_is_infinite != 0 && g.smoothing != 0;
  if (far || steep || faint || infinite) {
    f.scale = fmaxf(onehot, probability);
    f.smoothing = 0;
    f.again = 1;
    a.again[1 + atomicAdd(a.again, 1)] = row;  // in any order: each row is made alone
  } else if (f.scale != 0) {
    const float draw = target_draw(g.probability, g.onehot, p, rest);
    f.at_target = draw * cap_slope(call.map, z) / f.scale;
  }
  a.factors[row] = f;
  return f.scale;
}

// Row of the compacted input times v; a row of no token is 0.
template <class E>
__device__ void scale_row(const RowsArguments& a, int64_t row, bool valid, float v, int lane) {
  const E* from = reinterpret_cast<const E*>(a.input) + row * a.pitch;
  E* to = reinterpret_cast<E*>(a.scaled) + row * a.pitch;
  if (!valid && from == to) return;  // it was gathered as such
  constexpr int width = Pack<E>::width;
#pragma unroll 4
  for (int64_t j = lane * width; j < a.pitch; j += 32 * width) {
    Pack<E> x{};
    if (v != 0) x = *reinterpret_cast<const Pack<E>*>(from + j);
#pragma unroll
    for (int n = 0; n < width; ++n) x.x[n] = from_f32<E>(v * to_f32(x.x[n]));
    *reinterpret_cast<Pack<E>*>(to + j) = x;
  }
}

template <class E>
__device__ void finish_row(const RowsArguments& a, int row, int lane) {
  const LinearCall& call = a.call;
  const int64_t k = a.chunk.first + row;
  const bool valid = find_row(a.chunk, row);
  float v = 0;
  if (valid) {
    const Tokens& t = a.chunk.tokens;
    const int64_t i = t.row[k];
    const float weight = t.token_weight[k];
    RowState state;
    float rest = 0;
    if (a.partials.maximum != nullptr) {
      state = state_of_sums(a, row, lane, &rest);
    } else {
      state.reference = load(call.row_reference, i);
      state.log_sum = load(call.row_log_sum, i);
    }
    if (present(call.entropy)) state.entropy = load(call.entropy, i);
    if (lane == 0) {
      if (present(call.outputs.loss)) {
        *loss_of(a.losses, call.outputs.loss, i) =
            token_loss(*t.scalars, t.target[k], t.target_weight[k], weight, state);
      }
      put_state(call.in, call.outputs.statistics, i, t.target[k], state);
      if (a.gradients != nullptr) v = write_factors(a, row, state, rest);
    }
    v = __shfl_sync(whole_warp, v, 0);
  } else if (row < a.chunk.rows && lane == 0 && a.gradients != nullptr) {
    a.gradients[row] = RowGradient{};
    if (a.factors != nullptr) a.factors[row] = RowFactors{0, 0, 0, 0};
  }
  if (a.scaled != nullptr) scale_row<E>(a, row, valid, v, lane);
}

// A warp a row. The last block of the last chunk to be done reduces the losses, in an order of its
// own.
template <class E>
__global__ void __launch_bounds__(256) finish_kernel(const __grid_constant__ RowsArguments a) {
  __shared__ bool is_last;
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row < a.chunk.rows + a.behind) finish_row<E>(a, row, lane);
  if (!a.last) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(a.finished, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  reduce_losses<256>(a.call.in, a.chunk.tokens, a.losses, a.call.outputs.loss);
}

}  // namespace

void finish_rows(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                 const Chunk& chunk, bool with_factors, bool scales, const DeviceInfo& device,
                 Stream* stream) {
  const bool reduces = call.outputs.loss && call.in.options.reduction != Reduction::none;
  const bool last = chunk.first + chunk.rows >= call.shape.tokens;
  RowsArguments a{.call = call,
                  .chunk = chunk,
                  .partials = m.partials,
                  .tiles = static_cast<int32_t>(divide_up(call.shape.vocab, sm90::sum_columns)),
                  .clusters = teams_of(plan, device.multiprocessors / 2),
                  .target_logit = m.target_logit,
                  .losses = reduces ? m.losses : nullptr,
                  .finished = m.rows_finished,
                  .last = reduces && last,
                  .gradients = m.gradients,
                  .target_gradient = m.target_gradient,
                  .factors = with_factors ? m.factors : nullptr,
                  .again = m.again,
                  .input = m.input,
                  .scaled = scales ? m.scaled : nullptr,
                  .pitch = plan.hidden_pitch,
                  .behind = scales && !call.shape.fused ? static_cast<int32_t>(extra_rows) : 0};
  with_stored(call.shape.dtype, [&](auto element) {
    stream->launch("finish_rows", finish_kernel<decltype(element)>,
                   blocks_for(chunk.rows + a.behind, 8), 256, a);
  });
}

}  // namespace logitless::cuda
