// SPDX-License-Identifier: Apache-2.0
// Computes a row's state from its partial sums, and the factors of its gradient from the state.
#include <type_traits>

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/row_sums.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/runtime/early.cuh"
#include "src/kept.h"

namespace logitless::cuda {
namespace {

constexpr int threads = 256, unit_lanes = 4;

__device__ bool find_row(const Chunk& chunk, int k) { return k < chunk.rows && is_valid(chunk, k); }

// Each block runs this code once, so most of the time goes into fetching code and parameters. Calls
// without options therefore have their own kernels with fewer parameters.
struct TokenValues {  // the caller's [N] f32
  float* data = nullptr;
  int64_t stride = 0;
  __device__ void put(int64_t i, float x) const {
    if (data != nullptr) data[i * stride] = x;
  }
};
struct PlainRows {
  Chunk chunk;
  Partials partials;     // maximum is null if Backward was given the state
  int32_t tiles, teams;  // UnitShares
  const float* target_logit;
  float* losses;  // [N]  compacted, to be reduced; null: written per token
  TokenValues loss, reference, log_sum, logprob;
  Reduction reduction;
  EmptyMean empty_mean;
  bool vocab_is_whole;
  bool last;  // the last chunk, after which the losses are reduced
  int32_t* finished;
  // Null without gradients. target_gradient is also null if it is not needed, factors if E is not
  // used.
  RowGradient* gradients;
  float* target_gradient;
  RowFactors* factors;
  int32_t* again;
  std::array<Panel, 2> kept;  // panels of E, whose target columns are written here
  // `scaled` receives the input times v; null: another kernel writes it.
  const char* input;
  // If not 0, `input` is the caller's, with this distance between rows; else compacted.
  int64_t input_stride;
  char* scaled;
  int64_t pitch;
  int32_t behind;      // rows of `scaled` after the chunk's, which become 0
  int32_t unused = 0;  // GCC 12 does not initialize the padding, and tests compare whole launches
};
struct OptionRows : PlainRows {
  LinearCall call;
};
template <bool kPlain>
using RowsArguments = std::conditional_t<kPlain, PlainRows, OptionRows>;

// Whether a forward asks only for loss, state, logprob and gradients, without map or smoothing.
bool is_plain(const LinearCall& call) {
  const TokenInput& in = call.in;
  bool asks = false;
  for (const Statistic& statistic : kStatistics) {
    const auto tensor = statistic.tensor;
    const bool state =
        tensor == &Call::row_reference || tensor == &Call::row_log_sum || tensor == &Call::logprob;
    asks |= !state && call.outputs.statistics.*statistic.view;
  }
  return call.shape.forward && !forms_dz(call.shape.kernels.kept) && !asks && !call.kept.rows &&
         call.map.identity && !in.makes_maps && !(in.options.label_smoothing > 0) &&
         !call.entropy && !in.per_row_upstream && !in.statistics_gradients;
}

// Loads a token before it is known whether the row counts; if it does not, the result is not used.
__device__ RowToken load_token(const PlainRows& a, int row) {
  const Tokens& t = a.chunk.tokens;
  const int64_t k = a.chunk.first + row;
  return {t.row[k], t.target[k], t.target_weight[k], t.token_weight[k], a.target_logit[row]};
}

__device__ RowSegments segments_of(const PlainRows& a, int row) {
  return {a.partials, row, valid_rows(a.chunk), a.tiles, a.teams};
}

__device__ KeptRow* kept_row(const KeptState& kept, int64_t token) {
  return reinterpret_cast<KeptRow*>(kept.rows + token * kept_row_width);
}

__device__ bool same_bits(float a, float b) { return __float_as_uint(a) == __float_as_uint(b); }

// 1 - p_t, from a state of the whole vocabulary.
__device__ float rest_of(const RowToken& token, const RowState& state) {
  const float log_p = (token.target_logit - state.reference) - state.log_sum;
  return log_p > 0 ? 0.0f : -expm1f(log_p);
}

__device__ bool is_shard(const LinearCall& call) {
  return call.in.options.vocab_total > call.shape.vocab;
}

// Whether a Forward's kept row can belong to this state. A shard is given the state of the whole
// vocabulary, whose lse is at least the shard's own, up to rounding.
__device__ bool is_kept_of(const LinearCall& call, const KeptRow& kept, const RowState& state) {
  if (!is_shard(call)) {
    return same_bits(kept.reference, state.reference) && same_bits(kept.log_sum, state.log_sum);
  }
  return !((kept.reference - state.reference) + (kept.log_sum - state.log_sum) > kept_tolerance);
}

// Finds 1 - p_t, which a shard's kept row does not have, and whether E was overwritten. If the kept
// row does not belong to this state or call, the state becomes NaN and the fault word is set.
__device__ void load_kept(const LinearCall& call, const RowToken& token, RowState* state,
                          float* rest, bool* overwritten) {
  KeptRow* row = kept_row(call.kept, token.i);
  const KeptRow kept = *row;
  *rest = is_shard(call) ? rest_of(token, *state) : kept.rest;
  *overwritten = kept.overwritten != 0;
  if (call.kept.consumes) row->layout = 0;
  if (is_kept_of(call, kept, *state) && kept.layout == call.kept.layout &&
      kept.columns == static_cast<float>(call.kept.columns)) {
    return;
  }
  state->reference = nan_value();
  if (present(call.in.fault)) atomicOr(address<int>(call.in.fault), 2);
}

// Consumes the state even of a token without a gradient, so that no other Backward uses it.
__device__ void use_up(const LinearCall& call, int64_t token) {
  if (call.kept.rows == nullptr || call.shape.forward || !call.kept.consumes) return;
  if (kind_of_target(call.in, load_int(call.in.target, token)) != TokenKind::counts) return;
  kept_row(call.kept, token)->layout = 0;
}

template <bool kPlain>
__device__ void put_outputs(const RowsArguments<kPlain>& a, int row, const RowToken& token,
                            const RowStatistics& state, float rest) {
  if (a.loss.data != nullptr) {
    const float loss = token_loss(*a.chunk.tokens.scalars, token.target, token.target_weight,
                                  token.token_weight, state);
    if (a.losses != nullptr) {
      a.losses[a.chunk.first + row] = loss;
    } else {
      a.loss.put(token.i, loss);
    }
  }
  if constexpr (kPlain) {
    a.reference.put(token.i, state.reference);
    a.log_sum.put(token.i, state.log_sum);
    a.logprob.put(token.i, token.target < 0 ? -infinity() : state.logprob());
  } else {
    put_state(a.call.in, a.call.outputs.statistics, token.i, token.target, state);
    const KeptState& kept = a.call.kept;
    if (kept.rows != nullptr && a.call.shape.forward) {
      *kept_row(kept, token.i) = {state.reference,
                                  state.log_sum,
                                  state.target_logit,
                                  rest,
                                  0,
                                  kept.layout,
                                  static_cast<float>(kept.columns),
                                  0};
    }
  }
}

// E = exp(z - z_t) is usable if z_t is at most this many nats below the row's reference, which is
// near its maximum; beyond, the row is computed again.
constexpr float most_nats = 60;

__device__ MapFactors map_of_row(const OptionRows& a, int row) {
  return map_of_token(a.call.map, a.chunk.tokens, a.chunk.first + row);
}

template <bool kPlain>
__device__ RowGradient gradient_of(const RowsArguments<kPlain>& a, int row, const RowToken& token,
                                   const RowState& state) {
  const TokenScalars& scalars = *a.chunk.tokens.scalars;
  if constexpr (kPlain) {
    return row_gradient(scalars.constants, state, token.target_weight, token.token_weight,
                        scalars.upstream, 0, 0, 0);
  } else {
    RowGradient g = scaled(
        token_gradient(a.call.in, scalars, token.i, token.target_weight, token.token_weight, state),
        map_of_row(a, row).slope);
    // The caller's entropy may be anything if its term has no gradient.
    if (g.entropy == 0) g.entropy_value = 0;
    return g;
  }
}

// dz of the target, for panels of dz.
template <bool kPlain>
__device__ float gradient_of_target(const RowsArguments<kPlain>& a, int row, const RowToken& token,
                                    const RowGradient& g) {
  float log_p = (token.target_logit - g.reference) - g.log_sum;
  log_p = log_p > 0 ? 0.0f : log_p;
  const float p = exp_any(log_p);
  const float own = target_draw(g.probability, g.onehot, p, -expm1f(log_p));
  if constexpr (kPlain) {
    return own;
  } else {
    const bool smooths = g.smoothing != 0 && token.target >= 0;
    const auto c = [&] { return class_weight(a.call.in, token.target); };
    const float information = fmaxf(log_p, least_exponent) + g.entropy_value;
    return dz_of<Fused>(own, smooths, g.smoothing, c, g.entropy != 0, g.entropy * p, information) *
           cap_slope(map_of_row(a, row), token.target_logit);
  }
}

// One lane writes the row's factors; returns v.
template <bool kPlain, class E>
__device__ float write_factors(const RowsArguments<kPlain>& a, int row, const RowToken& token,
                               const RowState& state, float rest, bool overwritten) {
  const RowGradient g = gradient_of<kPlain>(a, row, token, state);
  a.gradients[row] = g;
  if (a.target_gradient != nullptr) {
    a.target_gradient[row] = gradient_of_target<kPlain>(a, row, token, g);
  }
  if (a.factors == nullptr) return 0;
  const float z = state.target_logit;
  const float p = exp_any((z - state.reference) - state.log_sum);
  RowFactors f{g.probability * p, g.smoothing, 0, 0};
  const float onehot = fabsf(g.onehot), probability = fabsf(g.probability);
  float most = most_nats;
  if constexpr (!kPlain) {
    if (a.call.shape.dtype == DType::f16) most = most_code_nats;
  }
  const bool far = state.reference - z > most || fabsf(z) >= most_anchor;
  // A tiny token weight makes a factor that f32, or the scaled input's 16 bits, would lose. And E
  // of the target, 1 - o / v, would leave its range, since o is up to 2^14.
  const bool faint = fabsf(f.scale) < 0x1p-96f && fmaxf(onehot, probability) > 0;
  // If the weight has an infinity, the smoothing's term cannot be computed separately: E = 0 times
  // infinity is NaN, but the gradient is -s c times infinity.
  const bool infinite = a.chunk.tokens.scalars->weight_is_infinite != 0 && g.smoothing != 0;
  if constexpr (!kPlain) {
    if (forms_dz(
            a.call.shape.kernels.kept)) {  // form_panel computes dz from kept E that is in range
      // An infinite P makes dz of every column infinite, even where E was kept as 0.
      const bool again = far || overwritten || probability == infinity();
      if (again) a.again[1 + atomicAdd(a.again, 1)] = row;
      a.factors[row] = {1, 0, 0, again};
      return 0;
    }
  }
  if constexpr (!kPlain) {
    // Passes NaN on: comparisons with NaN are false, and a factor of 0 could hide it.
    if (onehot != onehot || probability != probability) {
      a.factors[row] = {nan_value(), 0, 0, 0};
      return nan_value();
    }
  }
  if (far || faint || infinite || overwritten) {
    f.scale = fmaxf(onehot, probability);
    f.smoothing = 0;
    f.again = 1;
    // The order of the list does not matter: each row is computed independently.
    a.again[1 + atomicAdd(a.again, 1)] = row;
    if constexpr (!kPlain) {
      if (a.call.kept.rows != nullptr) kept_row(a.call.kept, token.i)->overwritten = 1;
    }
  } else if (f.scale != 0) {
    f.at_target = target_draw(g.probability, g.onehot, p, rest);
    if constexpr (!kPlain) f.at_target *= cap_slope(map_of_row(a, row), z);
    f.at_target /= f.scale;
  }
#pragma unroll
  for (const Panel& panel : a.kept) {
    const int64_t j = token.target - panel.first;
    if (token.target < 0 || j < 0 || j >= panel.columns || f.again != 0) continue;
    *panel_element<E>(panel, row, j) = from_f32<E>(f.at_target);
  }
  a.factors[row] = f;
  return f.scale;
}

// A lane's part of a row of the input, which is multiplied by v.
template <class E>
struct ScaledRow {
  static constexpr int width = Pack<E>::width, many = 4, step = many * 32 * width;
  const E* from;
  E* to;
  int64_t pitch;
  Pack<E> x[many];  // loaded before v is known

