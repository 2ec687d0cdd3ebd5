// SPDX-License-Identifier: Apache-2.0
// dz of some columns of every row, with known row states; four columns per thread.
#include "src/cuda/divergence/kernels.h"
#include "src/cuda/divergence/row.cuh"
#include "src/rounding.h"

namespace logitless::cuda {
namespace {

constexpr int threads = 128;

template <DivergenceKind kKind, HeadMaps kMaps>
__global__ void __launch_bounds__(threads, 8)
    block_kernel(const __grid_constant__ DivergenceRows a) {
  const int row = static_cast<int>(blockIdx.x);
  const int j = static_cast<int>(blockIdx.y * threads + threadIdx.x) * 4;
  if (j >= (a.columns + 7) / 8 * 8) return;
  const int64_t k = a.chunk.first + row;
  if (row >= a.chunk.rows || !is_valid(a.chunk, row)) {
    const float zeros[4] = {};
    uint32_t check = 0;
    put_four(a.dz.dtype, zeros, dz_row(a, row), j, &check);
    return;
  }
  const int64_t i = a.chunk.tokens.row[k];
  const int from = row_of_logits(a, row);
  const HeadRow<kMaps> student(a, a.student, from, i), teacher(a, a.teacher, from, i);
  const DivergenceState state = a.states[k];
  float z[4], t[4];
  student.map_four(student.raw(j), j, z);
  teacher.map_four(teacher.raw(j), j, t);
  const ColumnTerms<kKind> c[4] = {
      {two_heads(state, z[0], t[0]), a.beta},
      {two_heads(state, z[1], t[1]), a.beta},
      {two_heads(state, z[2], t[2]), a.beta},
      {two_heads(state, z[3], t[3]), a.beta},
  };
  const DzRow dz = with_state(make_dz_row(a, row, student), state);
  uint32_t check = 0;
  put_dz(a, dz, student, j, z, c, state, &check);
}

}  // namespace

void divergence_block(const DivergenceRows& rows, DivergenceKind kind, int64_t launched,
                      Stream* stream) {
  const dim3 blocks(static_cast<unsigned>(launched),
                    blocks_for(round_up(rows.columns, 8), threads * 4));
  with_kind(kind, [&](auto kind_constant) {
    with_maps(rows, [&](auto maps) {
      stream->launch("divergence_block", block_kernel<kind_constant(), maps()>, blocks, threads,
                     rows);
    });
  });
}

}  // namespace logitless::cuda
