// SPDX-License-Identifier: Apache-2.0
// A row of both heads' logits is read up to three times:
//   1  m = max z and s = sum exp(z - m) of each head, per thread in one loop, then over threads
//   2  the divergence, the mean that dz subtracts, the statistics
//   3  dz; together with 2 for forward_kl, which subtracts no mean
// The first pass is left out if the states are known. On devices with clusters, the blocks of a
// cluster share a row: then so few rows are in flight that half of what a later pass reads is still
// in the L2 cache.
#include <cfloat>

#include "src/cuda/divergence/kernels.h"
#include "src/cuda/divergence/row.cuh"
#include "src/cuda/runtime/cluster.cuh"
#include "src/kept.h"

namespace logitless::cuda {
namespace {

constexpr int most_warps = pair_threads / 32, most_blocks = 8;
template <DivergenceKind kKind, bool kDz>
constexpr bool makes_dz_together = kDz && kKind == DivergenceKind::forward_kl;

// Lets the warps of a row, in one block or in a cluster, exchange kCount numbers once.
template <int kCount>
struct Exchange {
  uint64_t barrier;
  float inbox[most_blocks * most_warps][kCount];

  __device__ static int warps() { return static_cast<int>(blockDim.x) / 32; }
  // Called by one thread of each block before the cluster's barrier.
  __device__ void open(int blocks) {
    init_expecting(&barrier, blocks * warps() * kCount * static_cast<int>(sizeof(float)));
  }
  // Called by every thread with its warp's numbers. Calls use(numbers) with those of warps `lane`,
  // lane + 32 and so on.
  template <class F>
  __device__ void all(const float (&own)[kCount], RowShare share, F&& use) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int place = share.rank * warps() + static_cast<int>(threadIdx.x) / 32;
    if (share.blocks == 1) {
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) inbox[place][i] = own[i];
      }
      __syncthreads();
    } else {
      if (lane < share.blocks) {
        const uint32_t done = address_in_block(&barrier, lane);
        const uint32_t to = address_in_block(&inbox[place][0], lane);
#pragma unroll
        for (int i = 0; i < kCount; ++i) send(to + 4 * i, __float_as_uint(own[i]), done);
      }
      wait_for_bytes(&barrier);
    }
    for (int i = lane; i < share.blocks * warps(); i += 32) use(inbox[i]);
  }
};

// A thread's maximum, and its sum relative to the maximum.
struct RunningSum {
  float maximum = -FLT_MAX, sum = 0;  // finite, so that -infinity - maximum is no NaN

  // The maximum including these logits. fmaxf drops NaN, which the sum keeps.
  __device__ float most(const float (&z)[4]) const {
    return fmaxf(fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])), maximum);
  }
  __device__ void add(const float (&z)[4]) {
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) e[i] = exp2_fast((z[i] - maximum) * log2e);
    sum += (e[0] + e[1]) + (e[2] + e[3]);
  }
  __device__ void raise(float most) {
    sum *= exp2_fast((maximum - most) * log2e);
    maximum = most;
  }
  __device__ void join(float other_maximum, float other_sum) {
    const float most = fmaxf(maximum, other_maximum);
    sum = sum * exp_nonpositive(maximum - most) + other_sum * exp_nonpositive(other_maximum - most);
    maximum = most;
  }
  // Every lane gets the sum of all.
  __device__ void join_lanes() {
    const float most = warp_max(maximum);
    sum = warp_sum(sum * exp_nonpositive(maximum - most));
    maximum = most;
  }
};

// The sums over the columns of pass 2.
struct RowSums {
  static constexpr int count = 5;
  float value = 0, mean = 0, entropy = 0, teacher_entropy = 0, overlap = 0;
};

template <class F>
__device__ float sum_of_four(F&& f) {
  return (f(0) + f(1)) + (f(2) + f(3));
}

__device__ inline float information(float p, float z, float reference, float log_sum) {
  return p == 0 ? 0.0f : -p * log_of(z, reference, log_sum);
}

