// SPDX-License-Identifier: Apache-2.0
// Writes the padding rows and columns after a panel's own, which products read too.
#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/portable/kernels.h"

namespace logitless::cuda {
namespace {

// Writes the padding rows: c_j in the first two if the smoothing's term is computed separately, and
// zeros in the others.
template <class E>
__global__ void __launch_bounds__(256)
    extra_rows_kernel(LinearCall call, int32_t row, int32_t count, bool smooths, Panel panel) {
  const int64_t j = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (j >= panel.columns) return;
  const float c = smooths ? class_weight(call.in, panel.first + j) : 0.0f;
  E* to = reinterpret_cast<E*>(panel.data) + row * panel.pitch + j;
  for (int r = 0; r < count; ++r) to[r * panel.pitch] = from_f32<E>(r < 2 ? c : 0.0f);
}

// Writes zeros after the last columns of the vocabulary, up to a multiple of 8.
template <class E>
__global__ void __launch_bounds__(256) extra_columns_kernel(int32_t rows, Panel panel) {
  const int64_t row = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (row >= rows) return;
  E* to = reinterpret_cast<E*>(panel.data) + row * panel.pitch;
  for (int64_t j = panel.columns; j % 8 != 0; ++j) to[j] = from_f32<E>(0.0f);
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

}  // namespace logitless::cuda
