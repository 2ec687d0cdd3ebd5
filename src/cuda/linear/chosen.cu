// SPDX-License-Identifier: Apache-2.0
// Chosen columns of each token (docs/semantics.md): a Forward writes their logits, each by one dot
// product; a Backward adds their gradients to panels of dz, before products read these.
#include <cfloat>

#include "src/call.h"
#include "src/cuda/linear/dot.cuh"
#include "src/cuda/logit_map.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int columns_per_block = 64;  // of those of a token whose logits a block makes

struct ChosenColumn {
  int column;       // in the views, or -1 where there is none
  bool is_outside;  // the id is an error
  bool is_given;    // some shard has it
};
__device__ ChosenColumn column_of(const TokenInput& in, int64_t id) {
  if (id >= 0 && id < in.whole()) return {column_of_target(in, id), false, true};
  return {-1, id != -1 && in.options.out_of_range == OutOfRange::error, false};
}
__device__ bool counts(const TokenInput& in, int64_t i) {
  return kind_of_target(in, target_of(in, i)) == TokenKind::counts;
}
__device__ MapFactors map_of(const LinearCall& call, const Tokens& t, int64_t i) {
  return t.map == nullptr ? call.map : with_token(call.map, t.map[i]);
}

// A warp returns z of a column, with the bits that gather.cu gives a target's.
template <class T>
__device__ float logit_of(const LinearCall& call, const MapFactors& map, int64_t i, int column,
                          int lane) {
  constexpr int width = Pack<T>::width;
  const int64_t hidden = call.weight.shape[1];
  const RowReader<T> input(call.input, i, hidden), weight(call.weight, column, hidden);
  float sum;
  if (input.aligned && weight.aligned && hidden % width == 0) {
    sum = dot_packs<T>(reinterpret_cast<const Pack<T>*>(input.data),
                       reinterpret_cast<const Pack<T>*>(weight.data),
                       static_cast<int>(hidden / width), nullptr, lane);
  } else {
    sum = dot_elements<T>(input, weight, hidden, nullptr, lane);
  }
  sum = warp_sum(sum);
  if (present(call.bias)) sum += load(call.bias, column);
  return map_raw(map, sum);
}

// A block takes some of a token's columns, a warp one in turn.
template <class T>
__global__ void __launch_bounds__(threads)
    logits_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Tokens tokens) {
  const int64_t i = blockIdx.x, all = call.ids.shape[1];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * columns_per_block;
  const int64_t end = min(all, first + columns_per_block);
  const int lane = threadIdx.x % 32;
  const bool reads = counts(call.in, i);
  const MapFactors map = map_of(call, tokens, i);
  for (int64_t k = first + threadIdx.x / 32; k < end; k += warps) {
    float z = -infinity();
    if (reads) {
      const ChosenColumn chosen = column_of(call.in, load_int(call.ids, i, k));
      if (chosen.column >= 0) z = logit_of<T>(call, map, i, chosen.column, lane);
      if (chosen.is_outside) {
        z = nan_value();
        if (lane == 0 && present(call.in.fault)) atomicOr(address<int>(call.in.fault), 1);
      }
    }
    if (lane == 0) *address<float>(call.logits_at, i, k) = z;
  }
}

