// SPDX-License-Identifier: Apache-2.0
// Both heads' states of each row, from the sums that an engine computed with the logits.
#include "src/cuda/divergence/kernels.h"
#include "src/cuda/divergence/state.cuh"
#include "src/cuda/linear/chunk.cuh"
#include "src/cuda/linear/units.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 128;

// lse = reference + log_sum; inverse = exp(-log_sum).
struct HeadState {
  float reference, log_sum, inverse;
};

// A warp sums a row's segments, in the same order for every row.
__device__ PartialSum sum_of(const Partials& p, int64_t row) {
  const float* const maximum = p.maximum + row * p.segments;
  const float* const sums = p.sum + row * p.segments;
  const int lane = threadIdx.x % 32, segments = static_cast<int>(p.segments);
  PartialSum all;
#pragma unroll 8
  for (int j = lane; j < segments; j += 32) all.reference = fmaxf(all.reference, maximum[j]);
  all.reference = warp_max(all.reference);
  const float from = all.reference == -infinity() ? 0.0f : all.reference;
#pragma unroll 8
  for (int j = lane; j < segments; j += 32) {
    all.sum += sums[j] * exp2_fast((maximum[j] - from) * log2e);
  }
  all.sum = warp_sum(all.sum);
  return all;
}

// The reference is lse rounded to f32, so that a likely column has a small exponent. If the maximum
// is 2^20 or more in size, the reference is the maximum.
__device__ HeadState state_of(const PartialSum& row) {
  const double log_sum = log(static_cast<double>(row.sum));
  HeadState s{row.reference, static_cast<float>(log_sum), 0};
  if (fabsf(row.reference) < 0x1p20f) {
    const double lse = row.reference + log_sum;
    s.reference = static_cast<float>(lse);
    s.log_sum = static_cast<float>(lse - s.reference);
  }
  s.inverse = static_cast<float>(exp(-static_cast<double>(s.log_sum)));
  return s;
}

__global__ void __launch_bounds__(threads)
    states_kernel(const __grid_constant__ Chunk chunk, const __grid_constant__ Partials student,
                  const __grid_constant__ Partials teacher, DivergenceState* states) {
  const int row = static_cast<int>(blockIdx.x * (threads / 32) + threadIdx.x / 32);
  if (row >= chunk.rows || !is_valid(chunk, row)) return;
  const PartialSum of_student = sum_of(student, row), of_teacher = sum_of(teacher, row);
  // Even lanes compute the student's state, odd ones the teacher's.
  const HeadState own = state_of(threadIdx.x % 2 == 0 ? of_student : of_teacher);
  const auto of_lane = [](float x, int lane) { return __shfl_sync(whole_warp, x, lane); };
  DivergenceState s{.reference = of_lane(own.reference, 0),
                    .log_sum = of_lane(own.log_sum, 0),
                    .teacher_reference = of_lane(own.reference, 1),
                    .teacher_log_sum = of_lane(own.log_sum, 1),
                    .inverse = of_lane(own.inverse, 0),
                    .teacher_inverse = of_lane(own.inverse, 1)};
  s.apart = apart_of(s);
  if (threadIdx.x % 32 == 0) states[chunk.first + row] = s;
}

}  // namespace

void divergence_states(const Chunk& chunk, const Partials& student, const Partials& teacher,
                       DivergenceState* states, Stream* stream) {
  stream->launch("divergence_states", states_kernel, blocks_for(chunk.rows, threads / 32), threads,
                 chunk, student, teacher, states);
}

}  // namespace logitless::cuda
