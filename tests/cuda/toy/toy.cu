// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/toy/toy.h"

#include <algorithm>

#include "src/cuda/linear/linear.cuh"
#include "src/row/map.h"

namespace logitless::cuda::toy {
namespace {

using E = __nv_bfloat16;
constexpr int threads = 64;
static_assert(tile.columns == threads);

// Rows of the compacted input, or of the weight.
struct Rows {
  const E* data;
  int64_t pitch;
  __device__ const E* row(int64_t i) const { return data + i * pitch; }
};
Rows weight_of(const LinearWork& work) {
  const Operand rows = weight_rows(work.call, work.m, 0);
  return {reinterpret_cast<const E*>(rows.data), rows.row_stride};
}
Rows input_of(const LinearWork& work) {
  return {reinterpret_cast<const E*>(work.m.input), work.call.shape.hidden_pitch()};
}

__device__ float dot(const E* a, const E* b, int64_t count) {
  float sum = 0;
  for (int64_t d = 0; d < count; ++d) sum = fmaf(to_f32(a[d]), to_f32(b[d]), sum);
  return sum;
}

// Arguments of the kernels that compute logits.
struct LogitsArguments {
  Chunk chunk;
  Rows input, weight;
  int64_t hidden, vocab;
  const float* target_logit;
  Partials partials;             // of `logits`
  const RowGradient* gradients;  // of `remake`
  const float* target_gradient;
  Panel panel;
};
LogitsArguments arguments_of(const LinearWork& work, const Panel& panel) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  return {chunk,          input_of(work), weight_of(work), call.shape.hidden, call.shape.vocab,
          m.target_logit, m.partials,     m.gradients,     m.target_gradient, panel};
}

__device__ float find_largest(float x, float* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  for (int i = 0; i < threads; ++i) x = fmaxf(x, shared[i]);
  __syncthreads();
  return x;
}
__device__ float find_sum(float x, float* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < threads; ++i) sum += shared[i];
  __syncthreads();
  return sum;
}

// A block computes one row of a tile, a thread one column.
__global__ void __launch_bounds__(threads) logits_kernel(LogitsArguments a, int64_t first) {
  __shared__ float shared[threads];
  const int row = blockIdx.x;
  if (!is_valid(a.chunk, row)) return;
  const int64_t number = block_of_second_axis(), j = first + number * threads + threadIdx.x;
  if (first + number * threads >= a.vocab) return;
  const int64_t target = a.chunk.tokens.target[a.chunk.first + row];
  const float z = j < a.vocab ? dot(a.input.row(row), a.weight.row(j), a.hidden) : -infinity();
  const bool counts = j < a.vocab && j != target;
  const float most = find_largest(counts ? z : -infinity(), shared);
  // A NaN enters the sum and not the maximum; if all columns are -inf, the sum is 0.
  const float from = most == -infinity() ? 0.0f : most;
  const float sum = find_sum(counts ? exp_any(z - from) : 0.0f, shared);
  if (threadIdx.x == 0) {
    const int64_t at = row * a.partials.segments + first / threads + number;
    a.partials.maximum[at] = most;
    a.partials.sum[at] = sum;
  }
  if (a.panel.data == nullptr) return;
  const float e = j < a.vocab ? exp_any(z - a.target_logit[row]) : 0.0f;
  *panel_element<E>(a.panel, row, j - a.panel.first) = from_f32<E>(e);
}

__global__ void __launch_bounds__(threads) remake_kernel(LogitsArguments a) {
  const int row = blockIdx.x;
  if (!is_valid(a.chunk, row)) return;
  const int64_t in_panel = block_of_second_axis() * threads + threadIdx.x;
  if (in_panel >= (a.panel.columns + 63) / 64 * 64) return;
  const int64_t j = a.panel.first + in_panel;
  const RowGradient g = a.gradients[row];
  float dz = 0;
  if (j == a.chunk.tokens.target[a.chunk.first + row]) {
    dz = a.target_gradient[row];
  } else if (in_panel < a.panel.columns) {
    const float z = dot(a.input.row(row), a.weight.row(j), a.hidden);
    dz = g.probability * exp_any((z - g.reference) - g.log_sum);
  }
  *panel_element<E>(a.panel, row, in_panel) = from_f32<E>(dz);
}

struct InputArguments {
  Chunk chunk;
  Panel panel, behind;
  Rows weight;
  int64_t hidden, pitch, first_row;
  const RowFactors* factors;
  float* sums;  // null: writes the caller's gradient
  TensorView gradient;
  bool add;
};
__device__ float input_part(const InputArguments& a, const Panel& panel, int row, int64_t d) {
  float sum = 0;
  for (int64_t j = 0; j < panel.columns; ++j) {
    sum = fmaf(to_f32(*panel_element<E>(panel, row, j)), to_f32(a.weight.row(panel.first + j)[d]),
               sum);
  }
  return sum;
}
// A block computes one row, a thread a part of its columns.
__global__ void __launch_bounds__(threads) input_kernel(InputArguments a) {
  const int row = static_cast<int>(a.first_row) + blockIdx.x;
  if (!is_valid(a.chunk, row)) return;
  const float v = a.factors == nullptr ? 1.0f : a.factors[row].scale;
  for (int64_t d = threadIdx.x; d < a.hidden; d += threads) {
    const float product =
        v == 0 ? 0.0f : v * (input_part(a, a.panel, row, d) + input_part(a, a.behind, row, d));
    if (a.sums == nullptr) {
      const float scale = a.chunk.tokens.scalars->gradient_scale;
      store(a.gradient, a.chunk.tokens.row[a.chunk.first + row], d, scale * product);
    } else {
      float* to = a.sums + int64_t{blockIdx.x} * a.pitch + d;
      *to = a.add ? *to + product : product;
    }
  }
}

