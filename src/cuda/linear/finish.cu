// SPDX-License-Identifier: Apache-2.0
// Writes the caller's gradients from their f32 sums: times the common factor, rounded once.
#include "src/cuda/linear/linear.cuh"

namespace logitless::cuda {
namespace {

// grad_input_i = scale (v_k sum_k - s_k class_row), or scale sum_k if the sums are of dz. If
// `clears`, rows whose token does not count become 0.
template <class T>
__global__ void __launch_bounds__(256)
    grad_input_kernel(Chunk chunk, const RowFactors* factors, const float* sums, int64_t pitch,
                      int64_t first_row, const float* class_row, bool clears, TensorView out) {
  const int64_t row = first_row + blockIdx.x, i = chunk.tokens.row[chunk.first + row];
  if (chunk.first + row >= chunk.tokens.scalars->valid) {
    for (int64_t d = threadIdx.x; clears && d < out.shape[1]; d += 256) {
      *address<T>(out, i, d) = from_f32<T>(0.0f);
    }
    return;
  }
  const float scale = chunk.tokens.scalars->gradient_scale;
  const float v = factors != nullptr ? factors[row].scale : 1.0f;
  const float s = class_row != nullptr ? factors[row].smoothing : 0.0f;
  for (int64_t d = threadIdx.x; d < out.shape[1]; d += 256) {
    // A row without a gradient stays 0 even if its sum, of E, overflows.
    float x = v == 0 ? 0.0f : v * sums[blockIdx.x * pitch + d];
    if (s != 0) x = fmaf(-s, class_row[d], x);
    *address<T>(out, i, d) = from_f32<T>(scale * x);
  }
}

// Sums c_j weight_j over a slab of the first `count` rows of the weight. Each warp reads a row, 16
// bytes per lane, and several rows at a time, so that their loads overlap; the warps' sums are then
// added in order.
template <class T>
__global__ void __launch_bounds__(256)
    class_slabs(LinearCall call, int64_t count, int64_t pitch, float* slabs) {
  constexpr int many = 4, warps = 8, width = Pack<T>::width;
  __shared__ float partial[warps][32 * width];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t slab = blockIdx.x, end = min((slab + 1) * vocab_slab_rows, count);
  const int64_t first = block_of_second_axis() * (32 * width), d = first + lane * width;
  float sum[width] = {};
  for (int64_t j = slab * vocab_slab_rows + warp; j < end && d < pitch; j += many * warps) {
    float c[many];
    uint4 w[many];
#pragma unroll
    for (int i = 0; i < many; ++i) {
      const int64_t row = min(j + i * warps, end - 1);
      c[i] = j + i * warps < end ? class_weight(call.in, row) : 0.0f;
      w[i] = RowReader<T>(call.weight, row, call.weight.shape[1])(d);
    }
#pragma unroll
    for (int i = 0; i < many; ++i) {
      if (c[i] == 0) continue;
      float x[width];
      unpack<T>(w[i], x);
#pragma unroll
      for (int n = 0; n < width; ++n) sum[n] = fmaf(c[i], x[n], sum[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < width; ++n) partial[warp][lane * width + n] = sum[n];
  __syncthreads();
  for (int n = threadIdx.x; n < 32 * width && first + n < pitch; n += 256) {
    float all = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) all += partial[i][n];
    slabs[slab * pitch + first + n] = all;
  }
}

__global__ void __launch_bounds__(256)
    class_sum(const float* slabs, int count, int64_t pitch, float* sum, TokenScalars* scalars) {
  const int64_t d = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (d >= pitch) return;
  const float x = sum_of_slabs(slabs, count, pitch, d);
  sum[d] = x;
  if (!isfinite(x)) atomicOr(&scalars->weight_is_infinite, 1);
}

// Sums each column over a slab of rows: 64 columns, 8 per thread, by 32 rows of threads, each 4
// rows at a time. Zeros follow the last column up to a multiple of 8, so that every load is whole.
template <class E>
__global__ void __launch_bounds__(256)
    bias_slabs_kernel(Chunk chunk, const RowFactors* factors, Panel panel, int slab_count,
                      float* slabs) {
  constexpr int many = 4, lanes = 8, rows = ColumnParts::parts;
  struct alignas(16) Eight {
    E x[8];
  };
  __shared__ ColumnParts parts;
  const int part = threadIdx.x / lanes, column = threadIdx.x % lanes * 8;
  const int64_t first = int64_t{blockIdx.x} * 64, slab = block_of_second_axis();
  const int64_t end = min((slab + 1) * bias_slab_rows, int64_t{valid_rows(chunk)});
  float sum[8] = {};
  if (first + column < panel.columns) {
    for (int64_t row = slab * bias_slab_rows + part; row < end; row += many * rows) {
      Eight e[many];
      float v[many] = {};
#pragma unroll
      for (int i = 0; i < many; ++i) {
        const int64_t k = row + i * rows;
        if (k >= end) continue;
        v[i] = factors != nullptr ? factors[k].scale : 1.0f;
        e[i] = *reinterpret_cast<const Eight*>(panel_element<const E>(panel, k, first + column));
      }
#pragma unroll
      for (int i = 0; i < many; ++i) {
        if (v[i] == 0) continue;
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[n] = fmaf(v[i], to_f32(e[i].x[n]), sum[n]);
      }
    }
  }
  parts.put(part, column, sum);
  __syncthreads();
  const int64_t j = first + threadIdx.x;
  if (threadIdx.x >= 64 || j >= panel.columns || slab >= slab_count) return;
  slabs[slab * panel.columns + j] = parts.sum();
}

// Every block computes smoothed = sum_k s_k of the chunk itself, in the same order, so that no
// block waits for another.
__global__ void __launch_bounds__(256)
    bias_sum_kernel(LinearCall call, Chunk chunk, const RowFactors* factors, Panel panel,
                    const float* slabs, int count, bool first, float* bias) {
  float smoothed = 0;
  if (factors != nullptr) {
    for (int row = threadIdx.x; row < chunk.rows; row += 256) smoothed += factors[row].smoothing;
    smoothed = block_sum(smoothed);
  }
  const int64_t j = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (j >= panel.columns) return;
  float sum = first ? 0.0f : bias[panel.first + j];
  for (int slab = 0; slab < count; ++slab) sum += slabs[slab * panel.columns + j];
  if (smoothed != 0) {
    sum = fmaf(-smoothed, class_weight(call.in, panel.first + j), sum);
  }
  bias[panel.first + j] = sum;
}

template <class T>
__global__ void __launch_bounds__(256)
    grad_weight_kernel(const TokenScalars* scalars, const float* sums, int64_t pitch, int64_t first,
                       bool accumulate, TensorView out) {
  const int64_t j = blockIdx.x;
  const float scale = scalars->gradient_scale;
  const bool any = scalars->valid > 0;
  for (int64_t d = threadIdx.x; d < out.shape[1]; d += 256) {
    T* to = address<T>(out, first + j, d);
    const float x = any ? scale * sums[j * pitch + d] : 0.0f;
    *to = from_f32<T>(accumulate ? to_f32(*to) + x : x);
  }
}

__global__ void __launch_bounds__(256)
    grad_bias_kernel(const TokenScalars* scalars, const float* sums, bool accumulate,
                     TensorView out) {
  const int64_t j = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (j >= out.shape[0]) return;
  const float x = scalars->valid > 0 ? scalars->gradient_scale * sums[j] : 0.0f;
  store(out, j, 0, accumulate ? load(out, j) + x : x);
}

template <class T>
__global__ void __launch_bounds__(256) zero_kernel(TensorView out) {
  const int64_t j = blockIdx.x;
  const int64_t columns = out.rank == 2 ? out.shape[1] : 1;
  for (int64_t d = threadIdx.x; d < columns; d += 256) *address<T>(out, j, d) = from_f32<T>(0.0f);
}

}  // namespace

void class_row(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const int64_t count =
      call.shape.kernels.others == Origin::again_dz ? kept_columns(plan) : call.shape.vocab;
  const unsigned slabs = blocks_for(count, vocab_slab_rows);
  const int64_t pitch = call.shape.hidden_pitch();
  const unsigned columns = blocks_for(pitch, 256);
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    stream->launch("class_slabs", class_slabs<T>,
                   two_axes(slabs, divide_up(pitch, 32 * Pack<T>::width)), 256, call, count, pitch,
                   m.slabs);
  });
  stream->launch("class_row", class_sum, columns, 256, m.slabs, static_cast<int>(slabs), pitch,
                 m.class_row, m.tokens.scalars);
}

void write_grad_input(const LinearWork& work, const float* sums, int64_t row, int64_t rows,
                      bool scaled, bool clears) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const RowFactors* factors = scaled ? m.factors : nullptr;
  const float* class_sum = scaled ? m.class_row : nullptr;
  with_dtype(call.grad_input.dtype, [&](auto element) {
    stream->launch("write_grad_input", grad_input_kernel<decltype(element)>,
                   static_cast<unsigned>(rows), 256, chunk, factors, sums,
                   call.shape.hidden_pitch(), row, class_sum, clears, call.grad_input);
  });
}

