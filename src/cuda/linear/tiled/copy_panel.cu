// SPDX-License-Identifier: Apache-2.0
// Copies E back to the workspace before rows of grad_weight overwrite it.
#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/tiled/engine.h"
#include "src/cuda/linear/tiled/plan.h"

namespace logitless::cuda::tiled {
namespace {

// Each thread has this many copies of 16 bytes in flight.
constexpr int threads = 256, copies = 4;
constexpr int row_parts = 8;  // threads that share a row of a block's 64 columns

// Each block of the panel is [pitch, 64], whose first rows count: one contiguous piece, including
// the zeros after it up to a step of the product.
__global__ void __launch_bounds__(threads) copy_kernel(Chunk chunk, int whole, const uint4* from,
                                                       uint4* to, int64_t pitch, int64_t blocks) {
  const int64_t rows = (valid_rows(chunk) + whole - 1) / whole * whole;
  const int64_t parts = rows * row_parts;
  const int64_t pieces = (parts + threads * copies - 1) / (threads * copies);
  for (int64_t piece = blockIdx.x; piece < blocks * pieces; piece += gridDim.x) {
    const int64_t block = piece / pieces * pitch * row_parts;
    const int64_t first = piece % pieces * (threads * copies) + threadIdx.x;
    uint4 x[copies];
#pragma unroll
    for (int n = 0; n < copies; ++n) {
      const int64_t i = first + n * threads;
      if (i < parts) x[n] = from[block + i];
    }
#pragma unroll
    for (int n = 0; n < copies; ++n) {
      const int64_t i = first + n * threads;
      if (i < parts) to[block + i] = x[n];
    }
  }
}

}  // namespace

void copy_panel(const LinearWork& work, const Panel& panel, char* to) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  stream->launch("copy_panel", copy_kernel, static_cast<unsigned>(device.multiprocessors * 8),
                 threads, chunk, tile_of(plan).depth, reinterpret_cast<const uint4*>(panel.data),
                 reinterpret_cast<uint4*>(to), panel.pitch, (panel.columns + 63) / 64);
}

}  // namespace logitless::cuda::tiled