template <DivergenceKind kKind>
__device__ void add_columns(const DivergenceRows& a, const DivergenceState& s, const float (&z)[4],
                            const float (&t)[4], const ColumnTerms<kKind> (&c)[4], RowSums* sums) {
  if constexpr (kKind != DivergenceKind::forward_kl) {
    sums->mean += sum_of_four([&](int i) { return c[i].c.p * c[i].slope(); });
  }
  // Kept dz of reverse_kl is divided by a power of two that depends on the row's divergence.
  const bool divides = kKind == DivergenceKind::reverse_kl && a.dz.kept_rows != nullptr;
  if (!a.has_outputs && !divides) return;
  sums->value += sum_of_four([&](int i) { return fmaxf(c[i].value(), 0.0f); });
  if (!a.has_statistics) return;
  const DivergenceStatistics& out = a.statistics;
  if (present(out.entropy)) {
    sums->entropy +=
        sum_of_four([&](int i) { return information(c[i].c.p, z[i], s.reference, s.log_sum); });
  }
  if (present(out.teacher_entropy)) {
    sums->teacher_entropy += sum_of_four(
        [&](int i) { return information(c[i].c.q, t[i], s.teacher_reference, s.teacher_log_sum); });
  }
  if (present(out.acceptance)) {
    sums->overlap += sum_of_four([&](int i) { return fminf(c[i].c.p, c[i].c.q); });
  }
}

__device__ void put_of_shard(const DivergenceOfShard& shard, int64_t i, const DivergenceState& s,
                             const RowSums& sums, float target_logit, float guard) {
  put(shard.target_logit, i, target_logit);
  put(shard.divergence_sum, i, sums.value + guard);
  put(shard.slope_sum, i, (isfinite(sums.mean) ? sums.mean : nan_value()) + guard);
  if (shard.given) return;
  // The running maximum starts at a finite number and drops NaN; log_sum reveals both.
  const auto reference = [](float m, float log_sum) {
    const bool lost = log_sum == -infinity() || (log_sum != log_sum && m < infinity());
    return lost ? log_sum : m;
  };
  put(shard.states.row_reference, i, reference(s.reference, s.log_sum));
  put(shard.states.row_log_sum, i, s.log_sum);
  put(shard.states.teacher_row_reference, i, reference(s.teacher_reference, s.teacher_log_sum));
  put(shard.states.teacher_row_log_sum, i, s.teacher_log_sum);
}

// Called by one thread per token to write its outputs.
__device__ void put_outputs(const DivergenceRows& a, int64_t k, const DivergenceState& s,
                            const RowSums& sums, float target_logit) {
  const Tokens& tokens = a.chunk.tokens;
  const int64_t i = tokens.row[k];
  // NaN if either head's row has no state.
  const float guard = 0 * s.apart;
  const float logprob = (target_logit - s.reference) - s.log_sum;
  if (a.losses != nullptr || present(a.loss)) {
    float loss = sums.value;
    if (a.label_weight != 0) {
      loss = fmaf(a.label_weight, (s.reference - target_logit) + s.log_sum, loss);
    }
    *loss_of(a.losses, a.loss, i) = tokens.token_weight[k] * (loss + guard);
  }
  put(a.statistics.entropy, i, sums.entropy + 0 * s.log_sum);
  put(a.statistics.teacher_entropy, i, sums.teacher_entropy + 0 * s.teacher_log_sum);
  put(a.statistics.acceptance, i, sums.overlap + guard);
  put(a.statistics.logprob, i, logprob > 0 ? 0.0f : logprob);
  put_of_shard(a.shard, i, s, sums, target_logit, guard);
}

// The power of two that divides a row of dz kept in f16. |dz| of reverse_kl is at most 2 (D + 2),
// where D is the row's divergence; the label's term adds its weight.
__device__ float divisor_of_row(const DivergenceRows& a, float divergence) {
  if (a.dz.dtype != DType::f16) return 1;
  const float of_most = (2 * (divergence + 2) + a.label_weight) * (a.dz.lift / 32768);
  return of_most > 1 && isfinite(of_most) ? ldexpf(1, ilogbf(of_most) + 1) : 1;
}

__device__ void put_kept_row(const DivergenceRows& a, int64_t k, const DivergenceState& s,
                             float divisor, bool is_finite) {
  auto* row = reinterpret_cast<KeptRow*>(a.dz.kept_rows) + a.chunk.tokens.row[k];
  *row = {.reference = s.reference,
          .log_sum = s.log_sum,
          .target_logit = 0,
          .rest = divisor,
          .overwritten = is_finite ? 0.0f : 1.0f,
          .layout = a.dz.layout,
          .columns = static_cast<float>(a.columns),
          .unused = 0};
}

struct RowExchange {
  Exchange<4> states;
  Exchange<RowSums::count> sums;
  Exchange<1> finite;
};

