// SPDX-License-Identifier: Apache-2.0
// What the products read: the valid tokens' rows of input, compacted and padded to 16 bytes; the
// weight, where its own layout does not serve; and z of each token's target by one dot product.
#include "src/cuda/linear.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 128;

// One row to `to` [pitch]: its elements, then zeros.
template <class T>
__device__ void copy_row(const TensorView& from, int64_t row, int64_t pitch, T* to) {
  const int64_t count = from.shape[1];
  constexpr int64_t width = 16 / sizeof(T);
  const T* source = address<const T>(from, row);
  const bool aligned = from.stride[1] == 1 && reinterpret_cast<uintptr_t>(source) % 16 == 0;
  int64_t done = 0;
  if (aligned) {
    done = count / width * width;
    for (int64_t j = threadIdx.x * width; j < done; j += threads * width) {
      *reinterpret_cast<uint4*>(to + j) = *reinterpret_cast<const uint4*>(source + j);
    }
  }
  for (int64_t j = done + threadIdx.x; j < pitch; j += threads) {
    to[j] = j < count ? source[j * from.stride[1]] : from_f32<T>(0.0f);
  }
}

// Block k: row k of the compacted chunk; rows that are not valid are zeros.
template <class T>
__global__ void __launch_bounds__(threads)
    gather(TensorView input, Chunk chunk, int64_t pitch, T* to) {
  const int64_t k = blockIdx.x;
  to += k * pitch;
  if (k < valid_rows(chunk)) {
    copy_row<T>(input, chunk.tokens.row[chunk.first + k], pitch, to);
  } else {
    for (int64_t j = threadIdx.x; j < pitch; j += threads) to[j] = from_f32<T>(0.0f);
  }
}

// Block r: row first + r; behind the last one zeros.
template <class T>
__global__ void __launch_bounds__(threads)
    copy_rows(TensorView from, int64_t first, int64_t pitch, T* to) {
  const int64_t row = first + blockIdx.x;
  to += blockIdx.x * pitch;
  if (row < from.shape[0]) {
    copy_row<T>(from, row, pitch, to);
  } else {
    for (int64_t j = threadIdx.x; j < pitch; j += threads) to[j] = from_f32<T>(0.0f);
  }
}

// A warp a token: input_k . weight_t in f32, lanes and then the tree over them in fixed order.
template <class T>
__global__ void __launch_bounds__(256)
    dot_target(LinearCall call, Chunk chunk, const T* input, int64_t pitch, float* target_logit) {
  const int k = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (k >= valid_rows(chunk)) return;
  const int64_t target = chunk.tokens.target[chunk.first + k];
  if (target < 0) {
    if (lane == 0) target_logit[k] = -infinity();
    return;
  }
  const T* x = input + k * pitch;
  float sum = 0;
  for (int64_t d = lane; d < call.weight.shape[1]; d += 32) {
    sum = fmaf(to_f32(x[d]), to_f32(*address<const T>(call.weight, target, d)), sum);
  }
  sum = warp_sum(sum);
  if (present(call.bias)) sum += load(call.bias, target);
  if (lane == 0) target_logit[k] = map_raw(call.map, sum);
}

__global__ void constants_kernel(float* constants) {
  constants[threadIdx.x] = threadIdx.x == 1 ? 1.0f : 0.0f;
}

__global__ void __launch_bounds__(256)
    column_terms_kernel(LinearCall call, float* bias, float* class_weights) {
  const int64_t j = int64_t{blockIdx.x} * 256 + threadIdx.x;
  const bool exists = j < call.weight.shape[0];
  if (j >= call.weight.shape[0] + column_padding) return;
  if (bias != nullptr) bias[j] = exists ? load(call.bias, j) : 0.0f;
  if (class_weights != nullptr) class_weights[j] = exists ? class_weight(call.in, j) : 0.0f;
}

}  // namespace

void column_terms(const LinearCall& call, const LinearMemory& m, Stream* stream) {
  if (m.bias_row == nullptr && m.class_weights == nullptr) return;
  stream->launch("column_terms", column_terms_kernel,
                 blocks_for(call.shape.vocab + column_padding, 256), 256, call, m.bias_row,
                 m.class_weights);
}

void write_constants(const LinearMemory& m, Stream* stream) {
  stream->launch("write_constants", constants_kernel, 1, 64, m.constants);
}

void copy_weight(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                 Stream* stream) {
  if (!call.shape.copies_weight) return;
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    stream->launch("copy_weight", copy_rows<T>, static_cast<unsigned>(call.shape.vocab), threads,
                   call.weight, 0, plan.hidden_pitch, reinterpret_cast<T*>(m.weight));
  });
}

void copy_weight_tail(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                      Stream* stream) {
  if (m.weight_tail == nullptr) return;
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    stream->launch("copy_weight_tail", copy_rows<T>, 8, threads, call.weight,
                   call.shape.vocab / 8 * 8, plan.hidden_pitch,
                   reinterpret_cast<T*>(m.weight_tail));
  });
}

void gather_input(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                  const Chunk& chunk, Stream* stream) {
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t behind = call.shape.fused ? 0 : extra_rows;
    stream->launch("gather_input", gather<T>, static_cast<unsigned>(chunk.rows + behind), threads,
                   call.input, chunk, plan.hidden_pitch, reinterpret_cast<T*>(m.input));
  });
}

void target_logits(const LinearCall& call, const LinearPlan& plan, const LinearMemory& m,
                   const Chunk& chunk, Stream* stream) {
  with_dtype(call.shape.dtype, [&](auto element) {
    using T = decltype(element);
    stream->launch("target_logits", dot_target<T>, blocks_for(chunk.rows, 8), 256, call, chunk,
                   reinterpret_cast<const T*>(m.input), plan.hidden_pitch, m.target_logit);
  });
}

}  // namespace logitless::cuda