struct WeightArguments {
  Chunk chunk;
  Panel panel;
  Rows rows;
  int64_t hidden, pitch, split;
  float *sums, *rest;  // null: the caller's gradient; rows >= `split` are in `rest`
  TensorView gradient;
  bool add;
};
// A block computes one row of the gradient, a column of the panel; a thread a part of it.
__global__ void __launch_bounds__(threads) weight_kernel(WeightArguments a) {
  const int64_t j = int64_t{blockIdx.x} + int64_t{gridDim.x} * block_of_second_axis();
  if (j >= a.panel.columns) return;
  const int valid = valid_rows(a.chunk);
  for (int64_t d = threadIdx.x; d < a.hidden; d += threads) {
    float product = 0;
    for (int row = 0; row < valid; ++row) {
      const float e = to_f32(*panel_element<E>(a.panel, row, j));
      if (e != 0) product = fmaf(e, to_f32(a.rows.row(row)[d]), product);
    }
    const int64_t to_row = a.panel.first + j;
    if (a.sums == nullptr) {
      const float x = a.chunk.tokens.scalars->gradient_scale * product;
      store(a.gradient, to_row, d, a.add ? load(a.gradient, to_row, d) + x : x);
    } else {
      float* to =
          to_row < a.split ? a.sums + to_row * a.pitch : a.rest + (to_row - a.split) * a.pitch;
      to[d] = a.add ? to[d] + product : product;
    }
  }
}

}  // namespace

bool ToyEngine::serves(const Call& op, const LinearShape& s) const {
  const LossOptions& o = op.options;
  const bool identity = o.logit_scale == 1 && o.softcap == 0 && o.temperature == 1;
  const bool rows = s.copies_weight || op.weight.stride[1] == 1 || s.hidden == 1;
  return s.dtype == DType::bf16 && rows && identity && !s.maps && !s.smoothing && !op.bias &&
         !op.vocab_weight && !op.grad_entropy && !op.kept && s.sums.empty() && !s.grad_bias;
}

DeviceSpeed ToyEngine::speed(const DeviceInfo& device) const {
  return {.products = 1e9, .multiprocessors = static_cast<double>(device.multiprocessors)};
}

void ToyEngine::logits(const LinearWork& work, int64_t first, int64_t columns,
                       const Panel& panel) const {
  work.stream->launch("toy logits", logits_kernel,
                      two_axes(static_cast<unsigned>(work.chunk.rows), divide_up(columns, threads)),
                      threads, arguments_of(work, panel), first);
}

void ToyEngine::remake(const LinearWork& work, const Panel& panel) const {
  work.stream->launch(
      "toy remake", remake_kernel,
      two_axes(static_cast<unsigned>(work.chunk.rows), divide_up(panel.columns, threads)), threads,
      arguments_of(work, panel));
}

void ToyEngine::input_sums(const LinearWork& work, const tiled::Kept& kept, const Range& rows,
                           float* sums, bool of_e, bool add) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const InputArguments a{chunk,
                         kept.panel,
                         kept.behind,
                         weight_of(work),
                         call.shape.hidden,
                         call.shape.hidden_pitch(),
                         rows.first,
                         of_e ? m.factors : nullptr,
                         sums,
                         call.grad_input,
                         add};
  stream->launch("toy grad_input", input_kernel, static_cast<unsigned>(rows.count), threads, a);
}

void ToyEngine::grad_input(const LinearWork& work, const tiled::Kept& kept, bool of_e) const {
  input_sums(work, kept, {0, work.chunk.rows}, nullptr, of_e, false);
}

void ToyEngine::grad_weight(const LinearWork& work, const Panel& panel, const char* rows, bool,
                            bool add) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const bool sums = sums_grad_weight(call.shape, plan);
  const bool lends = plan.lent_sum_rows > 0;
  // The first of two passes makes only the first rows.
  const int64_t columns = std::min(panel.columns, call.shape.rows_of_weight());
  const WeightArguments a{chunk,
                          panel,
                          {reinterpret_cast<const E*>(rows), call.shape.hidden_pitch()},
                          call.shape.hidden,
                          call.shape.hidden_pitch(),
                          plan.lent_sum_rows,
                          !sums   ? nullptr
                          : lends ? call.grad_weight.as<float>()
                                  : m.grad_weight_sum,
                          m.grad_weight_sum,
                          call.grad_weight,
                          add};
  stream->launch("toy grad_weight", weight_kernel, two_axes(1, columns), threads, a);
}

}  // namespace logitless::cuda::toy
