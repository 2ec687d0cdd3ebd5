// SPDX-License-Identifier: Apache-2.0
// Moves rows of kept E whose tokens have a gradient to the front, and back.
#include "src/cuda/linear/linear.cuh"

namespace logitless::cuda {
namespace {

// Swaps rows of kept E: row k with the row at `place`, where Forward put the token that Backward
// has at k. Eight threads share a row, 16 bytes each, and handle several groups of columns in turn.
// If every token has a gradient, all rows are in place already.
constexpr int traded_rows = 32, traded_lanes = 8, traded_groups = 8;

template <class E>
__device__ inline Pack<E>* pack_of(const Panel& panel, int64_t row, int64_t j) {
  return reinterpret_cast<Pack<E>*>(panel_element<E>(panel, row, j));
}
// Columns of a panel's row in memory.
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

// Products read some rows after those that they multiply, so values there that are not finite
// become 0. Such rows are computed again whenever they have a gradient (most_nats in rows.cu), or
// have a factor of NaN.
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

}  // namespace

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

}  // namespace logitless::cuda
