// SPDX-License-Identifier: Apache-2.0
// A block takes a row of both heads' logits, which it reads two or three times:
//   1  m = max z and s = sum exp(z - m) of each head, a thread's own as it goes, then over threads
//   2  the divergence, the mean that dz subtracts, the statistics
//   3  dz; together with 2 for forward_kl, which subtracts no mean
#include "src/cuda/divergence/kernels.h"
#include "src/cuda/divergence/row.cuh"
#include "src/kept.h"

namespace logitless::cuda {
namespace {

constexpr int most_threads = 256;
// So many blocks share a multiprocessor; mixtures and other maps of logits take more registers, as
// does dz of the pass that sums.
template <DivergenceKind kKind, bool kPlain, bool kTogether>
constexpr int blocks_of() {
  if (!kPlain) return 2;
  const bool mixes = kKind == DivergenceKind::jsd || kKind == DivergenceKind::skew_kl;
  return mixes || kTogether ? 3 : 4;
}
template <DivergenceKind kKind, bool kDz>
constexpr bool makes_dz_together = kDz && kKind == DivergenceKind::forward_kl;

// A thread's maximum, and its sum relative to that.
struct RunningSum {
  float maximum = -infinity(), sum = 0;

  __device__ void add(const float (&z)[4]) {
    // fmaxf drops a NaN, which the sum keeps.
    const float most = fmaxf(fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])), maximum);
    if (most > maximum) {
      sum *= exp_nonpositive(maximum - most);
      maximum = most;
    }
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      e[i] = z[i] == -infinity() ? 0.0f : exp_nonpositive(z[i] - maximum);
    }
    sum += (e[0] + e[1]) + (e[2] + e[3]);
  }
  // A row of -inf becomes NaN here.
  __device__ void finish(float* reference, float* log_sum) const {
    *reference = block_max(maximum);
    *log_sum = logf(block_sum(sum * exp_nonpositive(maximum - *reference)));
  }
};

// What pass 2 sums over the columns.
struct RowSums {
  static constexpr int count = 5;
  float value = 0, mean = 0, entropy = 0, teacher_entropy = 0, overlap = 0;
};

template <class F>
__device__ float sum_of_four(F&& f) {
  return (f(0) + f(1)) + (f(2) + f(3));
}

template <DivergenceKind kKind>
__device__ void add_columns(const DivergenceRows& a, const TwoHeads (&c)[4], RowSums* sums) {
  using Own = Divergence<kKind>;
  if constexpr (kKind != DivergenceKind::forward_kl) {
    sums->mean += sum_of_four([&](int i) { return c[i].p * Own::slope(c[i], a.beta); });
  }
  if (!a.has_outputs) return;
  sums->value += sum_of_four([&](int i) { return Own::value(c[i], a.beta); });
  const DivergenceStatistics& out = a.statistics;
  if (present(out.entropy)) {
    sums->entropy -= sum_of_four([&](int i) { return c[i].p == 0 ? 0.0f : c[i].p * c[i].log_p; });
  }
  if (present(out.teacher_entropy)) {
    sums->teacher_entropy -=
        sum_of_four([&](int i) { return c[i].q == 0 ? 0.0f : c[i].q * c[i].log_q; });
  }
  if (present(out.acceptance)) {
    sums->overlap += sum_of_four([&](int i) { return c[i].p < c[i].q ? c[i].p : c[i].q; });
  }
}

