// SPDX-License-Identifier: Apache-2.0
// A row of both heads' logits, four columns a thread at a time, and its dz.
#pragma once

#include <algorithm>

#include "src/cuda/divergence/arrays.h"
#include "src/cuda/divergence/column.cuh"
#include "src/cuda/divergence/state.cuh"
#include "src/cuda/linear/chunk.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/runtime/copies.cuh"
#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

// How both heads' logits become z. `none` and `scale` are only for computed logits.
enum class HeadMaps { none, scale, any };

// The row of computed logits that belongs to a chunk's row.
__device__ inline int row_of_logits(const DivergenceRows& a, int row) {
  return a.logit_rows == nullptr ? row : max(a.logit_rows[a.chunk.first + row], 0);
}

// A row of one head: its raw logits, computed or given, and their map to z.
template <HeadMaps kMaps>
struct HeadRow {
  static constexpr bool is_made = kMaps != HeadMaps::any;
  const HeadLogits& head;
  const float* made;  // null if the caller gives the logits
  int64_t token, first;
  int columns;
  MapFactors map;

  __device__ HeadRow(const DivergenceRows& a, const HeadLogits& logits, int row, int64_t i)
      : head(logits),
        made(logits.made == nullptr ? nullptr : logits.made + row * logits.pitch),
        token(i),
        first(a.first),
        columns(a.columns),
        map(logits.map) {
    if constexpr (kMaps != HeadMaps::none) {
      if (head.maps != nullptr) map = with_token(map, head.maps[token]);
    }
  }

  __device__ float mapped(float raw, int64_t column) const {
    if constexpr (kMaps == HeadMaps::none) return raw;
    if constexpr (kMaps == HeadMaps::scale) return raw * map.slope;
    if (present(head.bias)) raw += load(head.bias, column);
    return map_raw(map, raw);
  }
  // z of one column.
  __device__ float operator()(int j) const { return mapped(one(j), first + j); }
  // Loads raw logits of columns j to j + 3; those after the last column are arbitrary.
  __device__ float4 raw(int j) const {
    if (is_made || made != nullptr) return *reinterpret_cast<const float4*>(made + j);
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (j + i < columns) x[i] = one(j + i);
    }
    return {x[0], x[1], x[2], x[3]};
  }
  __device__ void map_four(const float4& raw, int j, float (&z)[4]) const {
    z[0] = raw.x, z[1] = raw.y, z[2] = raw.z, z[3] = raw.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (is_made || j + i < columns) z[i] = mapped(z[i], first + j + i);
    }
  }

 private:
  __device__ float one(int j) const {
    return is_made || made != nullptr ? made[j] : load(head.given, token, first + j);
  }
};

// Products read dz up to a multiple of 8 columns; columns after the last become 0.
__device__ inline int whole_eights(int columns) { return (columns + 7) / 8 * 8; }

// A block's share of a row: the block's rank in the cluster, and the number of blocks.
struct RowShare {
  int rank, blocks;
};

constexpr int pair_threads = 256;
// The depth of a thread's ring buffer in shared memory, in loads of four columns.
constexpr int row_steps = 4;
// The ring is [heads, row_steps, threads]; head_ring is one head's part.
constexpr int head_ring = row_steps * pair_threads;
constexpr size_t row_ring_bytes = 2 * head_ring * sizeof(float4);

template <HeadMaps kMaps>
struct RowPair {
  HeadRow<kMaps> student, teacher;
  RowShare share;

  __device__ RowPair(const DivergenceRows& a, int row, int64_t token, RowShare share)
      : student(a, a.student, row_of_logits(a, row), token),
        teacher(a, a.teacher, row_of_logits(a, row), token),
        share(share) {}

  // Calls use(j, z, z') for this thread's columns before `end`: in ascending order or, if kBack,
  // descending, because the pass before left the last columns in the cache.
  template <bool kBack, class F>
  __device__ void for_columns(int end, F&& use) const {
    const int threads = static_cast<int>(blockDim.x), all = threads * share.blocks * 4;
    const int own = (share.rank * threads + static_cast<int>(threadIdx.x)) * 4;
    int left = own < end ? (end - own + all - 1) / all : 0;
    const int step = kBack ? -all : all;
    int j = kBack ? own + (left - 1) * all : own;
    if constexpr (HeadRow<kMaps>::is_made) {
      copied(j, step, left, use);
    } else {
      for (; left > 0; --left, j += step) with_columns(j, student.raw(j), teacher.raw(j), use);
    }
  }

