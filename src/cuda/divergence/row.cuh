// SPDX-License-Identifier: Apache-2.0
// A row of both heads' logits, four columns a thread at a time, and dz of these.
#pragma once

#include "src/cuda/divergence/arrays.h"
#include "src/cuda/linear/chunk.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/tokens/tokens.cuh"
#include "src/row/divergence.h"

namespace logitless::cuda {

// One head's row. With kPlain its logits were made here and are z themselves.
template <bool kPlain>
struct HeadRow {
  const HeadLogits& head;
  const float* made;  // it is null where the caller gives the logits
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
    if constexpr (!kPlain) {
      if (head.maps != nullptr) map = with_token(map, head.maps[token]);
    }
  }

  __device__ float mapped(float raw, int64_t column) const {
    if constexpr (kPlain) return raw;
    if (present(head.bias)) raw += load(head.bias, column);
    return map_raw(map, raw);
  }
  // Returns z of one column.
  __device__ float operator()(int j) const {
    return mapped(made != nullptr ? made[j] : load(head.given, token, first + j), first + j);
  }
  // Loads raw logits of columns j to j + 3; behind the last column they may be anything.
  __device__ float4 raw(int j) const {
    if (kPlain || made != nullptr) return *reinterpret_cast<const float4*>(made + j);
    float x[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (j + i < columns) x[i] = load(head.given, token, first + j + i);
    }
    return {x[0], x[1], x[2], x[3]};
  }
  // Makes z of these, -inf behind the last column.
  __device__ void map_four(const float4& raw, int j, float (&z)[4]) const {
    const float x[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = j + i < columns ? mapped(x[i], first + j + i) : -infinity();
  }
};

template <bool kPlain>
struct RowPair {
  HeadRow<kPlain> student, teacher;
  int end;  // products read columns up to a multiple of 8, which become 0

  __device__ RowPair(const DivergenceRows& a, int row, int64_t token)
      : student(a, a.student, row, token),
        teacher(a, a.teacher, row, token),
        end((a.columns + 7) / 8 * 8) {}

  // Calls use(j, z, z') with this thread's columns, from the first or, with kBack, from the last
  // ones, which the pass before has left in the cache. The next loads are in flight meanwhile.
  template <bool kBack, class F>
  __device__ void for_columns(F&& use) const {
    const int step = static_cast<int>(blockDim.x) * 4, own = static_cast<int>(threadIdx.x) * 4;
    const int tiles = (end + step - 1) / step;
    float4 z_raw{}, t_raw{};
    const auto column = [&](int n) { return (kBack ? tiles - 1 - n : n) * step + own; };
    const auto fetch = [&](int n) {
      const int j = column(n);
      if (n >= tiles || j >= end) return;
      z_raw = student.raw(j), t_raw = teacher.raw(j);
    };
    fetch(0);
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      const int j = column(n);
      const float4 z_now = z_raw, t_now = t_raw;
      fetch(n + 1);
      if (j >= end) continue;
      float z[4], t[4];
      student.map_four(z_now, j, z);
      teacher.map_four(t_now, j, t);
      use(j, z, t);
    }
  }
};

// log p of a logit; two products may round it to more than 0.
__device__ inline float log_of(float z, float reference, float log_sum) {
  const float x = (z - reference) - log_sum;
  return x > 0 ? 0.0f : x;
}
__device__ inline TwoHeads two_heads_of(const DivergenceState& s, float z, float t) {
  const float log_p = log_of(z, s.reference, s.log_sum);
  const float log_q = log_of(t, s.teacher_reference, s.teacher_log_sum);
  return two_heads(z, t, log_p, log_q, exp_nonpositive(log_p), exp_nonpositive(log_q), s.apart);
}

// What all columns of a row's dz have in common.
struct DzRow {
  char* to;      // it is null where the row has none
  float factor;  // the upstream gradient, the token's weight and the slope; or the lift
  int target;    // the target's column in the launch, or none of it
};

// Returns where the row of dz of a chunk's row lies; rows that are kept lie by token.
__device__ inline char* dz_row(const DivergenceRows& a, int row) {
  int64_t at = row;
  if (a.dz.kept_rows != nullptr) {
    const int64_t k = a.chunk.first + row;
    at = k < a.chunk.tokens.total ? a.chunk.tokens.row[k] : k;
  }
  const int64_t element = a.dz.dtype == DType::f32 ? 4 : 2;
  return a.dz.data + at * a.dz.pitch * element;
}

template <bool kPlain>
__device__ DzRow make_dz_row(const DivergenceRows& a, int row, const HeadRow<kPlain>& student) {
  const Tokens& tokens = a.chunk.tokens;
  const int64_t k = a.chunk.first + row;
  DzRow made{dz_row(a, row), a.dz.lift, -1};
  if (a.has_target) made.target = static_cast<int>(tokens.target[k] - a.first);
  if (a.dz.kept_rows == nullptr) {
    made.factor = token_gradient(a.in, tokens, k, RowState{}).probability;
    if constexpr (!kPlain) made.factor *= student.map.slope;
  }
  return made;
}

// Stores four elements; it returns whether all of them are finite.
template <class T>
__device__ bool store_four_of(const float (&x)[4], T* to) {
  alignas(16) T packed[4];
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed[i] = from_f32<T>(x[i]);
    finite = finite && isfinite(to_f32(packed[i]));
  }
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(packed);
  } else {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(packed);
  }
  return finite;
}
__device__ inline bool put_four(DType dtype, const float (&x)[4], char* row, int j) {
  bool finite = true;
  with_dtype_on_device(dtype, [&](auto element) {
    using T = decltype(element);
    finite = store_four_of<T>(x, reinterpret_cast<T*>(row) + j);
  });
  return finite;
}
// A block writes zeros to a row of dz.
__device__ inline void clear_dz(const DivergenceRows& a, char* row, int end) {
  const float zeros[4] = {};
  for (int j = threadIdx.x * 4; j < end; j += blockDim.x * 4) put_four(a.dz.dtype, zeros, row, j);
}

// Makes and stores dz of four columns; at the target p - 1 comes of expm1. It returns whether what
// is stored is finite.
template <DivergenceKind kKind, bool kPlain>
__device__ bool put_dz(const DivergenceRows& a, const DzRow& row, const HeadRow<kPlain>& student,
                       int j, const float (&z)[4], const TwoHeads (&c)[4], float mean) {
  float draw[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x = Divergence<kKind>::dz(c[i], a.beta, mean);
    if (a.label_weight != 0) {
      x = fmaf(a.label_weight, j + i == row.target ? expm1f(c[i].log_p) : c[i].p, x);
    }
    if constexpr (!kPlain) x *= cap_slope(student.map, z[i]);
    draw[i] = j + i < a.columns ? x * row.factor : 0.0f;
  }
  return put_four(a.dz.dtype, draw, row.to, j);
}

}  // namespace logitless::cuda
