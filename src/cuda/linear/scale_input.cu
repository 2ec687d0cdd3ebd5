// SPDX-License-Identifier: Apache-2.0
// With smoothing the input is scaled after the factors of all rows are known, because the
// smoothing's term of grad_weight is a sum over all rows.
#include "src/cuda/linear/linear.cuh"

namespace logitless::cuda {
namespace {

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

// Writes v_k input_k for each row k of the chunk, then, if the plan has extra rows, -sum_k s_k
// input_k rounded to E's dtype, the rounding error, and zeros. Those two rows times the class
// weights are the smoothing's part of grad_weight; one 16-bit row would lose too much of it.
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

}  // namespace

void scale_input(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const bool smooths = m.smoothed_row != nullptr;
  const int64_t pitch = call.shape.hidden_pitch();
  const unsigned columns = blocks_for(pitch, 256);
  with_stored(call.shape.dtype, [&](auto element) {
    using E = decltype(element);
    const E* input = reinterpret_cast<const E*>(m.input);
    if (smooths) {
      const unsigned slabs = blocks_for(chunk.rows, token_slab_rows);
      stream->launch("smoothed_slabs", smoothed_slabs<E>, two_axes(columns, slabs), 256, chunk,
                     m.factors, input, pitch, static_cast<int>(slabs), m.slabs);
      stream->launch("smoothed_row", sum_slabs, columns, 256, m.slabs, static_cast<int>(slabs),
                     pitch, m.smoothed_row);
    }
    const int64_t behind = plan.extra_rows;
    stream->launch("scale_input", scale_kernel<E>, static_cast<unsigned>(chunk.rows + behind), 128,
                   chunk, m.factors, input, pitch,
                   smooths ? m.smoothed_row : static_cast<float*>(nullptr),
                   reinterpret_cast<E*>(m.scaled));
  });
}

}  // namespace logitless::cuda