template <HeadMaps kMaps>
__device__ DivergenceState state_of(const RowPair<kMaps>& row, int columns, Exchange<4>* exchange) {
  RunningSum student, teacher;
  row.template for_columns<false>(columns, [&](int, const float(&z)[4], const float(&t)[4]) {
    const float most = student.most(z), most_of_teacher = teacher.most(t);
    if (most > student.maximum || most_of_teacher > teacher.maximum) {  // rare after a few columns
      student.raise(most);
      teacher.raise(most_of_teacher);
    }
    student.add(z);
    teacher.add(t);
  });
  student.join_lanes();
  teacher.join_lanes();
  const float own[4] = {student.maximum, student.sum, teacher.maximum, teacher.sum};
  student = {}, teacher = {};
  exchange->all(own, row.share, [&](const float(&x)[4]) {
    student.join(x[0], x[1]);
    teacher.join(x[2], x[3]);
  });
  student.join_lanes();
  teacher.join_lanes();
  // A row of -inf has a sum of 0 and a log_sum of -inf, which makes what depends on it NaN.
  DivergenceState s{.reference = student.maximum,
                    .log_sum = logf(student.sum),
                    .teacher_reference = teacher.maximum,
                    .teacher_log_sum = logf(teacher.sum),
                    .inverse = 1 / student.sum,
                    .teacher_inverse = 1 / teacher.sum};
  s.apart = apart_of(s);
  return s;
}

__device__ RowSums row_total(const RowSums& own, RowShare share,
                             Exchange<RowSums::count>* exchange) {
  float x[RowSums::count] = {own.value, own.mean, own.entropy, own.teacher_entropy, own.overlap};
#pragma unroll
  for (float& sum : x) sum = warp_sum(sum);
  float all[RowSums::count] = {};
  exchange->all(x, share, [&](const float(&warp)[RowSums::count]) {
#pragma unroll
    for (int n = 0; n < RowSums::count; ++n) all[n] += warp[n];
  });
#pragma unroll
  for (float& sum : all) sum = warp_sum(sum);
  return {all[0], all[1], all[2], all[3], all[4]};
}

// Marks a row whose dz is kept; a row that is not finite becomes zeros.
__device__ void finish_kept_row(const DivergenceRows& a, int64_t k, const DivergenceState& s,
                                const DzRow& dz, float divisor, bool finite, RowShare share,
                                Exchange<1>* exchange) {
  const float own[1] = {__all_sync(whole_warp, finite) ? 0.0f : 1.0f};
  float others = 0;
  exchange->all(own, share, [&](const float(&x)[1]) { others += x[0]; });
  finite = __all_sync(whole_warp, others == 0);
  if (!finite) clear_dz(a, dz.to, share);
  if (threadIdx.x == 0 && share.rank == 0) put_kept_row(a, k, s, divisor, finite);
}

