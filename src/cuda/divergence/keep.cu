// SPDX-License-Identifier: Apache-2.0
// Backward from dz that Forward kept by token. Each row has a factor: 0 if the token has no
// gradient, NaN if its dz was not kept. In f16, if factors differ, dz is copied times as much of
// the factor as f16's range allows. And where a shard keeps which token's logits.
#include "src/cuda/divergence/kernels.h"
#include "src/cuda/linear/chunk.cuh"
#include "src/cuda/linear/linear.cuh"
#include "src/kept.h"
#include "src/row/gradient.h"

namespace logitless::cuda {
namespace {

constexpr int threads = 256;

__device__ float common_factor(const KeptFactors& a) {
  const TokenScalars& s = *a.tokens.scalars;
  const float own = a.alike ? s.upstream * a.slope : 1.0f;
  return s.gradient_scale * own / a.lift;
}

// The factor of token i, which is active.
__device__ float own_factor(const KeptFactors& a, int64_t i) {
  const KeptRow row = reinterpret_cast<const KeptRow*>(a.kept_rows)[i];
  const bool is_ours = row.layout == a.layout && row.columns == static_cast<float>(a.vocab);
  if (!is_ours && present(a.in.fault)) atomicOr(address<int>(a.in.fault), 2);
  if (!is_ours || row.overwritten != 0) return nan_value();
  if (a.alike) return 1;
  const float slope = a.tokens.map == nullptr ? a.slope : a.tokens.map[i].slope;
  const float g =
      token_gradient(a.in, *a.tokens.scalars, i, 1, token_weight(a.in, i), RowState{}).probability;
  return g * slope * row.rest;
}

__global__ void __launch_bounds__(threads) factors_kernel(const __grid_constant__ KeptFactors a) {
  const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (i >= a.tokens.total) return;
  // If the common factor is infinite or NaN, it becomes part of the rows' own factors, because 0
  // times it would not be 0.
  const float common = common_factor(a);
  const bool moves = !isfinite(common);
  if (i == 0) {
    TokenScalars s = *a.tokens.scalars;
    s.valid = static_cast<int32_t>(a.tokens.total);
    s.gradient_scale = moves ? 1.0f : common;
    *a.ordered.scalars = s;
  }
  float v = 0;
  if (kind_of_token(a.in, a.tokens.inactive, i, target_of(a.in, i)) == TokenKind::counts) {
    v = own_factor(a, i) * (moves ? common : 1.0f);
  }
  a.ordered.row[i] = static_cast<int32_t>(i);
  if (a.scales != nullptr) a.scales[i] = v;
  a.factors[i] = {a.scales != nullptr && v != 0 ? 1.0f : v, 0, 0, 0};
}

// For f16. A row's dz is up to 32768, so a factor above 1 could overflow: all factors are divided
// by a power of two so that none exceeds 1, and the call's factor is multiplied by that power. Rows
// with far smaller factors keep as many bits as f16 allows: dz is divided by at most 64, and the
// rest divides the input and grad_input's sums. One block handles all rows.
constexpr int fit_threads = 1024;
__global__ void __launch_bounds__(fit_threads) fit_kernel(const __grid_constant__ KeptFactors a) {
  float most = 1;
  for (int64_t i = threadIdx.x; i < a.tokens.total; i += fit_threads) {
    const float v = fabsf(a.scales[i]);
    if (isfinite(v)) most = fmaxf(most, v);
  }
  most = static_cast<float>(power_of_two_above(block_max(most)));
  if (most == 1) return;
  if (threadIdx.x == 0) a.ordered.scalars->gradient_scale *= most;
  const float of_dz = fminf(most, 64);
  for (int64_t i = threadIdx.x; i < a.tokens.total; i += fit_threads) {
    const float v = a.scales[i], scale = v / of_dz;
    if (v == 0 || !isfinite(v)) continue;
    a.scales[i] = fabsf(scale) > 1 ? copysignf(1, v) : scale;
    a.factors[i].scale = (fabsf(scale) > 1 ? fabsf(scale) : 1.0f) * (of_dz / most);
  }
}

// Each warp handles a row.
template <class T>
__global__ void __launch_bounds__(threads)
    gather_kernel(TensorView input, const RowFactors* factors, int64_t rows, int64_t pitch, T* to) {
  const int64_t row = int64_t{blockIdx.x} * (threads / 32) + threadIdx.x / 32;
  if (row >= rows) return;
  constexpr int width = Pack<T>::width;
  const bool exists = row < input.shape[0];
  const float v = exists ? factors[row].scale : 0.0f;
  const RowReader<T> reader(input, v == 0 ? 0 : row, v == 0 ? 0 : input.shape[1]);
  for (int64_t j = threadIdx.x % 32 * width; j < pitch; j += 32 * width) {
    float x[width] = {};
    if (v != 0) unpack<T>(reader(j), x);
    Pack<T> scaled;
#pragma unroll
    for (int n = 0; n < width; ++n) scaled.x[n] = from_f32<T>(v == 0 ? 0.0f : v * x[n]);
    *reinterpret_cast<Pack<T>*>(to + row * pitch + j) = scaled;
  }
}

// Each thread copies 16 bytes; elements after the last column become 0.
template <class T>
__global__ void __launch_bounds__(threads)
    scale_kernel(Panel from, const float* scales, int64_t tokens, Panel to) {
  constexpr int width = Pack<T>::width;
  const int64_t row = blockIdx.x;
  const int64_t j = (int64_t{blockIdx.y} * threads + threadIdx.x) * width;
  if (j >= to.columns) return;
  const float v = row < tokens ? scales[row] : 0.0f;
  Pack<T> x{};
  if (v != 0) {
    x = *reinterpret_cast<const Pack<T>*>(reinterpret_cast<const T*>(from.data) + row * from.pitch +
                                          j);
  }
#pragma unroll
  for (int n = 0; n < width; ++n) {
    const bool is_there = v != 0 && j + n < to.columns;
    x.x[n] = from_f32<T>(is_there ? v * to_f32(x.x[n]) : 0.0f);
  }
  *reinterpret_cast<Pack<T>*>(reinterpret_cast<T*>(to.data) + row * to.pitch + j) = x;
}

// KeptRow::layout of a shard's logits; KeptRow::rest holds the bits of the row's number.
constexpr float kept_logits = 22;

__global__ void __launch_bounds__(threads)
    note_rows_kernel(const __grid_constant__ Chunk all, KeptRow* kept_rows, float columns) {
  const int k = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  if (k >= all.rows || !is_valid(all, k)) return;
  kept_rows[all.tokens.row[k]] = {.reference = 0,
                                  .log_sum = 0,
                                  .target_logit = 0,
                                  .rest = __int_as_float(k),
                                  .overwritten = 0,
                                  .layout = kept_logits,
                                  .columns = columns,
                                  .unused = 0};
}

__global__ void __launch_bounds__(threads)
    find_rows_kernel(const __grid_constant__ TokenInput in, const __grid_constant__ Chunk all,
                     const KeptRow* kept_rows, float columns, int32_t* logit_rows) {
  const int k = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x);
  if (k >= all.rows || !is_valid(all, k)) return;
  const KeptRow row = kept_rows[all.tokens.row[k]];
  const int from = __float_as_int(row.rest);
  const bool is_kept = row.layout == kept_logits && row.columns == columns;
  const bool is_ours = is_kept && from >= 0 && from < all.rows;
  if (!is_ours && present(in.fault)) atomicOr(address<int>(in.fault), 2);
  logit_rows[k] = is_ours ? from : -1;
}

}  // namespace

