// SPDX-License-Identifier: Apache-2.0
// dz from kept E, row by row, for gradients that are not E times a factor of the row.
#include "src/cuda/linear/linear.cuh"
#include "src/cuda/logit_map.cuh"

namespace logitless::cuda {
namespace {

// dz from kept E, for gradients of entropy and of chosen columns, and for codes of f16:
//   log p_j = (z_t - m) - log s + log E_j    dz_j = P p_j - s c_j - h p_j (log p_j + H)
// A block has 32 rows of 8 threads with 16 bytes each, which handle several groups of columns in
// turn, so that a row's coefficients are loaded once. A row that does not count becomes 0.
constexpr int formed_rows = 32, formed_lanes = 8, formed_groups = 4;

// A row's coefficients of dz, and the target's own dz.
struct FormedRow {
  RowGradient gradient;
  float log_target = 0, target_p = 0, target_gradient = 0;
  int64_t target = -1;
};

struct Probability {
  float p, log_p;
};
__device__ inline Probability find_probability(const FormedRow& row, float e) {
  return {row.target_p * e, row.log_target + logf(e)};
}
// E has 8 significant bits, so an approximate log of it loses nothing.
__device__ inline Probability find_probability(const FormedRow& row, __nv_bfloat16 e) {
  const float x = __bfloat162float(e);
  return {row.target_p * x, row.log_target + __logf(x)};
}
__device__ inline Probability find_probability(const FormedRow& row, __half code) {
  const uint32_t bits = __half_as_ushort(code);
  const float log_p = fmaf(decode_log(bits), ln2, row.log_target);
  // The product is NaN in a row of NaN.
  return {bits == 0 ? 0.0f * row.log_target : exp2_fast(log_p * log2e), log_p};
}

// dz of the columns from `column` on, of which `left` exist.
template <class E>
__device__ inline void form(const TokenInput& in, const FormedRow& row, int64_t column,
                            int64_t left, Pack<E>* pack) {
  constexpr int width = Pack<E>::width;
  const RowGradient& g = row.gradient;
  float dz[width];
#pragma unroll
  for (int n = 0; n < width; ++n) {
    const auto [p, log_p] = find_probability(row, pack->x[n]);
    const float information = fmaxf(log_p, least_exponent) + g.entropy_value;
    dz[n] = p * fmaf(-g.entropy, information, g.probability);
  }
  const int64_t at = row.target - column;
  if (g.smoothing != 0 || (at >= 0 && at < width) || left < width) {
#pragma unroll
    for (int n = 0; n < width; ++n) {
      if (g.smoothing != 0 && n < left) {
        dz[n] = fmaf(-g.smoothing, class_weight(in, column + n), dz[n]);
      }
      if (n == at) dz[n] = row.target_gradient;
      if (n >= left) dz[n] = 0;
    }
  }
#pragma unroll
  for (int n = 0; n < width; ++n) pack->x[n] = from_f32<E>(dz[n]);
}

template <class E>
__global__ void __launch_bounds__(formed_rows* formed_lanes)
    form_kernel(const __grid_constant__ LinearCall call, Chunk chunk, const float* target_logit,
                const float* target_gradient, const RowGradient* gradients, Panel from, Panel to,
                int whole) {
  constexpr int width = Pack<E>::width;
  const int row = blockIdx.x * formed_rows + threadIdx.x / formed_lanes;
  const int64_t start = block_of_second_axis() * (formed_groups * formed_lanes * width) +
                        threadIdx.x % formed_lanes * width;
  // Products read whole blocks of a panel in blocks, including rows and columns after the last.
  const int64_t rows = to.blocks ? to.pitch : chunk.rows;
  const int64_t columns = to.blocks ? (to.columns + 63) / 64 * 64 : to.columns;
  const int valid = valid_rows(chunk);
  if (row >= rows || (whole > 0 && row >= (valid + whole - 1) / whole * whole)) return;
  const bool counts = row < valid;
  Pack<E> packs[formed_groups];
#pragma unroll
  for (int i = 0; i < formed_groups; ++i) {
    const int64_t j = start + i * (formed_lanes * width);
    if (j >= columns || !counts) break;
    packs[i] =
        *reinterpret_cast<const Pack<E>*>(panel_element<E>(from, row, to.first - from.first + j));
  }
  FormedRow formed;
  if (counts) {
    const RowGradient g = gradients[row];
    const float log_target = (target_logit[row] - g.reference) - g.log_sum;
    formed = {g, log_target, exp_any(log_target), target_gradient[row],
              chunk.tokens.target[chunk.first + row]};
  }
#pragma unroll
  for (int i = 0; i < formed_groups; ++i) {
    const int64_t j = start + i * (formed_lanes * width);
    if (j >= columns) return;
    if (counts) {
      form<E>(call.in, formed, to.first + j, to.columns - j, &packs[i]);
    } else {
      packs[i] = {};
    }
    *reinterpret_cast<Pack<E>*>(panel_element<E>(to, row, j)) = packs[i];
  }
}

}  // namespace

void form_panel(const LinearWork& work, const Panel& from, const Panel& to, int whole) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  with_dtype(call.shape.dtype, [&](auto element) {
    using E = decltype(element);
    constexpr int64_t columns = formed_groups * formed_lanes * Pack<E>::width;
    stream->launch("form_panel", form_kernel<E>,
                   two_axes(blocks_for(to.blocks ? to.pitch : chunk.rows, formed_rows),
                            divide_up(to.columns, columns)),
                   formed_rows * formed_lanes, call, chunk, m.target_logit, m.target_gradient,
                   m.gradients, from, to, whole);
  });
  finish_panel(work, to, false);
}

}  // namespace logitless::cuda
