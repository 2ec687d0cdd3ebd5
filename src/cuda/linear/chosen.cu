// SPDX-License-Identifier: Apache-2.0
// Chosen columns of each token (docs/semantics.md). Forward writes their logits, each by one dot
// product; Backward adds their gradients to panels of dz before products read the panels.
#include <algorithm>
#include <cfloat>
#include <climits>

#include "src/cuda/linear/dot.cuh"
#include "src/cuda/linear/lists.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int columns_per_block = 64;  // of one token, at a time

__device__ bool counts(const TokenInput& in, int64_t i) {
  return kind_of_target(in, target_of(in, i)) == TokenKind::counts;
}
__device__ MapFactors map_of(const LinearCall& call, const Tokens& t, int64_t i) {
  return t.map == nullptr ? call.map : with_token(call.map, t.map[i]);
}

// Invalid lists leave some places without a token.
__global__ void __launch_bounds__(threads) fill_kernel(TensorView logits, int64_t places) {
  const int64_t p = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (p < places) *address<float>(logits, p) = nan_value();
}

// A block handles some of a token's columns; its warps compute one logit each in turn.
template <class T>
__global__ void __launch_bounds__(threads, 4)
    logits_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Tokens tokens,
                  const __grid_constant__ IdLists lists) {
  const int64_t i = blockIdx.x, all = lists.count[i];
  const int lane = threadIdx.x % 32;
  const bool reads = counts(call.in, i);
  const MapFactors map = map_of(call, tokens, i);
  for (int64_t first = int64_t{blockIdx.y} * columns_per_block; first < all;
       first += int64_t{gridDim.y} * columns_per_block) {
    const int64_t end = min(all, first + columns_per_block);
    for (int64_t k = first + threadIdx.x / 32; k < end; k += warps) {
      float z = -infinity();
      if (reads) {
        const ChosenColumn chosen = column_of(call.in, id_of(lists, i, k));
        if (chosen.column >= 0) {
          z = logit_of<T>(call.input, call.weight, call.bias, map, i, chosen.column, lane);
        }
        if (chosen.is_outside) {
          z = nan_value();
          if (lane == 0) set_fault(call.in.fault, 1);
        }
      }
      if (lane == 0) *element_of<float>(lists, call.logits_at, i, k) = z;
    }
  }
}

// A warp sums the magnitudes of a token's gradients, including those of other shards' columns. A
// gradient that is not finite adds almost nothing, but makes the token active.
__global__ void __launch_bounds__(threads)
    sizes_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ IdLists lists,
                 float* sizes) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  if (i >= call.input.shape[0]) return;
  float sum = 0;
  if (counts(call.in, i)) {
    for (int64_t k = threadIdx.x % 32; k < lists.count[i]; k += 32) {
      const ChosenColumn chosen = column_of(call.in, id_of(lists, i, k));
      if (chosen.is_given) {
        const float size = fabsf(*element_of<const float>(lists, call.grad_logits_at, i, k));
        sum = fminf(sum + (isfinite(size) ? size : FLT_MIN), FLT_MAX);
      }
      if (chosen.is_outside) set_fault(call.in.fault, 1);
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sizes[i] = sum;
}

// A block adds up a token's gradients of equal columns, in the order of k, at the first of them,
// and computes its logit. The other places are marked by inverting the column: negative, but still
// readable. Gradients are in the form of a panel's elements: without the common factor, times the
// map's slope.
constexpr int no_column = INT_MIN;
__device__ int unmarked(int column) { return column < 0 ? ~column : column; }
template <class T>
__global__ void __launch_bounds__(threads, 4)
    merge_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Tokens tokens,
                 const __grid_constant__ IdLists lists, ChosenGradients to) {
  const int64_t i = blockIdx.x;
  const int all = lists.count[i];
  const TokenKind kind = kind_of_token(call.in, tokens.inactive, i, target_of(call.in, i));
  if (kind != TokenKind::counts) return;  // add_kernel skips this token
  int32_t* const columns = to.column + lists.first[i];
  const auto gradient = [&](int k) {
    return *element_of<const float>(lists, call.grad_logits_at, i, k);
  };
  for (int k = threadIdx.x; k < all; k += threads) {
    const int column = column_of(call.in, id_of(lists, i, k)).column;
    columns[k] = column < 0 ? no_column : column;
  }
  __syncthreads();
  const MapFactors map = map_of(call, tokens, i);
  const float factor = tokens.scalars->inv_gradient_scale;
  for (int k = threadIdx.x / 32; k < all; k += warps) {
    // A lane examines every 32nd place; then every lane adds all gradients, in the order of k.
    const int column = columns[k], lane = threadIdx.x % 32;
    if (column < 0) continue;  // no column: only this warp marks place k
    int before = 0, more = 0;
    for (int j = lane; j < all; j += 32) {
      if (unmarked(columns[j]) == column) before += j < k ? 1 : 0, more += j > k ? 1 : 0;
    }
    before = warp_sum(before), more = warp_sum(more);
    if (before > 0) {
      if (lane == 0) columns[k] = ~column;
      continue;
    }
    float sum = gradient(k);
    for (int j = k + 1; j < all && more > 0; ++j) {
      if (unmarked(columns[j]) == column) sum += gradient(j), --more;
    }
    const float z = logit_of<T>(call.input, call.weight, call.bias, map, i, column, lane);
    if (lane != 0) continue;
    to.logit[lists.first[i] + k] = z;
    to.gradient[lists.first[i] + k] = sum * factor * map.slope * cap_slope(map, z);
  }
}