 private:
  template <class F>
  __device__ void with_columns(int j, const float4& z_raw, const float4& t_raw, F&& use) const {
    float z[4], t[4];
    student.map_four(z_raw, j, z);
    teacher.map_four(t_raw, j, t);
    if (j + 4 > student.columns) {  // -inf after the last column
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (j + i >= student.columns) z[i] = t[i] = -infinity();
      }
    }
    use(j, z, t);
  }
  template <class F>
  __device__ void copied(int j, int step, int left, F&& use) const {
    extern __shared__ float4 ring[];
    float4* const own = ring + threadIdx.x;
    const auto fetch = [&](float4* to, int steps) {
      if (left > steps) {
        copy_word(to, student.made + (j + steps * step));
        copy_word(to + head_ring, teacher.made + (j + steps * step));
      }
      copies_commit();
    };
#pragma unroll
    for (int slot = 0; slot < row_steps; ++slot) fetch(own + slot * pair_threads, slot);
    float4* at = own;
#pragma unroll 1
    for (; left > 0; --left, j += step) {
      copies_wait<row_steps - 1>();
      with_columns(j, at[0], at[head_ring], use);
      fetch(at, row_steps);  // `use` has finished with this slot
      at = at == own + head_ring - pair_threads ? own : at + pair_threads;
    }
    wait_for_copies();
  }
};

// x y in [0, 1], and 0 below 2^-126, which is treated like the 0 of a -inf logit. Clamped to 1: the
// state may come from logits that another product rounded differently, and the exponential of large
// logits may then overflow.
__device__ inline float probability(float x, float y) {
  float product;
  asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}
__device__ inline TwoHeads two_heads(const DivergenceState& s, float z, float t) {
  return {probability(exp2_fast((z - s.reference) * log2e), s.inverse),
          probability(exp2_fast((t - s.teacher_reference) * log2e), s.teacher_inverse),
          (z - t) - s.apart};
}
// The given state of a chunk's k-th token.
__device__ inline DivergenceState given_state(const DivergenceRows& a, int64_t k) {
  const DivergenceOfShard& shard = a.shard;
  const DivergenceStates& given = shard.states;
  const int64_t i = a.chunk.tokens.row[k];
  DivergenceState s{.reference = load(given.row_reference, i),
                    .log_sum = load(given.row_log_sum, i),
                    .teacher_reference = load(given.teacher_row_reference, i),
                    .teacher_log_sum = load(given.teacher_row_log_sum, i)};
  s.apart = apart_of(s);
  s.inverse = expf(-s.log_sum);
  s.teacher_inverse = expf(-s.teacher_log_sum);
  const float mean = present(shard.slope_mean) ? load(shard.slope_mean, i) : 0.0f;
  s.mean = isfinite(mean) ? mean : nan_value();
  if (a.logit_rows != nullptr && a.logit_rows[k] < 0) s.apart = nan_value();
  return s;
}
// log p of a logit, at most 0: two products may round the logit above lse.
__device__ inline float log_of(float z, float reference, float log_sum) {
  const float x = (z - reference) - log_sum;
  return x > 0 ? 0.0f : x;
}

// Values that all columns of a row's dz share.
struct DzRow {
  char* to;      // null: the row has no dz
  float factor;  // upstream gradient x token weight x slope; or the lift
  int target;    // relative to the launch's columns; may be outside
};

// Where the dz of a chunk's row is stored; kept rows are indexed by token.
__device__ inline char* dz_row(const DivergenceRows& a, int row) {
  int64_t at = row;
  if (a.dz.kept_rows != nullptr) {
    const int64_t k = a.chunk.first + row;
    at = k < a.chunk.tokens.total ? a.chunk.tokens.row[k] : k;
  }
  const int64_t element = a.dz.dtype == DType::f32 ? 4 : 2;
  return a.dz.data + at * a.dz.pitch * element;
}

