// SPDX-License-Identifier: Apache-2.0
// Computes the rows of E that the forward pass could not, once rows.cu has their factors. The list
// of these rows is on the device, and usually empty. A product computes the logits of 128 such rows
// and 128 columns, on tensor cores for 16-bit elements; then E_j = draw_j / v of each, smoothing
// included, from the finished state. A row's bits do not depend on the list's other rows.
#include <algorithm>

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/mma.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/runtime/early.cuh"

namespace logitless::cuda {
namespace {

constexpr int edge = 128, threads = 256;  // of a thread block's tile of logits
constexpr unsigned blocks_a_multiprocessor = 2;

// One step of both operands along the hidden axis, eight packs per row; a ninth pack of padding
// avoids bank conflicts.
template <class E>
struct Operands {
  static constexpr int packs = 8, step = packs * Pack<E>::width;
  uint4 input[edge][packs + 1], weight[edge][packs + 1];
};
constexpr int half = edge / 2, logits_pitch = edge + 8;
template <class E>
union Shared {
  Operands<E> operands;
  float logits[half][logits_pitch];  // half of the tile at a time
};

// A thread's part of the tile's logits, in registers.
template <class E>
struct Logits;

// 16-bit elements: a warp has 32 rows and 64 columns, in mma's tiles of 16 x 8.
template <class E>
  requires(sizeof(E) == 2)
struct Logits<E> {
  float sum[2][8][4] = {};

  static __device__ int first_row() { return threadIdx.x / 64 * 32; }
  static __device__ int first_column() { return threadIdx.x / 32 % 2 * 64; }

  __device__ void add(const Operands<E>& o) {
    const int lane = threadIdx.x % 32, row = first_row() + lane % 16;
    const int column = first_column() + lane / 16 * 8 + lane % 8;
#pragma unroll
    for (int k = 0; k < Operands<E>::packs; k += 2) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_matrices(a[m], shared_address(&o.input[row + 16 * m][k + lane / 16]));
      }
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        load_matrices(b, shared_address(&o.weight[column + 8 * n][k + lane / 8 % 2]));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_matrices<E>(sum[m][n], a[m], b[0], b[1]);
          multiply_matrices<E>(sum[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
  // Writes this thread's rows if they are in the half of the tile that starts at `first`.
  __device__ void store(int first, float (&logits)[half][logits_pitch]) const {
    if (first_row() / half * half != first) return;
    const int lane = threadIdx.x % 32, row = first_row() - first + lane / 4;
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const int m = n / 16, h = n / 8 % 2, i = n % 8;
      const int column = first_column() + 8 * i + lane % 4 * 2;
      *reinterpret_cast<float2*>(&logits[row + 16 * m + 8 * h][column]) = {sum[m][i][2 * h],
                                                                           sum[m][i][2 * h + 1]};
    }
  }
};

// f32: a thread has eight rows and eight columns, 16 apart; each sum is a chain along the hidden
// axis.
template <>
struct Logits<float> {
  float sum[8][8] = {};

  __device__ void add(const Operands<float>& o) {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
#pragma unroll 1
    for (int k = 0; k < Operands<float>::packs; ++k) {
      float a[8][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) unpack<float>(o.input[row + 16 * i][k], a[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float b[4];
        unpack<float>(o.weight[column + 16 * j][k], b);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int n = 0; n < 4; ++n) sum[i][j] = fmaf(a[i][n], b[n], sum[i][j]);
        }
      }
    }
  }
  __device__ void store(int first, float (&logits)[half][logits_pitch]) const {
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (16 * i / half * half != first) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) logits[row + 16 * i - first][column + 16 * j] = sum[i][j];
    }
  }
};

struct PanelArguments {
  LinearCall call;
  Chunk chunk;
  const float* target_logit;
  const RowGradient* gradients;
  const RowFactors* factors;
  const int32_t* again;
  Panel panel;
};

// Whether columns other than the target's have a gradient or are NaN. If not (only target_logit has
// a gradient), their logits are not needed.
__device__ inline bool asks_columns(const RowGradient& g) {
  return g.probability != 0 || g.smoothing != 0 || g.entropy != 0 ||
         !isfinite(g.reference + g.log_sum);
}

// Multiplies 128 rows of the list, from its entry `first` on, by 128 columns of the panel.
template <class E>
__device__ void multiply(const PanelArguments& a, int count, int first, int64_t first_column,
                         Operands<E>* operands, Logits<E>* logits) {
  constexpr int many = Operands<E>::packs / 2, width = Pack<E>::width;
  const int own = threadIdx.x / 2, pack = threadIdx.x % 2 * many;
  const int64_t hidden = a.call.weight.shape[1];
  const int row = a.again[1 + min(first + own, count - 1)];
  const RowReader<E> input(a.call.input, a.chunk.tokens.row[a.chunk.first + row], hidden);
  const int64_t column = a.panel.first + min(first_column + own, a.panel.columns - 1);
  const RowReader<E> weight(a.call.weight, column, hidden);
#pragma unroll 1
  for (int64_t d = 0; d < hidden; d += Operands<E>::step) {
    __syncthreads();
#pragma unroll 2
    for (int n = pack; n < pack + many; ++n) {
      operands->input[own][n] = input(d + n * width);
      operands->weight[own][n] = weight(d + n * width);
    }
    __syncthreads();
    logits->add(*operands);
  }
}