// Sums each of them over the block.
__device__ RowSums block_total(const RowSums& own) {
  __shared__ float partial[RowSums::count][most_threads / 32];
  const float x[RowSums::count] = {own.value, own.mean, own.entropy, own.teacher_entropy,
                                   own.overlap};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  float all[RowSums::count];
#pragma unroll
  for (int n = 0; n < RowSums::count; ++n) {
    const float sum = warp_sum(x[n]);
    if (lane == 0) partial[n][warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < RowSums::count; ++n) all[n] = warp_sum(lane < warps ? partial[n][lane] : 0);
  return {all[0], all[1], all[2], all[3], all[4]};
}

// One thread writes what the caller asks of a token.
__device__ void put_outputs(const DivergenceRows& a, int64_t k, const DivergenceState& s,
                            const RowSums& sums, float target_logit) {
  const Tokens& tokens = a.chunk.tokens;
  const int64_t i = tokens.row[k];
  // NaN where either head's row has no state.
  const float guard = 0 * s.apart;
  const float logprob = (target_logit - s.reference) - s.log_sum;
  if (a.losses != nullptr || present(a.loss)) {
    float loss = sums.value;
    if (a.label_weight != 0) {
      loss = fmaf(a.label_weight, (s.reference - target_logit) + s.log_sum, loss);
    }
    *loss_of(a.losses, a.loss, i) = tokens.token_weight[k] * (loss + guard);
  }
  put(a.statistics.entropy, i, sums.entropy);
  put(a.statistics.teacher_entropy, i, sums.teacher_entropy);
  put(a.statistics.acceptance, i, sums.overlap + guard);
  put(a.statistics.logprob, i, logprob > 0 ? 0.0f : logprob);
}

__device__ void put_kept_row(const DivergenceRows& a, int64_t k, const DivergenceState& s,
                             bool is_finite) {
  auto* row = reinterpret_cast<KeptRow*>(a.dz.kept_rows) + a.chunk.tokens.row[k];
  *row = {.reference = s.reference,
          .log_sum = s.log_sum,
          .target_logit = 0,
          .rest = 0,
          .overwritten = is_finite ? 0.0f : 1.0f,
          .layout = a.dz.layout,
          .columns = static_cast<float>(a.columns),
          .unused = 0};
}

template <bool kPlain>
__device__ DivergenceState state_of(const RowPair<kPlain>& row) {
  RunningSum student, teacher;
  row.template for_columns<false>([&](int, const float(&z)[4], const float(&t)[4]) {
    student.add(z);
    teacher.add(t);
  });
  DivergenceState s{};
  student.finish(&s.reference, &s.log_sum);
  teacher.finish(&s.teacher_reference, &s.teacher_log_sum);
  s.apart = (s.reference - s.teacher_reference) + (s.log_sum - s.teacher_log_sum);
  return s;
}

template <DivergenceKind kKind, bool kPlain, bool kDz>
__global__ void __launch_bounds__(most_threads,
                                  blocks_of<kKind, kPlain, makes_dz_together<kKind, kDz>>())
    rows_kernel(const __grid_constant__ DivergenceRows a) {
  constexpr bool kTogether = makes_dz_together<kKind, kDz>;
  const int row = static_cast<int>(blockIdx.x);
  const int64_t k = a.chunk.first + row;
  if (row >= a.chunk.rows || !is_valid(a.chunk, row)) {
    if constexpr (kDz) clear_dz(a, dz_row(a, row), (a.columns + 7) / 8 * 8);
    return;
  }
  const RowPair<kPlain> pair(a, row, a.chunk.tokens.row[k]);
  // It is read before dz takes the place of the logits.
  const float target_logit = a.has_target ? pair.student(a.chunk.tokens.target[k]) : 0.0f;
  DivergenceState state = state_of(pair);
  DzRow dz{};
  if constexpr (kDz) dz = make_dz_row(a, row, pair.student);
  RowSums own;
  bool finite = true;
  const auto heads_of = [&](const float(&z)[4], const float(&t)[4], TwoHeads(&c)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = two_heads_of(state, z[i], t[i]);
  };
  pair.template for_columns<true>([&](int j, const float(&z)[4], const float(&t)[4]) {
    TwoHeads c[4];
    heads_of(z, t, c);
    add_columns<kKind>(a, c, &own);
    if constexpr (kTogether) {
      finite = put_dz<kKind, kPlain>(a, dz, pair.student, j, z, c, 0) && finite;
    }
  });
  const RowSums sums = block_total(own);
  // An infinite mean leaves no column a gradient.
  state.mean = isfinite(sums.mean) ? sums.mean : nan_value();
  if (threadIdx.x == 0) {
    if (a.has_outputs) put_outputs(a, k, state, sums, target_logit);
    if (a.states != nullptr) a.states[k] = state;
  }
  if constexpr (!kDz) return;
  if constexpr (!kTogether) {
    pair.template for_columns<false>([&](int j, const float(&z)[4], const float(&t)[4]) {
      TwoHeads c[4];
      heads_of(z, t, c);
      finite = put_dz<kKind, kPlain>(a, dz, pair.student, j, z, c, state.mean) && finite;
    });
  }
  if (a.dz.kept_rows == nullptr) return;
  finite = __syncthreads_and(finite) != 0;
  if (!finite) clear_dz(a, dz.to, pair.end);
  if (threadIdx.x == 0) put_kept_row(a, k, state, finite);
}

}  // namespace

void divergence_rows(const DivergenceRows& rows, DivergenceKind kind, int64_t launched,
                     Stream* stream) {
  const int threads = rows.columns >= 8192 ? most_threads : 128;
  with_kind(kind, [&](auto constant) {
    constexpr DivergenceKind kKind = constant();
    const bool plain = rows.student.plain() && rows.teacher.plain();
    const bool makes_dz = rows.dz.data != nullptr;
    const auto kernel =
        plain ? (makes_dz ? rows_kernel<kKind, true, true> : rows_kernel<kKind, true, false>)
              : (makes_dz ? rows_kernel<kKind, false, true> : rows_kernel<kKind, false, false>);
    stream->launch("divergence_rows", kernel, static_cast<unsigned>(launched), threads, rows);
  });
}

}  // namespace logitless::cuda
