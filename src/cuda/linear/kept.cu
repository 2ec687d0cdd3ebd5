// SPDX-License-Identifier: Apache-2.0
// These kernels make E, which the forward pass kept, and the input ready for the products: they
// write what the factors of the rows (rows.cu) leave to be written.
#include <algorithm>

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/runtime/early.cuh"

namespace logitless::cuda {
namespace {

// Rows of kept E trade places: that of the token at `place` with the one at k, which has no
// gradient. Threads form rows of 8 lanes, each with 16 bytes of several columns in turn. Where
// every token has a gradient all rows are in their places already.
constexpr int traded_rows = 32, traded_lanes = 8, traded_groups = 8;

template <class E>
__device__ inline Pack<E>* pack_of(const Panel& panel, int64_t row, int64_t j) {
  return reinterpret_cast<Pack<E>*>(panel_element<E>(panel, row, j));
}
// Returns how many columns a row of a panel has in memory.
__device__ inline int64_t columns_in_memory(const Panel& panel) {
  return panel.blocks ? (panel.columns + 63) / 64 * 64 : panel.pitch;
}

template <class E>
__global__ void __launch_bounds__(traded_rows* traded_lanes) trade_kernel(Tokens t, Panel panel) {
  constexpr int width = Pack<E>::width, step = traded_lanes * width;
  const int valid = t.scalars->valid;
  if (t.scalars->counted == valid) return;
  const int64_t columns = columns_in_memory(panel), start = threadIdx.x % traded_lanes * width;
  const int64_t across = (columns + traded_groups * step - 1) / (traded_groups * step);
  const int64_t items = (valid + traded_rows - 1) / traded_rows * across;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t row = item / across * traded_rows + threadIdx.x / traded_lanes;
    const int64_t other = row < valid ? t.place[t.row[row]] : row;
    if (other == row) continue;
    const int64_t first = item % across * traded_groups * step + start;
    Pack<E> a[traded_groups], b[traded_groups];
#pragma unroll
    for (int i = 0; i < traded_groups; ++i) {
      if (first + i * step >= columns) break;
      a[i] = *pack_of<E>(panel, row, first + i * step);
      b[i] = *pack_of<E>(panel, other, first + i * step);
    }
#pragma unroll
    for (int i = 0; i < traded_groups; ++i) {
      if (first + i * step >= columns) break;
      *pack_of<E>(panel, row, first + i * step) = b[i];
      *pack_of<E>(panel, other, first + i * step) = a[i];
    }
  }
}

// Products read some rows behind those that they multiply, so values there that are not finite
// become 0. They belong to rows that are made again whenever they have a gradient (most_nats in
// rows.cu), or whose factor is NaN.
template <class E>
__global__ void __launch_bounds__(256) calm_kernel(Tokens t, Panel panel, int32_t rows, int whole) {
  const int valid = t.scalars->valid, counted = t.scalars->counted;
  if (counted == valid) return;
  const int end = min(whole > 0 ? (valid + whole - 1) / whole * whole : rows, counted);
  constexpr int width = Pack<E>::width;
  const int64_t packs = columns_in_memory(panel) / width;
  for (int64_t n = int64_t{blockIdx.x} * 256 + threadIdx.x; n < packs * (end - valid);
       n += int64_t{gridDim.x} * 256) {
    Pack<E>* at = pack_of<E>(panel, valid + n / packs, n % packs * width);
    Pack<E> x = *at;
    bool changes = false;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      if (isfinite(to_f32(x.x[i]))) continue;
      x.x[i] = from_f32<E>(0.0f);
      changes = true;
    }
    if (changes) *at = x;
  }
}

// The kernel makes dz of kept E where entropy has a gradient, because no factor of a row makes that
// of E:
//   log p_j = (z_t - m) - log s + log E_j    dz_j = P p_j - s c_j - h p_j (log p_j + H)
// 32 rows of 8 threads take 16 bytes each, several of their columns in turn, so that what a row
// needs is loaded once. A row that does not count becomes 0.
constexpr int formed_rows = 32, formed_lanes = 8, formed_groups = 4;

// A row's dz is made of its coefficients, and the target's own dz.
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
// E is rounded to 8 bits, so the approximation of its log loses nothing.
__device__ inline Probability find_probability(const FormedRow& row, __nv_bfloat16 e) {
  const float x = __bfloat162float(e);
  return {row.target_p * x, row.log_target + __logf(x)};
}
__device__ inline Probability find_probability(const FormedRow& row, __half code) {
  const uint32_t bits = __half_as_ushort(code);
  const float log_p = fmaf(decode_log(bits), ln2, row.log_target);
  // The product is NaN in a row of NaN, as it shall be.
  return {bits == 0 ? 0.0f * row.log_target : exp2_fast(log_p * log2e), log_p};
}

// Makes dz of the columns from `column` on, of which `left` exist.
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
  // Products read whole blocks of a panel in blocks, and so rows and columns behind the last ones
  // too.
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

// Writes two rows behind the chunk's, whose product with the class weights is the smoothing's term
// of grad_weight: -sum_k s_k input_k, rounded, and what the rounding lost.
template <class E>
__global__ void __launch_bounds__(128)
    scale_kernel(Chunk chunk, const RowFactors* factors, const E* input, int64_t pitch,
                 const float* smoothed_row, E* scaled) {
  const int64_t row = blockIdx.x;
  for (int64_t d = threadIdx.x; d < pitch; d += 128) {
    float x;
    if (row < chunk.rows) {
      x = factors[row].scale == 0 ? 0.0f : factors[row].scale * to_f32(input[row * pitch + d]);
    } else {
      const float sum = smoothed_row == nullptr ? 0.0f : -smoothed_row[d];
      const float high = to_f32(from_f32<E>(sum));
      x = row == chunk.rows ? high : row == chunk.rows + 1 ? sum - high : 0.0f;
    }
    scaled[row * pitch + d] = from_f32<E>(x);
  }
}

