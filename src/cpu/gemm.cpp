// SPDX-License-Identifier: Apache-2.0
// Packing and products for every instruction set, from one source.
#include "src/cpu/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "src/cpu/row_kernels.h"
#include "src/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/cpu/gemm.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#include "src/cpu/gemm_tile-inl.h"
#include "src/cpu/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu {
namespace HWY_NAMESPACE {

bool has_arithmetic(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::f32:
      return true;
    case Arithmetic::bf16_dot:
      return HWY_NATIVE_DOT_BF16;
    case Arithmetic::amx:
      return (HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX10_2) && amx_available();
  }
  return false;
}

// Panel sizes and arithmetic of this target. `forced` is an Arithmetic for bf16, or -1.
Engine engine_of(DType dtype, int forced) {
  Arithmetic arithmetic = Arithmetic::f32;
  if (dtype == DType::bf16) {
    if (LOGITLESS_FAST_BF16_DOT) arithmetic = Arithmetic::bf16_dot;
    if (has_arithmetic(Arithmetic::amx)) arithmetic = Arithmetic::amx;
    if (forced >= 0) arithmetic = static_cast<Arithmetic>(forced);
  }
  const int64_t columns = tile_vectors * static_cast<int64_t>(hn::Lanes(df));
  switch (arithmetic) {
    case Arithmetic::amx:
      return {arithmetic, 32, 32, 32, 2};
    case Arithmetic::bf16_dot:
      return {arithmetic, tile_rows, columns, 2, 2};
    case Arithmetic::f32:
      break;
  }
  return {Arithmetic::f32, tile_rows, columns, 1, 4};
}

void multiply_panels(const Engine& engine, const Product& p) {
  const int64_t lane_bytes = 4;
  const int64_t lanes = p.k * engine.element / lane_bytes;  // the depth in 32-bit lanes
  for (int64_t j = 0; j < p.b_panels; ++j) {
    const char* b = static_cast<const char*>(p.b) + j * p.b_panel_stride;
    for (int64_t k = 0; k < lanes; k += lane_depth) {
      const int64_t steps = std::min(lane_depth, lanes - k);
      const char* b_block = b + k * engine.b_columns * lane_bytes;
      for (int64_t i = 0; i < p.a_panels; ++i) {
        const char* a =
            static_cast<const char*>(p.a) + i * p.a_panel_stride + k * engine.a_rows * lane_bytes;
        float* c = p.c + i * engine.a_rows * p.c_stride + j * engine.b_columns;
        const Onto onto = k > 0 && p.onto != Onto::sum ? Onto::chain : p.onto;
        multiply_tile(engine.arithmetic, a, b_block, steps, c, p.c_stride, onto);
      }
    }
  }
}

// With few A panels the product is bound by reading B's rows, so they are not packed: 16 rows are
// transposed a few lanes at a time and multiplied while the next ones arrive (docs/kernels/cpu.md).
// One panel is fastest with 16 lanes at a time, several panels with 32.
constexpr int64_t most_unpacked_panels = 4, turned_rows = 16, turned_lanes = 32;
constexpr int64_t fetched_ahead = 64;  // in lanes

bool multiply_rows_unpacked(const Engine& engine, const Source& source, int64_t row0, int64_t rows,
                            int64_t columns, const Product& p) {
  if constexpr (transpose_rows_at_once != turned_rows) return false;
  const int64_t per_lane = 4 / engine.element, lanes = p.k / per_lane;
  const RowReader reader(engine, source);
  const bool aligned = reader.lane_aligned(0, 0) && source.row_stride % per_lane == 0;
  if (engine.arithmetic == Arithmetic::amx || p.a_panels > most_unpacked_panels || !reader.direct ||
      !aligned || source.row_index != nullptr || rows % engine.b_columns != 0 || columns != p.k) {
    return false;
  }
  const int64_t step = p.a_panels == 1 ? turned_lanes / 2 : turned_lanes;
  alignas(64) uint32_t turned[turned_lanes * turned_rows];
  const uint32_t* from[turned_rows];
  for (int64_t j = 0; j < rows; j += turned_rows) {
    for (int64_t r = 0; r < turned_rows; ++r) {
      from[r] = reinterpret_cast<const uint32_t*>(reader.at(row0 + j + r, 0));
    }
    for (int64_t k = 0; k < lanes; k += step) {
      const int64_t count = std::min(step, lanes - k);
      for (const uint32_t* row : from) {
        for (int64_t i = 0; i < count; i += 16) hwy::Prefetch(row + fetched_ahead + i);
      }
      transpose(from, turned_rows, count, turned_rows, turned);
      for (int64_t i = 0; i < p.a_panels; ++i) {
        const char* a =
            static_cast<const char*>(p.a) + i * p.a_panel_stride + k * engine.a_rows * 4;
        multiply_vector(engine.arithmetic, a, turned, count,
                        p.c + i * engine.a_rows * p.c_stride + j, p.c_stride, k > 0);
      }
      for (const uint32_t*& row : from) row += count;
    }
  }
  return true;
}