void add_to_bias(const LinearWork& work, const Panel& panel, bool scaled, bool first) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const RowFactors* factors = scaled ? m.factors : nullptr;
  const unsigned slabs = blocks_for(chunk.rows, bias_slab_rows);
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("bias_slabs", bias_slabs_kernel<decltype(element)>,
                   two_axes(blocks_for(panel.columns, 64), slabs), 256, chunk, factors, panel,
                   static_cast<int>(slabs), m.bias_slabs);
  });
  add_slabs_to_bias(work, panel, factors, first);
}

void add_slabs_to_bias(const LinearWork& work, const Panel& panel, const RowFactors* factors,
                       bool first) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const int slabs = static_cast<int>(divide_up(chunk.rows, bias_slab_rows));
  stream->launch("bias_sum", bias_sum_kernel, blocks_for(panel.columns, 256), 256, call, chunk,
                 factors, panel, m.bias_slabs, slabs, first, m.bias_sum);
}

void write_grad_weight(const LinearWork& work, const float* sums, int64_t row, int64_t rows) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  with_dtype(call.grad_weight.dtype, [&](auto element) {
    stream->launch("write_grad_weight", grad_weight_kernel<decltype(element)>,
                   static_cast<unsigned>(rows), 256, m.tokens.scalars, sums,
                   call.shape.hidden_pitch(), row, call.accumulate, call.grad_weight);
  });
}

void write_lent_sums(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const int64_t pitch = call.shape.hidden_pitch();
  const auto write = [&](int64_t first, int64_t rows) {
    const float* sums = call.grad_weight.as<const float>() + first * pitch;
    if (first == 0) {  // the rows to write overlap the first sums
      stream->copy(m.stored, sums, rows * pitch * 4);
      sums = reinterpret_cast<const float*>(m.stored);
    }
    write_grad_weight(work, sums, first, rows);
  };
  for_lent_pieces(plan.lent_sum_rows, rows_in_place_of_e(call.shape, plan), write);
}

void write_grad_bias(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  stream->launch("write_grad_bias", grad_bias_kernel, blocks_for(call.shape.vocab, 256), 256,
                 m.tokens.scalars, m.bias_sum, call.accumulate, call.grad_bias);
}

void clear_grad_weight(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  if (call.accumulate) return;
  for (const TensorView* view : {&call.grad_weight, &call.grad_bias}) {
    if (!*view) continue;
    with_dtype(view->dtype, [&](auto element) {
      stream->launch("clear_grad_weight", zero_kernel<decltype(element)>,
                     static_cast<unsigned>(view->shape[0]), 256, *view);
    });
  }
}

}  // namespace logitless::cuda