// An element of E, draw / v, from its raw logit.
__device__ inline float remade(const PanelArguments& a, int row, int64_t column, float raw) {
  const LinearCall& call = a.call;
  const RowGradient& g = a.gradients[row];
  const bool is_target = column == a.chunk.tokens.target[a.chunk.first + row];
  if (!asks_columns(g)) raw = 0;
  if (present(call.bias)) raw += load(call.bias, column);
  const MapFactors map = map_of_token(call.map, a.chunk.tokens, a.chunk.first + row);
  // The target's logit is already known.
  const float z = is_target ? a.target_logit[row] : map_raw(map, raw);
  // At |z| of 1e20 this product and the forward's may differ so much that log p would be positive.
  float log_p = (z - g.reference) - g.log_sum;
  log_p = log_p > 0 ? 0.0f : log_p;
  const float p = exp_any(log_p);
  const float own =
      is_target ? target_draw(g.probability, g.onehot, p, -expm1f(log_p)) : g.probability * p;
  const auto c = [&] { return class_weight(call.in, column); };
  const float information = fmaxf(log_p, least_exponent) + g.entropy_value;
  const float dz = dz_of<Fused>(own, g.smoothing != 0, g.smoothing, c, g.entropy != 0,
                                g.entropy * p, information);
  const float draw = dz * cap_slope(map, z), v = a.factors[row].scale;
  return v == 0 ? 0.0f : draw / v;
}

// Computes a tile of the panel: 128 rows of the list by 128 columns.
template <class E>
__device__ void make_tile(const PanelArguments& a, int count, int first, int64_t first_column,
                          Shared<E>* shared) {
  Logits<E> logits;
  const int own = first + static_cast<int>(threadIdx.x) % edge;
  const bool asks = own < count && asks_columns(a.gradients[a.again[1 + own]]);
  if (__syncthreads_or(asks)) {
    multiply<E>(a, count, first, first_column, &shared->operands, &logits);
  }
  const int64_t j = first_column + threadIdx.x % edge;
#pragma unroll
  for (int from = 0; from < edge; from += half) {
    __syncthreads();
    logits.store(from, shared->logits);
    __syncthreads();
    if (j >= a.panel.columns) continue;
    const int end = min(half, count - first - from);
    for (int n = threadIdx.x / edge; n < end; n += threads / edge) {
      const int row = a.again[1 + first + from + n];
      const float raw = shared->logits[n][threadIdx.x % edge];
      *panel_element<E>(a.panel, row, j) = from_f32<E>(remade(a, row, a.panel.first + j, raw));
    }
  }
  __syncthreads();
}

// First writes the target's column of E, where rows.cu did not. Then computes the listed rows
// again; returns at once if there are none.
template <class E>
__global__ void __launch_bounds__(threads, blocks_a_multiprocessor)
    panel_kernel(const __grid_constant__ PanelArguments a, bool targets) {
  wait_for_kernel_before();
  const Chunk& chunk = a.chunk;
  const int valid = targets ? valid_rows(chunk) : 0;
  for (int row = blockIdx.x * threads + threadIdx.x; row < valid; row += gridDim.x * threads) {
    const int64_t j = chunk.tokens.target[chunk.first + row] - a.panel.first;
    if (j < 0 || j >= a.panel.columns || a.factors[row].again != 0) continue;
    *panel_element<E>(a.panel, row, j) = from_f32<E>(a.factors[row].at_target);
  }
  const int count = a.again[0];
  if (count == 0) return;
  __shared__ Shared<E> shared;
  // Blocks that run at the same time read the same rows of the weight.
  const int64_t across = (count + edge - 1) / edge;
  const int64_t tiles = (a.panel.columns + edge - 1) / edge * across;
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    make_tile<E>(a, count, static_cast<int>(tile % across * edge), tile / across * edge, &shared);
  }
}

}  // namespace

void finish_panel(const LinearWork& work, const Panel& panel, bool targets) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  // At most as many blocks as can run at once, because usually every block finds the list empty.
  const unsigned most = static_cast<unsigned>(device.multiprocessors) * blocks_a_multiprocessor;
  const unsigned tiles = blocks_for(panel.columns, edge) * blocks_for(chunk.rows, edge);
  const LaunchShape shape{
      .blocks = std::min(tiles, most), .threads = threads, .early = call.launches_early};
  const PanelArguments a{call, chunk, m.target_logit, m.gradients, m.factors, m.again, panel};
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch_config("finish_panel", panel_kernel<decltype(element)>, shape, a, targets);
  });
}

}  // namespace logitless::cuda