template <DivergenceKind kKind, HeadMaps kMaps, bool kDz>
__global__ void __launch_bounds__(pair_threads, kMaps == HeadMaps::any ? 2 : 4)
    rows_kernel(const __grid_constant__ DivergenceRows a) {
  constexpr bool kTogether = makes_dz_together<kKind, kDz>;
  __shared__ RowExchange exchange;
  __shared__ DzRow dz_of_row;
  __shared__ float target_logit;
  const int row = static_cast<int>(blockIdx.x) / a.blocks;
  const RowShare share{static_cast<int>(blockIdx.x) % a.blocks, a.blocks};
  const int64_t k = a.chunk.first + row;
  if (row >= a.chunk.rows || !is_valid(a.chunk, row)) {
    if constexpr (kDz) clear_dz(a, dz_row(a, row), share);
    return;
  }
  if (share.blocks > 1) {
    if (threadIdx.x == 0) {
      exchange.states.open(share.blocks);
      exchange.sums.open(share.blocks);
      exchange.finite.open(share.blocks);
    }
    cluster_arrive();
  }
  const RowPair<kMaps> pair(a, row, a.chunk.tokens.row[k], share);
  if (kDz && threadIdx.x == 32) dz_of_row = make_dz_row(a, row, pair.student);
  // Read before dz overwrites the logits.
  if (threadIdx.x == 0) {
    const int64_t target = a.has_target ? a.chunk.tokens.target[k] : -1;  // -1: in another shard
    target_logit = target >= 0 ? pair.student(target) : a.has_target ? -infinity() : 0.0f;
  }
  if (share.blocks > 1) cluster_wait();
  __syncthreads();  // before dz_of_row and target_logit are read
  DivergenceState state = a.shard.given  ? given_state(a, k)
                          : a.has_states ? a.states[k]
                                         : state_of(pair, a.columns, &exchange.states);
  DzRow dz = with_state(dz_of_row, state);
  RowSums own;
  uint32_t check = 0;
  const int dz_end = whole_eights(a.dz.columns);
  const auto terms_of = [&](const float(&z)[4], const float(&t)[4], auto&& use) {
    const ColumnTerms<kKind> c[4] = {
        {two_heads(state, z[0], t[0]), a.beta},
        {two_heads(state, z[1], t[1]), a.beta},
        {two_heads(state, z[2], t[2]), a.beta},
        {two_heads(state, z[3], t[3]), a.beta},
    };
    use(c);
  };
  if (kTogether || a.sums_columns) {
    const int end = kTogether ? whole_eights(a.columns) : a.columns;
    pair.template for_columns<true>(end, [&](int j, const float(&z)[4], const float(&t)[4]) {
      terms_of(z, t, [&](const auto& c) {
        add_columns(a, state, z, t, c, &own);
        if constexpr (kTogether) {
          if (j < dz_end) put_dz(a, dz, pair.student, j, z, c, state, &check);
        }
      });
    });
  }
  const RowSums sums = row_total(own, share, &exchange.sums);
  // If the mean is infinite, every column's gradient is NaN.
  if (!a.shard.given) state.mean = isfinite(sums.mean) ? sums.mean : nan_value();
  if (threadIdx.x == 0 && share.rank == 0) {
    if (a.has_outputs) put_outputs(a, k, state, sums, target_logit);
    if (a.states != nullptr) a.states[k] = state;
  }
  if constexpr (!kDz) return;
  float divisor = 1;
  if constexpr (kKind == DivergenceKind::reverse_kl) {
    if (a.dz.kept_rows != nullptr) divisor = divisor_of_row(a, sums.value);
    dz.factor *= 1 / divisor;
  }
  if constexpr (!kTogether) {
    pair.template for_columns<false>(dz_end, [&](int j, const float(&z)[4], const float(&t)[4]) {
      terms_of(z, t, [&](const auto& c) { put_dz(a, dz, pair.student, j, z, c, state, &check); });
    });
  }
  if (a.dz.kept_rows == nullptr) return;
  const bool finite = is_finite(a.dz.dtype, check);
  finish_kept_row(a, k, state, dz, divisor, finite, share, &exchange.finite);
}

int threads_of(int32_t columns) { return columns >= 8192 ? pair_threads : 128; }
// In a cluster each thread has at least eight columns.
int blocks_of(int32_t columns) {
  int blocks = 1;
  while (blocks < most_blocks && columns / (2 * blocks) >= 8 * pair_threads) blocks *= 2;
  return blocks;
}

__global__ void given_states_kernel(const __grid_constant__ DivergenceRows a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= a.chunk.rows || !is_valid(a.chunk, static_cast<int>(row))) return;
  const int64_t k = a.chunk.first + row;
  a.states[k] = given_state(a, k);
}

}  // namespace

void divergence_given_states(const DivergenceRows& rows, Stream* stream) {
  constexpr int threads = 128;
  stream->launch("divergence_given_states", given_states_kernel,
                 blocks_for(rows.chunk.rows, threads), threads, rows);
}

void divergence_rows(DivergenceRows rows, DivergenceKind kind, int64_t launched,
                     const DeviceInfo& device, Stream* stream) {
  const int threads = threads_of(rows.columns);
  const DivergenceStatistics& out = rows.statistics;
  rows.has_statistics = out.entropy || out.teacher_entropy || out.acceptance;
  const auto launch = [&](auto kernel, bool copies) {
    const bool clusters =
        is_compiled_for_hopper(reinterpret_cast<const void*>(kernel), device, stream);
    rows.blocks = clusters ? blocks_of(rows.columns) : 1;
    const LaunchShape shape{.blocks = static_cast<unsigned>(launched * rows.blocks),
                            .threads = threads,
                            .shared_bytes = copies ? row_ring_bytes : 0,
                            .cluster = rows.blocks};
    stream->launch_config("divergence_rows", kernel, shape, rows);
  };
  with_kind(kind, [&](auto kind_constant) {
    with_maps(rows, [&](auto maps) {
      constexpr auto kKind = kind_constant();
      constexpr HeadMaps kMaps = maps();
      const bool makes_dz = rows.dz.data != nullptr;
      launch(makes_dz ? rows_kernel<kKind, kMaps, true> : rows_kernel<kKind, kMaps, false>,
             kMaps != HeadMaps::any);
    });
  });
}

}  // namespace logitless::cuda