// With a row stride of at least this, `to` is taken for a weight's gradient, larger than a cache:
// whole vectors are stored without fetching their lines first.
constexpr int64_t streamed_stride = 512;

void add_scaled_rows(const float* from, int64_t from_stride, float scale, int64_t rows,
                     int64_t columns, bool overwrite, float* to, int64_t to_stride) {
  const int64_t n = hn::Lanes(df);
  const auto factor = hn::Set(df, scale);
  const int64_t bytes = n * 4;
  if (to_stride >= streamed_stride && overwrite && columns % n == 0 &&
      reinterpret_cast<uintptr_t>(to) % bytes == 0 && to_stride * 4 % bytes == 0) {
    for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
      for (int64_t j = 0; j < columns; j += n) {
        hn::Stream(hn::Mul(factor, hn::LoadU(df, from + j)), df, to + j);
      }
    }
    hwy::FlushStream();
    return;
  }
  for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
    // Prefetched in software: hardware does not follow short runs in a large matrix.
    for (int64_t i = 0; i < columns && r + 8 < rows; i += 16) hwy::Prefetch(to + 8 * to_stride + i);
    int64_t j = 0;
    for (; j + n <= columns; j += n) {
      const auto old = overwrite ? hn::Zero(df) : hn::LoadU(df, to + j);
      hn::StoreU(hn::MulAdd(factor, hn::LoadU(df, from + j), old), df, to + j);
    }
    if (j == columns) continue;
    const size_t count = columns - j;
    const auto old = overwrite ? hn::Zero(df) : hn::LoadN(df, to + j, count);
    hn::StoreN(hn::MulAdd(factor, hn::LoadN(df, from + j, count), old), df, to + j, count);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace logitless::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace logitless::cpu {

HWY_EXPORT(engine_of);
HWY_EXPORT(has_arithmetic);
HWY_EXPORT(multiply_panels);
HWY_EXPORT(multiply_rows_unpacked);
HWY_EXPORT(add_scaled_rows);
HWY_EXPORT(pack_along_columns);
HWY_EXPORT(pack_along_rows);
HWY_EXPORT(pack_gradient_rows);

namespace {
std::atomic<int> forced_arithmetic{-1};
}

Engine choose_engine(DType dtype) {
  return HWY_DYNAMIC_DISPATCH(engine_of)(dtype, forced_arithmetic.load());
}

bool force_bf16_arithmetic(const Arithmetic* arithmetic) {
  if (arithmetic != nullptr && !HWY_DYNAMIC_DISPATCH(has_arithmetic)(*arithmetic)) return false;
  forced_arithmetic = arithmetic != nullptr ? static_cast<int>(*arithmetic) : -1;
  return true;
}

const char* name_of(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::f32:
      return "f32 FMA";
    case Arithmetic::bf16_dot:
      return "bf16 dot";
    case Arithmetic::amx:
      return "AMX bf16";
  }
  return "?";
}

void pack_a_along_columns(const Engine& engine, const Source& source, int64_t row0, int64_t rows,
                          int64_t column0, int64_t columns, void* panels) {
  HWY_DYNAMIC_DISPATCH(pack_along_columns)
  (engine, source, row0, rows, column0, columns, engine.a_rows,
   engine.arithmetic == Arithmetic::amx, panels);
}

void pack_b_along_columns(const Engine& engine, const Source& source, int64_t row0, int64_t rows,
                          int64_t column0, int64_t columns, void* panels) {
  HWY_DYNAMIC_DISPATCH(pack_along_columns)
  (engine, source, row0, rows, column0, columns, engine.b_columns, false, panels);
}

void pack_b_along_rows(const Engine& engine, const Source& source, int64_t row0, int64_t rows,
                       int64_t column0, int64_t columns, void* panels) {
  HWY_DYNAMIC_DISPATCH(pack_along_rows)(engine, source, row0, rows, column0, columns, panels);
}

void pack_gradient(const Engine& engine, const float* rows, int64_t first, int64_t count,
                   int64_t tokens, void* along_vocab, void* along_tokens) {
  HWY_DYNAMIC_DISPATCH(pack_gradient_rows)(engine, rows, first, count, tokens, along_vocab,
                                           along_tokens);
}

void add_scaled(const float* from, int64_t from_stride, float scale, int64_t rows, int64_t columns,
                bool overwrite, float* to, int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(add_scaled_rows)(from, from_stride, scale, rows, columns, overwrite, to,
                                        to_stride);
}

void multiply(const Engine& engine, const Product& product) {
  if (engine.arithmetic == Arithmetic::amx) return multiply_amx(product);
  HWY_DYNAMIC_DISPATCH(multiply_panels)(engine, product);
}

bool multiply_unpacked(const Engine& engine, const Source& source, int64_t row0, int64_t rows,
                       int64_t columns, const Product& product) {
  return HWY_DYNAMIC_DISPATCH(multiply_rows_unpacked)(engine, source, row0, rows, columns, product);
}

}  // namespace logitless::cpu
#endif