// A warp sums the sizes of a token's gradients, those of other shards' columns among them. One that
// is not finite has next to none, but makes the token active.
__global__ void __launch_bounds__(threads)
    sizes_kernel(const __grid_constant__ LinearCall call, float* sizes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  if (i >= call.ids.shape[0]) return;
  float sum = 0;
  if (counts(call.in, i)) {
    for (int64_t k = threadIdx.x % 32; k < call.ids.shape[1]; k += 32) {
      const ChosenColumn chosen = column_of(call.in, load_int(call.ids, i, k));
      if (chosen.is_given) {
        const float size = fabsf(load(call.grad_logits_at, i, k));
        sum = fminf(sum + (isfinite(size) ? size : FLT_MIN), FLT_MAX);
      }
      if (chosen.is_outside && present(call.in.fault)) {
        atomicOr(address<int>(call.in.fault), 1);
      }
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sizes[i] = sum;
}

// A block adds up a token's gradients of equal columns, in the order of k, at the first of them,
// and makes its logit; the others' columns become -1. The sums come out as a panel's elements do:
// without the factor common to all, times the map's slope.
template <class T>
__global__ void __launch_bounds__(threads)
    merge_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Tokens tokens,
                 ChosenGradients to) {
  __shared__ int columns[most_chosen];
  __shared__ float gradients[most_chosen];
  const int64_t i = blockIdx.x;
  const int all = static_cast<int>(call.ids.shape[1]);
  const TokenKind kind = kind_of_token(call.in, tokens.inactive, i, target_of(call.in, i));
  if (kind != TokenKind::counts) return;  // nobody reads its row
  for (int k = threadIdx.x; k < all; k += threads) {
    columns[k] = column_of(call.in, load_int(call.ids, i, k)).column;
    if (columns[k] >= 0) gradients[k] = load(call.grad_logits_at, i, k);
  }
  __syncthreads();
  const MapFactors map = map_of(call, tokens, i);
  const float factor = tokens.scalars->inv_gradient_scale;
  for (int k = threadIdx.x / 32; k < all; k += warps) {
    // A lane looks at every 32nd place; the sum is one lane's, so that its order is that of k.
    const int column = columns[k], lane = threadIdx.x % 32;
    int before = column < 0 ? 1 : 0, more = 0;
    for (int j = lane; j < all; j += 32) {
      if (columns[j] == column) before += j < k ? 1 : 0, more += j > k ? 1 : 0;
    }
    before = warp_sum(before), more = warp_sum(more);
    if (before > 0) {
      if (lane == 0) to.column[i * all + k] = -1;
      continue;
    }
    float sum = gradients[k];
    for (int j = k + 1; j < all && more > 0; ++j) {
      if (columns[j] == column) sum += gradients[j], --more;
    }
    const float z = logit_of<T>(call, map, i, column, lane);
    if (lane != 0) continue;
    to.column[i * all + k] = column;
    to.logit[i * all + k] = z;
    to.gradient[i * all + k] = sum * factor * map.slope * cap_slope(map, z);
  }
}

// Returns dz of a column that is not the target, times the map's slope.
__device__ float dz_of_column(const LinearCall& call, const MapFactors& map, const RowGradient& g,
                              int64_t column, float z) {
  float log_p = (z - g.reference) - g.log_sum;
  log_p = log_p > 0 ? 0.0f : log_p;
  const float p = exp_any(log_p), information = fmaxf(log_p, least_exponent) + g.entropy_value;
  const auto c = [&] { return class_weight(call.in, column); };
  return dz_of<Fused>(g.probability * p, g.smoothing != 0, g.smoothing, c, g.entropy != 0,
                      g.entropy * p, information) *
         cap_slope(map, z);
}

// A panel's elements of chosen columns are written anew, so that dz is rounded once.
template <class E>
__global__ void __launch_bounds__(threads)
    add_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Chunk chunk,
               ChosenGradients from, const RowGradient* gradients, const float* target_gradient,
               Panel panel) {
  const int row = blockIdx.x;
  if (row >= valid_rows(chunk)) return;
  const int64_t token = chunk.first + row;
  const int64_t at = chunk.tokens.row[token] * from.columns, target = chunk.tokens.target[token];
  const RowGradient g = gradients[row];
  const MapFactors map = map_of_token(call.map, chunk.tokens, token);
  for (int64_t k = threadIdx.x; k < from.columns; k += blockDim.x) {
    const int64_t column = from.column[at + k], j = column - panel.first;
    if (column < 0 || j < 0 || j >= panel.columns) continue;
    const float dz = column == target ? target_gradient[row]
                                      : dz_of_column(call, map, g, column, from.logit[at + k]);
    *panel_element<E>(panel, row, j) = from_f32<E>(dz + from.gradient[at + k]);
  }
}

}  // namespace

void chosen_logits(const LinearCall& call, const Tokens& tokens, Stream* stream) {
  const dim3 blocks(static_cast<unsigned>(call.ids.shape[0]),
                    blocks_for(call.ids.shape[1], columns_per_block));
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("chosen_logits", logits_kernel<decltype(element)>, blocks, threads, call,
                   tokens);
  });
}

void chosen_sizes(const LinearCall& call, float* sizes, Stream* stream) {
  stream->launch("chosen_sizes", sizes_kernel, blocks_for(call.ids.shape[0], warps), threads, call,
                 sizes);
}

void merge_chosen(const LinearCall& call, const Tokens& tokens, const ChosenGradients& to,
                  Stream* stream) {
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("merge_chosen", merge_kernel<decltype(element)>,
                   static_cast<unsigned>(call.ids.shape[0]), threads, call, tokens, to);
  });
}

void add_chosen(const LinearWork& work, const Panel& panel) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  if (chunk.rows == 0 || panel.columns == 0) return;
  const int block = m.chosen.columns <= 32 ? 32 : m.chosen.columns <= 128 ? 64 : threads;
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("add_chosen", add_kernel<decltype(element)>, static_cast<unsigned>(chunk.rows),
                   block, call, chunk, m.chosen, m.gradients, m.target_gradient, panel);
  });
}

}  // namespace logitless::cuda
