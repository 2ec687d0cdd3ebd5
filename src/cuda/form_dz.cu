// SPDX-License-Identifier: Apache-2.0
// Under a softcap and smoothing at once dz is no sum of something stored times a row's factor: the
// smoothing's term -s c_j has the softcap's slope 1 - (z_j / cap)^2 of its own element. E tells
// both:
//   z_j = z_t + log E_j    p_j = p_t E_j    dz_j = (P p_j - s c_j) (1 - (z_j / cap)^2)
// and near the cap what is left to it is kept instead (options.cuh). One read and one write, in
// place of a fourth product.
#include "src/cuda/linear.cuh"
#include "src/cuda/sm90/options.cuh"

namespace logitless::cuda {
namespace {

constexpr int rows_of_block = 32, blocks_of_columns = 4, width = 8;

struct Terms {
  RowGradient gradient;
  float target_logit, target_p, target_gradient;
  int64_t target;
};

__device__ inline float dz_of(const MapFactors& map, const Terms& t, float kept, float c) {
  float p, slope;
  if (kept < 0) {
    const float z = sm90::decode_left(map, kept, &slope);
    p = exp_any((z - t.gradient.reference) - t.gradient.log_sum);
  } else {
    slope = cap_slope(map, t.target_logit + sm90::log_fast(kept));
    p = t.target_p * kept;
  }
  return fmaf(-t.gradient.smoothing, c, t.gradient.probability * p) * slope;
}

// 32 rows of 8 threads, 16 bytes each; several blocks of 64 columns in turn, so that what a row
// needs is asked for once.
__global__ void __launch_bounds__(256)
    form_dz_kernel(const __grid_constant__ LinearCall call, Chunk chunk, const float* target_logit,
                   const float* target_gradient, const RowGradient* gradients,
                   const float* class_weights, Panel panel) {
  using E = __nv_bfloat16;
  const int row = blockIdx.x * rows_of_block + threadIdx.x / width;
  if (row >= valid_rows(chunk)) return;
  Terms t{gradients[row], target_logit[row], 0, target_gradient[row],
          chunk.tokens.target[chunk.first + row] - panel.first};
  t.target_p = exp_any((t.target_logit - t.gradient.reference) - t.gradient.log_sum);
  const int64_t first =
      block_of_second_axis() * (blocks_of_columns * 64) + threadIdx.x % width * width;
  Pack<E> e[blocks_of_columns];
#pragma unroll
  for (int b = 0; b < blocks_of_columns; ++b) {
    const int64_t j = first + 64 * b;
    if (j < panel.columns) e[b] = *reinterpret_cast<Pack<E>*>(panel_element<E>(panel, row, j));
  }
#pragma unroll
  for (int b = 0; b < blocks_of_columns; ++b) {
    const int64_t j = first + 64 * b;
    if (j >= panel.columns) return;
    float c[width];
#pragma unroll
    for (int n = 0; n < width; ++n) {
      c[n] = class_weights == nullptr ? 1.0f : __ldg(class_weights + panel.first + j + n);
    }
#pragma unroll
    for (int n = 0; n < width; ++n) {
      float dz = dz_of(call.map, t, to_f32(e[b].x[n]), c[n]);
      if (j + n == t.target) dz = t.target_gradient;
      if (j + n >= panel.columns) dz = 0;
      e[b].x[n] = from_f32<E>(dz);
    }
    *reinterpret_cast<Pack<E>*>(panel_element<E>(panel, row, j)) = e[b];
  }
}

}  // namespace

void form_dz(const LinearCall& call, const LinearMemory& m, const Chunk& chunk, const Panel& panel,
             Stream* stream) {
  stream->launch("form_dz", form_dz_kernel,
                 two_axes(blocks_for(chunk.rows, rows_of_block),
                          divide_up(panel.columns, blocks_of_columns * 64)),
                 256, call, chunk, m.target_logit, m.target_gradient, m.gradients, m.class_weights,
                 panel);
}

}  // namespace logitless::cuda
