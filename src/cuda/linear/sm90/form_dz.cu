// SPDX-License-Identifier: Apache-2.0
// With both a softcap and smoothing, dz is not E times a factor of the row: in the smoothing's term
// -s c_j every element has its own slope of the softcap, 1 - (z_j / cap)^2. Both can be computed
// from E:
//   z_j = z_t + log E_j    p_j = p_t E_j    dz_j = (P p_j - s c_j) (1 - (z_j / cap)^2)
// Near the cap, the distance to it is kept instead (near_cap.cuh). This costs one read and one
// write, and saves a fourth product.
#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/sm90/near_cap.cuh"
#include "src/cuda/logit_map.cuh"

namespace logitless::cuda::sm90 {
namespace {

using E = __nv_bfloat16;
constexpr int rows_of_block = 32, blocks_of_columns = 4, width = 8;

struct Terms {
  RowGradient gradient;
  float target_logit, target_p, target_gradient;
  int64_t target;
  // dz without the softcap's slope, for a column that is not the target.
  __device__ float smoothed(float p, float c) const {
    return dz_of<Fused>(gradient.probability * p, true, gradient.smoothing, c, false, 0.0f, 0.0f);
  }
};

// Computes eight columns, none of them near the cap, the target's, or after the last column.
__device__ inline uint4 form_usual(const MapFactors& map, const Terms& t,
                                   const float* class_weights, const uint4& kept) {
  // In units of the cap.
  const float start = t.target_logit * map.backward, log2_part = ln2 * map.backward;
  float c[width] = {1, 1, 1, 1, 1, 1, 1, 1};
  if (class_weights != nullptr) {
#pragma unroll
    for (int n = 0; n < width; n += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(class_weights + n));
      c[n] = four.x, c[n + 1] = four.y, c[n + 2] = four.z, c[n + 3] = four.w;
    }
  }
  uint32_t words[width / 2] = {kept.x, kept.y, kept.z, kept.w};
#pragma unroll
  for (int n = 0; n < width / 2; ++n) {
    float dz[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float e = bf16_of(words[n], i);
      const float part = fmaf(log2_fast(e), log2_part, start);
      const float slope = fmaf(-part, part, 1.0f), p = t.target_p * e;
      dz[i] = t.smoothed(p, c[2 * n + i]) * slope;
    }
    words[n] = pack<E>(dz);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Computes eight columns, some of which are near the cap, the target's, or after the last column;
// `left` of them exist. Loops over words, so that there is one copy of the code.
__device__ inline uint4 form_rare(const MapFactors& map, const Terms& t, const float* class_weights,
                                  int64_t target, int64_t left, uint4 kept) {
#pragma unroll 1
  for (int n = 0; n < width; n += 2) {
    float dz[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float e = bf16_of(kept.x, i);
      const float c = class_weights == nullptr ? 1.0f : __ldg(class_weights + n + i);
      float p = t.target_p * e, slope;
      if (e < 0) {
        const float z = sm90::decode_left(map, e, &slope);
        p = exp_any((z - t.gradient.reference) - t.gradient.log_sum);
      } else {
        slope = cap_slope(map, t.target_logit + log2_fast(e) * ln2);
      }
      dz[i] = t.smoothed(p, c) * slope;
      if (n + i == target) dz[i] = t.target_gradient;
      if (n + i >= left) dz[i] = 0;
    }
    kept = {kept.y, kept.z, kept.w, pack<E>(dz)};
  }
  return kept;
}

// Computes a row's eight columns from `j` on.
__device__ inline uint4 form_eight(const MapFactors& map, const Terms& t,
                                   const float* class_weights, const Panel& panel, int64_t row,
                                   int64_t j, const uint4& kept) {
  const float* weights = class_weights == nullptr ? nullptr : class_weights + panel.first + j;
  const int64_t target = t.target - j, left = panel.columns - j;
  const uint32_t signs = (kept.x | kept.y | kept.z | kept.w) & 0x80008000u;
  const bool rare = signs != 0 || (target >= 0 && target < width) || left < width;
  const uint4 dz =
      rare ? form_rare(map, t, weights, target, left, kept) : form_usual(map, t, weights, kept);
  return *reinterpret_cast<uint4*>(panel_element<E>(panel, row, j)) = dz;
}

// A block handles a slab of rows, 32 at a time with 8 threads each and 16 bytes per thread, and
// several blocks of 64 columns in turn, so that a row's coefficients are loaded once. If kSums, it
// also sums the written columns over the slab, in the order of bias_slabs_kernel.
template <bool kSums>
__global__ void __launch_bounds__(256)
    form_dz_kernel(const __grid_constant__ MapFactors map, Chunk chunk, const float* target_logit,
                   const float* target_gradient, const RowGradient* gradients,
                   const float* class_weights, Panel panel, int slab_rows, float* slabs) {
  constexpr int blocks = blocks_of_columns;
  const int part = threadIdx.x / width, slab = blockIdx.x;
  const int end = min((slab + 1) * slab_rows, valid_rows(chunk));
  const int64_t first = block_of_second_axis() * (blocks * 64) + threadIdx.x % width * width;
  float sums[kSums ? blocks : 1][width] = {};
#pragma unroll 1
  for (int row = slab * slab_rows + part; row < end; row += rows_of_block) {
    uint4 kept[blocks];
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int64_t j = first + 64 * b;
      if (j < panel.columns) {
        kept[b] = *reinterpret_cast<uint4*>(panel_element<E>(panel, row, j));
      }
    }
    Terms t{gradients[row], target_logit[row], 0, target_gradient[row],
            chunk.tokens.target[chunk.first + row] - panel.first};
    t.target_p = exp_any((t.target_logit - t.gradient.reference) - t.gradient.log_sum);
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int64_t j = first + 64 * b;
      if (j >= panel.columns) break;
      const uint4 dz = form_eight(map, t, class_weights, panel, row, j, kept[b]);
      if constexpr (kSums) {
        const uint32_t words[] = {dz.x, dz.y, dz.z, dz.w};
#pragma unroll
        for (int n = 0; n < width; ++n) sums[b][n] += bf16_of(words[n / 2], n % 2);
      }
    }
  }
  if constexpr (kSums) {
    __shared__ ColumnParts parts;
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      if (b > 0) __syncthreads();
      parts.put(part, threadIdx.x % width * width, sums[b]);
      __syncthreads();
      const int64_t j = block_of_second_axis() * (blocks * 64) + 64 * b + threadIdx.x;
      if (threadIdx.x >= 64 || j >= panel.columns) continue;
      slabs[slab * panel.columns + j] = parts.sum();
    }
  }
}

}  // namespace

void HopperEngine::form_dz(const LinearWork& work, const Panel& panel, bool first) const {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const auto launch = [&](auto kernel, const Panel& some, int64_t slab_rows) {
    stream->launch("form_dz", kernel,
                   two_axes(blocks_for(chunk.rows, slab_rows),
                            divide_up(some.columns, blocks_of_columns * 64)),
                   256, call.map, chunk, m.target_logit, m.target_gradient, m.gradients,
                   m.class_weights, some, static_cast<int>(slab_rows), m.bias_slabs);
  };
  if (!call.shape.grad_bias) return launch(form_dz_kernel<false>, panel, rows_of_block);
  for_bias_columns(call.shape.dtype, panel, [&](const Panel& some) {
    launch(form_dz_kernel<true>, some, bias_slab_rows);
    add_slabs_to_bias(work, some, nullptr, first);
  });
}

}  // namespace logitless::cuda::sm90
