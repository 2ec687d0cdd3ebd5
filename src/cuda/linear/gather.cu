// SPDX-License-Identifier: Apache-2.0
// Prepares what the products read: the rows of input of tokens that count, compacted and padded to
// 16 bytes, and, from the same load, z of each token's target by a dot product; and a copy of the
// weight if a product cannot read its layout.
#include "src/cuda/linear/dot.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/runtime/early.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256;

template <class T>
__device__ void clear_row(const TensorView& view, int64_t row, int lane) {
  for (int64_t j = lane; j < view.shape[1]; j += 32) {
    *address<T>(view, row, j) = from_f32<T>(0.0f);
  }
}

struct GatherArguments {
  TensorView input, weight, bias, grad_input, anchor;
  MapFactors map;
  Chunk chunk;
  int64_t pitch;
  int64_t rows;  // includes padding rows after the chunk, which become 0
  bool clears;
  bool beside;  // may overlap the previous kernel; waits for it last
  // If every token counts, the products read the caller's rows and nothing is copied.
  bool reads_input;
  float* target_logit;
  float* slope;            // null if all tokens share one map
  int32_t* again;          // null if no gradient is requested
  int32_t* rows_finished;  // set to 0 here, at the start of a chunk
};

// z of row k's target; stores its slope. Not inlined: its registers would slow down every row.
__device__ __noinline__ float map_by_token(const GatherArguments& a, int64_t k, float raw) {
  const Tokens& tokens = a.chunk.tokens;
  const TokenMap& map = tokens.map[tokens.row[a.chunk.first + k]];
  a.slope[k] = map.slope;
  return map_raw(with_token(a.map, map), raw);
}

// One warp per row k of the compacted chunk. It copies the row's input to `to`, or writes zeros if
// the row is not valid; a null `to` means no copy. It also computes the target's logit,
//   z_t = map(input_k . weight_t + bias_t), summed in f32 in a fixed order.
// If another shard has the target, z_t is the row's anchor, or -inf if there is none.
template <class T>
__device__ void gather_row(const GatherArguments& a, T* to) {
  const int64_t k = int64_t{blockIdx.x} * (threads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (k == 0 && lane == 0) {
    *a.rows_finished = 0;
    if (a.again != nullptr) *a.again = 0;
  }
  if (k >= a.rows) return;
  constexpr int width = Pack<T>::width;
  const Tokens& tokens = a.chunk.tokens;
  const int64_t token = a.chunk.first + k;
  if (a.reads_input && tokens.scalars->valid == tokens.total) to = nullptr;
  if (to != nullptr) to += k * a.pitch;
  if (k >= a.chunk.rows || !is_valid(a.chunk, static_cast<int>(k))) {
    // finish_rows loads this element before it knows whether the row counts.
    if (lane == 0 && k < a.chunk.rows) a.target_logit[k] = 0;
    for (int64_t j = lane * width; to != nullptr && j < a.pitch; j += 32 * width) {
      *reinterpret_cast<uint4*>(to + j) = {};
    }
    if (!a.clears || k >= a.chunk.rows) return;
    with_dtype_on_device(a.grad_input.dtype, [&](auto element) {
      clear_row<decltype(element)>(a.grad_input, tokens.row[token], lane);
    });
    return;
  }
  const int64_t target = tokens.target[token], hidden = a.weight.shape[1];
  const RowReader<T> input(a.input, tokens.row[token], hidden);
  const RowReader<T> weight(a.weight, target < 0 ? 0 : target, hidden);
  float sum;
  if (target < 0 && to == nullptr) {
    sum = 0;  // the target is another shard's, and there is nothing to copy
  } else if (input.aligned && weight.aligned && hidden % width == 0) {
    sum = dot_packs<T>(reinterpret_cast<const uint4*>(input.data),
                       reinterpret_cast<const uint4*>(weight.data),
                       static_cast<int>(hidden / width), reinterpret_cast<uint4*>(to), lane);
  } else {
    sum = dot_elements(input, weight, a.pitch, to, lane);
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  if (target >= 0 && present(a.bias)) sum += load(a.bias, target);
  sum = tokens.map == nullptr ? map_raw(a.map, sum) : map_by_token(a, k, sum);
  if (target < 0) sum = present(a.anchor) ? load(a.anchor, tokens.row[token]) : -infinity();
  a.target_logit[k] = sum;
}

template <class T>
__global__ void __launch_bounds__(threads, 3)
    gather(const __grid_constant__ GatherArguments a, T* to) {
  if (!a.beside) wait_for_kernel_before();
  gather_row(a, to);
  if (a.beside) wait_for_kernel_before();
}

// Each warp copies a row of the weight, from row `first` on, or writes zeros after the last one.
template <class T>
__global__ void __launch_bounds__(threads)
    copy_rows(TensorView from, int64_t first, int64_t rows, int64_t pitch, T* to) {
  const int64_t row = int64_t{blockIdx.x} * (threads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  const bool exists = first + row < from.shape[0];
  const RowReader<T> reader(from, exists ? first + row : 0, exists ? from.shape[1] : 0);
  for (int64_t j = lane * Pack<T>::width; j < pitch; j += 32 * Pack<T>::width) {
    *reinterpret_cast<uint4*>(to + row * pitch + j) = reader(j);
  }
}

void copy(const LinearWork& work, const char* name, int64_t first, int64_t rows, char* to) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    stream->launch(name, copy_rows<T>, blocks_for(rows, threads / 32), threads, call.weight, first,
                   rows, call.shape.hidden_pitch(), reinterpret_cast<T*>(to));
  });
}