// dz of a column that is not the target, times the map's slope.
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

// A panel's elements at chosen columns are computed again, so that dz is rounded once.
template <class E>
__global__ void __launch_bounds__(threads)
    add_kernel(const __grid_constant__ LinearCall call, const __grid_constant__ Chunk chunk,
               const __grid_constant__ IdLists lists, ChosenGradients from,
               const RowGradient* gradients, const float* target_gradient, Panel panel) {
  const int row = blockIdx.x;
  if (row >= valid_rows(chunk)) return;
  const int64_t token = chunk.first + row, i = chunk.tokens.row[token];
  const int64_t first = lists.first[i], count = lists.count[i];
  const int64_t target = chunk.tokens.target[token];
  const RowGradient g = gradients[row];
  const MapFactors map = map_of_token(call.map, chunk.tokens, token);
  for (int64_t k = threadIdx.x; k < count; k += blockDim.x) {
    const int64_t column = from.column[first + k], j = column - panel.first;
    if (column < 0 || j < 0 || j >= panel.columns) continue;
    const float dz = column == target ? target_gradient[row]
                                      : dz_of_column(call, map, g, column, from.logit[first + k]);
    *panel_element<E>(panel, row, j) = from_f32<E>(dz + from.gradient[first + k]);
  }
}

// The mean number of chosen columns per token.
int64_t mean_columns(const LinearMemory& m, int64_t tokens) {
  return divide_up(m.lists.places, std::max<int64_t>(tokens, 1));
}

}  // namespace

void chosen_logits(const LinearCall& call, const LinearMemory& m, Stream* stream) {
  if (call.id_offsets) {
    stream->launch("fill_logits", fill_kernel, blocks_for(m.lists.places, threads), threads,
                   call.logits_at, m.lists.places);
  }
  const int64_t tokens = call.shape.tokens, columns = mean_columns(m, tokens);
  const dim3 blocks(static_cast<unsigned>(tokens),
                    std::min(blocks_for(columns, columns_per_block), 65535u));
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("chosen_logits", logits_kernel<decltype(element)>, blocks, threads, call,
                   m.tokens, m.lists);
  });
}

void chosen_sizes(const LinearCall& call, const LinearMemory& m, Stream* stream) {
  stream->launch("chosen_sizes", sizes_kernel, blocks_for(call.shape.tokens, warps), threads, call,
                 m.lists, m.chosen_sizes);
}

void merge_chosen(const LinearCall& call, const LinearMemory& m, Stream* stream) {
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("merge_chosen", merge_kernel<decltype(element)>,
                   static_cast<unsigned>(call.shape.tokens), threads, call, m.tokens, m.lists,
                   m.chosen);
  });
}

void add_chosen(const LinearWork& work, const Panel& panel) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  if (chunk.rows == 0 || panel.columns == 0) return;
  const int64_t columns = mean_columns(m, call.shape.tokens);
  const int block = columns <= 32 ? 32 : columns <= 128 ? 64 : threads;
  with_dtype(call.shape.dtype, [&](auto element) {
    stream->launch("add_chosen", add_kernel<decltype(element)>, static_cast<unsigned>(chunk.rows),
                   block, call, chunk, m.lists, m.chosen, m.gradients, m.target_gradient, panel);
  });
}

}  // namespace logitless::cuda