  __device__ void load(int64_t first) {
#pragma unroll
    for (int n = 0; n < many; ++n) {
      const int64_t j = first + 32 * width * n;
      if (j < pitch) x[n] = *reinterpret_cast<const Pack<E>*>(from + j);
    }
  }
  __device__ void store(int64_t first, float v) {
#pragma unroll
    for (int n = 0; n < many; ++n) {
      const int64_t j = first + 32 * width * n;
      if (v == 0) x[n] = {};
      scale(v, &x[n]);
      if (j < pitch) *reinterpret_cast<Pack<E>*>(to + j) = x[n];
    }
  }
  __device__ static void scale(float v, Pack<E>* pack) {
    if constexpr (sizeof(E) == 2) {
      auto* pairs = reinterpret_cast<__nv_bfloat162*>(pack->x);
#pragma unroll
      for (int n = 0; n < width / 2; ++n) {
        const float2 two = __bfloat1622float2(pairs[n]);
        pairs[n] = __floats2bfloat162_rn(v * two.x, v * two.y);
      }
    } else {
#pragma unroll
      for (int n = 0; n < width; ++n) pack->x[n] *= v;
    }
  }
};

template <bool kPlain, class E>
__device__ void finish_row(const RowsArguments<kPlain>& a, int row, int lane) {
  const bool exists = row < a.chunk.rows + a.behind;
  bool summed = true;
  if constexpr (!kPlain) {
    summed = a.partials.maximum != nullptr;
    if (!summed) wait_for_kernel_before();
  }
  // The token was written by kernels that ended before the forward's products began.
  RowToken token{};
  if (row < a.chunk.rows) token = load_token(a, row);
  const bool valid = find_row(a.chunk, row), scales = a.scaled != nullptr && exists;
  const int64_t from = a.input_stride > 0 ? token.i * a.input_stride : row * a.pitch;
  ScaledRow<E> scaled{reinterpret_cast<const E*>(a.input) + from,
                      reinterpret_cast<E*>(a.scaled) + row * a.pitch, a.pitch};
  const int64_t first = lane * ScaledRow<E>::width;
  if (scales && valid) scaled.load(first);
  if (summed) wait_for_kernel_before();
  float v = 0;
  if (valid) {
    RowStatistics state;
    float rest = 0;
    bool overwritten = false;
    if (summed) {
      const RowTotals totals = sum_by_warp<kPlain>(a.partials, segments_of(a, row),
                                                   row * a.partials.segments, token, lane);
      state = state_of_totals<kPlain>(a.partials, totals, token, a.vocab_is_whole, &rest);
      if constexpr (!kPlain) state.mean_logit /= static_cast<float>(a.call.in.whole());
    } else if constexpr (!kPlain) {
      state.reference = load(a.call.row_reference, token.i);
      state.log_sum = load(a.call.row_log_sum, token.i);
      state.target_logit = token.target_logit;
    }
    if constexpr (!kPlain) {
      if (present(a.call.entropy)) state.entropy = load(a.call.entropy, token.i);
    }
    if (lane == 0) {
      if constexpr (!kPlain) {
        if (!summed && a.call.kept.rows != nullptr) {
          load_kept(a.call, token, &state, &rest, &overwritten);
        }
      }
      put_outputs<kPlain>(a, row, token, state, rest);
      if (a.gradients != nullptr) {
        v = write_factors<kPlain, E>(a, row, token, state, rest, overwritten);
      }
    }
    v = __shfl_sync(whole_warp, v, 0);
  } else if (row < a.chunk.rows && lane == 0 && a.gradients != nullptr) {
    if constexpr (!kPlain) use_up(a.call, token.i);
    a.gradients[row] = RowGradient{};
    if (a.factors != nullptr) a.factors[row] = RowFactors{0, 0, 0, 0};
  }
  // In the compacted input a row that does not count is already 0, from the gather.
  if (!scales || (!valid && scaled.from == scaled.to)) return;
#pragma unroll 1
  for (int64_t j = first; j < a.pitch; j += ScaledRow<E>::step) {
    if (j > first && v != 0) scaled.load(j);
    scaled.store(j, v);
  }
}

// The last block of the last chunk to finish reduces the losses, in a fixed order.
__device__ void reduce_if_last(const PlainRows& a) {
  __shared__ bool is_last;
  if (!a.last) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(a.finished, 1) == static_cast<int>(gridDim.x) - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  reduce_losses<threads, true>(a.reduction, a.empty_mean, a.chunk.tokens, a.losses, a.loss.data);
}

template <bool kPlain, class E>
__global__ void __launch_bounds__(threads)
    finish_kernel(const __grid_constant__ RowsArguments<kPlain> a) {
  let_next_start();
  const int row = blockIdx.x * (threads / 32) + threadIdx.x / 32;
  finish_row<kPlain, E>(a, row, threadIdx.x % 32);
  reduce_if_last(a);
}

// Computes the outputs of a call without gradients from units, with kLanes lanes per row.
template <bool kPlain, int kLanes>
__global__ void __launch_bounds__(threads)
    units_kernel(const __grid_constant__ RowsArguments<kPlain> a) {
  const int row = blockIdx.x * (threads / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int first = row - threadIdx.x % 32 / kLanes;  // the warp's first row
  const int valid = valid_rows(a.chunk);
  // Uses a row that exists: the warp's shuffles need all its lanes.
  const int some = max(min(row, valid - 1), 0);
  const RowToken token = load_token(a, some);
  wait_for_kernel_before();
  if (first < valid) {
    const RowTotals totals = sum_by_lanes<kLanes>(segments_of(a, some), token, lane);
    float rest;
    const RowStatistics state =
        state_of_totals<true>(a.partials, totals, token, a.vocab_is_whole, &rest);
    if (row < valid && lane == 0) put_outputs<kPlain>(a, row, token, state, rest);
  }
  reduce_if_last(a);
}

__global__ void __launch_bounds__(threads)
    targets_kernel(Chunk chunk, const float* target_logit, TensorView out) {
  const int row = blockIdx.x * threads + threadIdx.x;
  if (!find_row(chunk, row)) return;
  const int64_t k = chunk.first + row;
  const float z = chunk.tokens.target[k] < 0 ? -infinity() : target_logit[row];
  put(out, chunk.tokens.row[k], z);
}

TokenValues values_of(const TensorView& view) {
  if (!view) return {};
  return {view.as<float>(), view.stride[0]};
}

// Calls f with the kernel's arguments and whether they are plain.
template <class F>
void with_plain(const PlainRows& plain, const LinearCall& call, F&& f) {
  if (is_plain(call)) {
    f(plain, std::bool_constant<true>{});
  } else {
    f(OptionRows{plain, call}, std::bool_constant<false>{});
  }
}

}  // namespace

void write_targets(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  stream->launch("write_targets", targets_kernel, blocks_for(chunk.rows, threads), threads, chunk,
                 m.target_logit, call.outputs.statistics.target_logit);
}

void finish_rows(const LinearWork& work, bool with_factors, const std::array<Panel, 2>& kept,
                 bool scales) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const TensorView& loss = call.outputs.loss;
  const bool reduces = loss && call.in.options.reduction != Reduction::none;
  const bool last = chunk.first + chunk.rows >= call.shape.tokens;
  const bool forms = is_by_rows(call.shape.kernels.kept);
  const bool own_rows = scales && scales_rows(call.shape, plan);
  const bool makes_dz = !with_factors || kept[0].columns + kept[1].columns < call.shape.vocab;
  const PlainRows plain{.chunk = chunk,
                        .partials = m.partials,
                        .tiles = m.units.tiles,
                        .teams = m.units.teams,
                        .target_logit = m.target_logit,
                        .losses = reduces ? m.losses : nullptr,
                        .loss = values_of(loss),
                        .reference = values_of(call.outputs.statistics.row_reference),
                        .log_sum = values_of(call.outputs.statistics.row_log_sum),
                        .logprob = values_of(call.outputs.statistics.logprob),
                        .reduction = call.in.options.reduction,
                        .empty_mean = call.in.options.empty_mean,
                        .vocab_is_whole = call.in.options.vocab_total <= call.shape.vocab,
                        .last = reduces && last,
                        .finished = m.rows_finished,
                        .gradients = m.gradients,
                        .target_gradient = makes_dz ? m.target_gradient : nullptr,
                        .factors = with_factors || forms ? m.factors : nullptr,
                        .again = m.again,
                        .kept = with_factors ? kept : std::array<Panel, 2>{},
                        .input = own_rows ? call.input.as<char>() : m.input,
                        .input_stride = own_rows ? call.input.stride[0] : 0,
                        .scaled = scales ? m.scaled : nullptr,
                        .pitch = call.shape.hidden_pitch(),
                        .behind = scales ? static_cast<int32_t>(plan.extra_rows) : 0};
  LaunchShape shape{.threads = threads, .early = call.launches_early};
  with_plain(plain, call, [&](const auto& arguments, auto is_plain) {
    constexpr bool kPlain = is_plain();
    if (m.partials.unit_width > 1) {
      // With few tokens most units are single tiles, all of which a warp reads at once.
      constexpr int64_t few_tokens = 256;
      const auto with_lanes = [&](auto lanes) {
        shape.blocks = blocks_for(chunk.rows, threads / lanes());
        stream->launch_config("finish_rows", units_kernel<kPlain, lanes()>, shape, arguments);
      };
      if (call.shape.tokens <= few_tokens) return with_lanes(std::integral_constant<int, 32>{});
      return with_lanes(std::integral_constant<int, unit_lanes>{});
    }
    shape.blocks = blocks_for(chunk.rows + plain.behind, threads / 32);
    with_stored(call.shape.dtype, [&](auto element) {
      using E = decltype(element);
      stream->launch_config("finish_rows", finish_kernel<kPlain, E>, shape, arguments);
    });
  });
}

}  // namespace logitless::cuda