void note_logit_rows(const Chunk& all, KeptRow* kept_rows, int64_t vocab, Stream* stream) {
  stream->launch("note_logit_rows", note_rows_kernel, blocks_for(all.rows, threads), threads, all,
                 kept_rows, static_cast<float>(vocab));
}

void find_logit_rows(const TokenInput& in, const Chunk& all, const KeptRow* kept_rows,
                     int64_t vocab, int32_t* logit_rows, Stream* stream) {
  stream->launch("find_logit_rows", find_rows_kernel, blocks_for(all.rows, threads), threads, in,
                 all, kept_rows, static_cast<float>(vocab), logit_rows);
}

void kept_factors(const KeptFactors& arguments, Stream* stream) {
  stream->launch("kept_factors", factors_kernel, blocks_for(arguments.tokens.total, threads),
                 threads, arguments);
  if (arguments.scales != nullptr)
    stream->launch("fit_factors", fit_kernel, 1, fit_threads, arguments);
}

void gather_scaled(const TensorView& input, const RowFactors* factors, int64_t rows, int64_t pitch,
                   char* to, Stream* stream) {
  with_dtype(input.dtype, [&](auto element) {
    using T = decltype(element);
    stream->launch("gather_scaled", gather_kernel<T>, blocks_for(rows, threads / 32), threads,
                   input, factors, rows, pitch, reinterpret_cast<T*>(to));
  });
}

void scale_panel(DType dtype, const Panel& from, const float* scales, int64_t tokens, int64_t rows,
                 const Panel& to, Stream* stream) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const dim3 blocks(static_cast<unsigned>(rows),
                      blocks_for(to.columns, int64_t{threads} * Pack<T>::width));
    stream->launch("scale_panel", scale_kernel<T>, blocks, threads, from, scales, tokens, to);
  });
}

}  // namespace logitless::cuda