template <HeadMaps kMaps>
__device__ DzRow make_dz_row(const DivergenceRows& a, int row, const HeadRow<kMaps>& student) {
  const Tokens& tokens = a.chunk.tokens;
  const int64_t k = a.chunk.first + row;
  DzRow made{dz_row(a, row), a.dz.lift, -1};
  if (a.has_target) made.target = static_cast<int>(tokens.target[k] - a.first);
  if (a.dz.kept_rows == nullptr) {
    made.factor = token_gradient(a.in, tokens, k, RowState{}).probability;
    if constexpr (kMaps != HeadMaps::none) made.factor *= student.map.slope;
  }
  return made;
}
// Sets dz to NaN if either head's row has no state.
__device__ inline DzRow with_state(DzRow row, const DivergenceState& state) {
  row.factor += 0 * state.apart;
  return row;
}

// Stores four elements. `check` becomes NaN, and stays so, if any stored element is not finite.
template <class T>
__device__ void store_four_of(const float (&x)[4], T* to, uint32_t* check) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    float sum = __uint_as_float(*check);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = fmaf(x[i], 0.0f, sum);
    *check = __float_as_uint(sum);
  } else {
    const uint2 packed{pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
    *reinterpret_cast<uint2*>(to) = packed;
    using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Two sum = reinterpret_cast<const Two&>(*check);
    const Two zero{T(0.0f), T(0.0f)};
    sum = __hfma2(reinterpret_cast<const Two&>(packed.x), zero, sum);
    sum = __hfma2(reinterpret_cast<const Two&>(packed.y), zero, sum);
    *check = reinterpret_cast<const uint32_t&>(sum);
  }
}
__device__ inline void put_four(DType dtype, const float (&x)[4], char* row, int j,
                                uint32_t* check) {
  with_dtype_on_device(dtype, [&](auto element) {
    using T = decltype(element);
    store_four_of<T>(x, reinterpret_cast<T*>(row) + j, check);
  });
}
__device__ inline bool is_finite(DType dtype, uint32_t check) {
  bool finite = true;
  with_dtype_on_device(dtype, [&](auto element) {
    using T = decltype(element);
    float x[2] = {};
    unpack<T>(check, x);
    finite = x[0] == x[0] && x[1] == x[1];
  });
  return finite;
}
__device__ inline void clear_dz(const DivergenceRows& a, char* row, RowShare share) {
  const float zeros[4] = {};
  uint32_t check = 0;
  const int threads = static_cast<int>(blockDim.x), end = whole_eights(a.dz.columns);
  int j = (share.rank * threads + static_cast<int>(threadIdx.x)) * 4;
  for (; j < end; j += threads * share.blocks * 4) put_four(a.dz.dtype, zeros, row, j, &check);
}

// Computes and stores dz of four columns; at the target p - 1 is computed by expm1.
template <DivergenceKind kKind, HeadMaps kMaps>
__device__ void put_dz(const DivergenceRows& a, const DzRow& row, const HeadRow<kMaps>& student,
                       int j, const float (&z)[4], const ColumnTerms<kKind> (&c)[4],
                       const DivergenceState& state, uint32_t* check) {
  float dz[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) dz[i] = dz_of(c[i], state.mean);
  if (a.label_weight != 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_target = j + i == row.target;
      const float p = is_target ? expm1f(log_of(z[i], state.reference, state.log_sum)) : c[i].c.p;
      dz[i] = fmaf(a.label_weight, p, dz[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kMaps == HeadMaps::any) dz[i] *= cap_slope(student.map, z[i]);
    dz[i] *= row.factor;
  }
  if (j + 4 > a.columns) {  // padding must be 0 even in a row of NaN
#pragma unroll
    for (int i = 0; i < 4; ++i) dz[i] = j + i < a.columns ? dz[i] : 0.0f;
  }
  put_four(a.dz.dtype, dz, row.to, j, check);
}

// Calls f(maps) with the cheapest HeadMaps that serves both heads, as a compile-time constant.
template <class F>
void with_maps(const DivergenceRows& rows, F&& f) {
  const auto of = [](const HeadLogits& head) {
    if (head.made == nullptr || head.bias || head.map.capped) return HeadMaps::any;
    return head.map.identity && head.maps == nullptr ? HeadMaps::none : HeadMaps::scale;
  };
  switch (std::max(of(rows.student), of(rows.teacher))) {
    case HeadMaps::none:
      return f(std::integral_constant<HeadMaps, HeadMaps::none>());
    case HeadMaps::scale:
      return f(std::integral_constant<HeadMaps, HeadMaps::scale>());
    case HeadMaps::any:
      return f(std::integral_constant<HeadMaps, HeadMaps::any>());
  }
}

}  // namespace logitless::cuda
