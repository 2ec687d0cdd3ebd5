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

// Eight columns as they come: most need no more.
__device__ inline void form_usual(const MapFactors& map, const Terms& t, const float (&c)[width],
                                  uint32_t (&e)[width / 2]) {
  // In parts of the cap.
  const float start = t.target_logit * map.backward, log2_part = 0x1.62e430p-1f * map.backward;
#pragma unroll
  for (int n = 0; n < width / 2; ++n) {
    float dz[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float kept = __uint_as_float(i == 0 ? e[n] << 16 : e[n] & 0xffff0000u);
      const float part = fmaf(sm90::log2_fast(kept), log2_part, start);
      const float slope = fmaf(-part, part, 1.0f), p = t.target_p * kept;
      dz[i] = fmaf(-t.gradient.smoothing, c[2 * n + i], t.gradient.probability * p) * slope;
    }
    const __nv_bfloat162 two = __floats2bfloat162_rn(dz[0], dz[1]);
    e[n] = *reinterpret_cast<const uint32_t*>(&two);
  }
}

// Some of them near the cap, the target or behind the last column, of which `left` are in front: in
// memory, for registers have no address.
__device__ inline void form_rare(const MapFactors& map, const Terms& t, const float* class_weights,
                                 int64_t target, int64_t left, __nv_bfloat16* e) {
#pragma unroll 1
  for (int n = 0; n < width; ++n) {
    const float kept = __bfloat162float(e[n]),
                c = class_weights == nullptr ? 1.0f : __ldg(class_weights + n);
    float p = t.target_p * kept, slope;
    if (kept < 0) {
      const float z = sm90::decode_left(map, kept, &slope);
      p = exp_any((z - t.gradient.reference) - t.gradient.log_sum);
    } else {
      slope = cap_slope(map, t.target_logit + sm90::log2_fast(kept) * 0x1.62e430p-1f);
    }
    float dz = fmaf(-t.gradient.smoothing, c, t.gradient.probability * p) * slope;
    if (n == target) dz = t.target_gradient;
    e[n] = __float2bfloat16_rn(n < left ? dz : 0.0f);
  }
}

// 32 rows of 8 threads, 16 bytes each; several blocks of 64 columns in turn, so that what a row
// needs is asked for once.
__global__ void __launch_bounds__(256)
    form_dz_kernel(const __grid_constant__ MapFactors map, Chunk chunk, const float* target_logit,
                   const float* target_gradient, const RowGradient* gradients,
                   const float* class_weights, Panel panel) {
  const int row = blockIdx.x * rows_of_block + threadIdx.x / width;
  if (row >= valid_rows(chunk)) return;
  const int64_t first =
      block_of_second_axis() * (blocks_of_columns * 64) + threadIdx.x % width * width;
  uint4 kept[blocks_of_columns];
#pragma unroll
  for (int b = 0; b < blocks_of_columns; ++b) {
    const int64_t j = first + 64 * b;
    if (j < panel.columns) {
      kept[b] = *reinterpret_cast<uint4*>(panel_element<__nv_bfloat16>(panel, row, j));
    }
  }
  Terms t{gradients[row], target_logit[row], 0, target_gradient[row],
          chunk.tokens.target[chunk.first + row] - panel.first};
  t.target_p = exp_any((t.target_logit - t.gradient.reference) - t.gradient.log_sum);
#pragma unroll
  for (int b = 0; b < blocks_of_columns; ++b) {
    const int64_t j = first + 64 * b;
    if (j >= panel.columns) return;
    __nv_bfloat16* to = panel_element<__nv_bfloat16>(panel, row, j);
    const float* weights = class_weights == nullptr ? nullptr : class_weights + panel.first + j;
    const int64_t target = t.target - j, left = panel.columns - j;
    const uint32_t signs = (kept[b].x | kept[b].y | kept[b].z | kept[b].w) & 0x80008000u;
    if (signs != 0 || (target >= 0 && target < width) || left < width) {
      form_rare(map, t, weights, target, left, to);
      continue;
    }
    float c[width] = {1, 1, 1, 1, 1, 1, 1, 1};
    if (weights != nullptr) {
#pragma unroll
      for (int n = 0; n < width; n += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(weights + n));
        c[n] = four.x, c[n + 1] = four.y, c[n + 2] = four.z, c[n + 3] = four.w;
      }
    }
    uint32_t e[width / 2] = {kept[b].x, kept[b].y, kept[b].z, kept[b].w};
    form_usual(map, t, c, e);
    *reinterpret_cast<uint4*>(to) = {e[0], e[1], e[2], e[3]};
  }
}

}  // namespace

void form_dz(const LinearCall& call, const LinearMemory& m, const Chunk& chunk, const Panel& panel,
             Stream* stream) {
  stream->launch("form_dz", form_dz_kernel,
                 two_axes(blocks_for(chunk.rows, rows_of_block),
                          divide_up(panel.columns, blocks_of_columns * 64)),
                 256, call.map, chunk, m.target_logit, m.target_gradient, m.gradients,
                 m.class_weights, panel);
}

}  // namespace logitless::cuda