__global__ void __launch_bounds__(256)
    column_terms_kernel(LinearCall call, int64_t padding, float* bias, float* class_weights) {
  const int64_t j = int64_t{blockIdx.x} * 256 + threadIdx.x;
  const bool exists = j < call.weight.shape[0];
  if (j >= call.weight.shape[0] + padding) return;
  if (bias != nullptr) bias[j] = exists ? load(call.bias, j) : 0.0f;
  if (class_weights != nullptr) class_weights[j] = exists ? class_weight(call.in, j) : 0.0f;
}

}  // namespace

void column_terms(const LinearWork& work, int64_t padding) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  stream->launch("column_terms", column_terms_kernel, blocks_for(call.shape.vocab + padding, 256),
                 256, call, padding, m.bias_row, m.class_weights);
}

void copy_weight(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  copy(work, "copy_weight", 0, call.shape.vocab, m.weight);
}

void copy_weight_tail(const LinearWork& work) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  copy(work, "copy_weight_tail", call.shape.vocab / 8 * 8, 8, m.weight_tail);
}

void gather_input(const LinearWork& work, bool clears, bool beside) {
  const auto& [call, plan, m, device, stream, chunk] = work;
  const int64_t rows = chunk.rows + plan.extra_rows;
  const GatherArguments arguments{.input = call.input,
                                  .weight = call.weight,
                                  .bias = call.bias,
                                  .grad_input = call.grad_input,
                                  .anchor = call.anchor,
                                  .map = call.map,
                                  .chunk = chunk,
                                  .pitch = call.shape.hidden_pitch(),
                                  .rows = rows,
                                  .clears = clears,
                                  .beside = beside,
                                  .reads_input = call.shape.kernels.reads_input,
                                  .target_logit = m.target_logit,
                                  .slope = m.slope,
                                  .again = m.again,
                                  .rows_finished = m.rows_finished};
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    const LaunchShape shape{
        .blocks = blocks_for(rows, threads / 32), .threads = threads, .early = call.launches_early};
    stream->launch_config("gather_input", gather<T>, shape, arguments,
                          scales_rows(call.shape, plan) ? nullptr : reinterpret_cast<T*>(m.input));
  });
}

}  // namespace logitless::cuda