// Writes the columns of E that belong to these rows: c_j twice where the smoothing's term stands
// apart, and zeros.
template <class E>
__global__ void __launch_bounds__(256)
    extra_rows_kernel(LinearCall call, int32_t row, int32_t count, bool smooths, Panel panel) {
  const int64_t j = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (j >= panel.columns) return;
  const float c = smooths ? class_weight(call.in, panel.first + j) : 0.0f;
  E* to = reinterpret_cast<E*>(panel.data) + row * panel.pitch + j;
  for (int r = 0; r < count; ++r) to[r * panel.pitch] = from_f32<E>(r < 2 ? c : 0.0f);
}

// Writes zeros behind the last columns of the vocabulary, up to a multiple of 8.
template <class E>
__global__ void __launch_bounds__(256) extra_columns_kernel(int32_t rows, Panel panel) {
  const int64_t row = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (row >= rows) return;
  E* to = reinterpret_cast<E*>(panel.data) + row * panel.pitch;
  for (int64_t j = panel.columns; j % 8 != 0; ++j) to[j] = from_f32<E>(0.0f);
}

// Sums s_k input_k over slabs of rows; a second kernel then adds the slabs.
template <class E>
__global__ void __launch_bounds__(256)
    smoothed_slabs(Chunk chunk, const RowFactors* factors, const E* input, int64_t pitch, int count,
                   float* slabs) {
  const int64_t d = int64_t{blockIdx.x} * 256 + threadIdx.x, slab = block_of_second_axis();
  if (d >= pitch || slab >= count) return;
  const int64_t end = min((slab + 1) * token_slab_rows, int64_t{chunk.rows});
  constexpr int many = 16;
  float sum = 0;
  for (int64_t row = slab * token_slab_rows; row < end; row += many) {
    float s[many], x[many];
#pragma unroll
    for (int i = 0; i < many; ++i) {
      s[i] = row + i < end ? factors[row + i].smoothing : 0.0f;
      x[i] = row + i < end ? to_f32(input[(row + i) * pitch + d]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < many; ++i) {
      if (s[i] != 0) sum = fmaf(s[i], x[i], sum);
    }
  }
  slabs[slab * pitch + d] = sum;
}

__global__ void __launch_bounds__(256)
    sum_slabs(const float* slabs, int count, int64_t pitch, float* sum) {
  const int64_t d = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (d >= pitch) return;
  sum[d] = sum_of_slabs(slabs, count, pitch, d);
}

}  // namespace

void write_extra_rows(const LinearWork& work, const Panel& panel) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const bool smooths = m.smoothed_row != nullptr;
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("extra_rows", extra_rows_kernel<decltype(element)>,
                   blocks_for(panel.columns, 256), 256, call, chunk.rows,
                   static_cast<int32_t>(plan.extra_rows), smooths, panel);
    if (panel.columns % 8 == 0) return;
    stream->launch("extra_columns", extra_columns_kernel<decltype(element)>,
                   blocks_for(chunk.rows + plan.extra_rows, 256), 256,
                   static_cast<int32_t>(chunk.rows + plan.extra_rows), panel);
  });
}

void trade_rows(const LinearWork& work, const Panel& panel, bool fills, int whole) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const unsigned blocks = static_cast<unsigned>(device.multiprocessors) * 8;
  with_stored(call.shape.dtype, [&](auto element) {
    using E = decltype(element);
    stream->launch("trade_rows", trade_kernel<E>, blocks, traded_rows * traded_lanes, m.tokens,
                   panel);
    if (!fills || call.shape.dtype == DType::f16) return;  // no product reads codes
    stream->launch("calm_rows", calm_kernel<E>, blocks, 256, m.tokens, panel,
                   static_cast<int32_t>(call.shape.tokens), whole);
  });
}

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

void scale_input(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const bool smooths = m.smoothed_row != nullptr;
  const unsigned columns = blocks_for(plan.hidden_pitch, 256);
  with_stored(call.shape.dtype, [&](auto element) {
    using E = decltype(element);
    const E* input = reinterpret_cast<const E*>(m.input);
    if (smooths) {
      const unsigned slabs = blocks_for(chunk.rows, token_slab_rows);
      stream->launch("smoothed_slabs", smoothed_slabs<E>, two_axes(columns, slabs), 256, chunk,
                     m.factors, input, plan.hidden_pitch, static_cast<int>(slabs), m.slabs);
      stream->launch("smoothed_row", sum_slabs, columns, 256, m.slabs, static_cast<int>(slabs),
                     plan.hidden_pitch, m.smoothed_row);
    }
    const int64_t behind = plan.extra_rows;
    stream->launch("scale_input", scale_kernel<E>, static_cast<unsigned>(chunk.rows + behind), 128,
                   chunk, m.factors, input, plan.hidden_pitch,
                   smooths ? m.smoothed_row : static_cast<float*>(nullptr),
                   reinterpret_cast<E*>(m.scaled));
  });
}

}  // namespace logitless::cuda
