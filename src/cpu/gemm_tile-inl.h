// SPDX-License-Identifier: Apache-2.0
// The register tile: tile_rows x tile_vectors vectors of C, with one chain of multiply-adds along k
// per element. The A panel [k][tile_rows] is broadcast, the B panel [k][tile_vectors * N] loaded,
// both as 32-bit lanes. With 32 vector registers it is 8 x 2: 16 chains cover a latency of 4 at two
// a cycle, and 8 divides every token chunk. With 16 registers it is 4 x 3: 12 chains, 3 of B and 1
// of A. The macros are for sizeless vectors (SVE), which cannot be elements of arrays.

#if defined(LOGITLESS_GEMM_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_GEMM_TILE_INL_H_
#undef LOGITLESS_GEMM_TILE_INL_H_
#else
#define LOGITLESS_GEMM_TILE_INL_H_
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "src/cpu/gemm.h"

// Intel's dot of bf16 pairs issues every other cycle: half the rate of two FMAs on widened inputs
// (122 against 240 GFLOP/s a core measured on Granite Rapids), which is why AVX3_SPR widens where
// AMX is absent. Zen 4 and 5 run it at twice the FMA's.
#undef LOGITLESS_FAST_BF16_DOT
#if HWY_NATIVE_DOT_BF16 && HWY_TARGET != HWY_AVX3_SPR && HWY_TARGET != HWY_AVX10_2
#define LOGITLESS_FAST_BF16_DOT 1
#else
#define LOGITLESS_FAST_BF16_DOT 0
#endif

#undef LOGITLESS_TILE_ROWS
#undef LOGITLESS_TILE_2
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3) || HWY_ARCH_ARM_A64 || HWY_ARCH_RISCV
#define LOGITLESS_TILE_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define LOGITLESS_TILE_2 1
#else
#define LOGITLESS_TILE_ROWS(X) X(0) X(1) X(2) X(3)
#define LOGITLESS_TILE_2 0
#endif

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that vocab_tile is a multiple of every engine's panels.
using DF = hn::CappedTag<float, 16>;
constexpr DF df;

#if LOGITLESS_TILE_2
constexpr int64_t tile_rows = 8, tile_vectors = 2;
#else
constexpr int64_t tile_rows = 4, tile_vectors = 3;
#endif
// A panel of B with this depth stays in L1 while all A panels pass: 256 x 32 lanes is 32 KiB.
constexpr int64_t lane_depth = 256;

// A streams from L2 and is prefetched 32 steps ahead: 222 to 232 of 240 GFLOP/s a core (Granite
// Rapids). Tiles of 12 x 2 reach 234 and of 8 x 3 232, but 12 does not divide the chunk, and 48
// columns do not divide D = 1024.
constexpr int64_t prefetch_steps = 32;

struct MultiplyF32 {
  using V = hn::Vec<DF>;
  static HWY_INLINE V load(const void* p) { return hn::LoadU(df, static_cast<const float*>(p)); }
  static HWY_INLINE V broadcast(const void* p, int r) {
    return hn::Set(df, static_cast<const float*>(p)[r]);
  }
  template <class A>
  static HWY_INLINE hn::Vec<DF> add(A a, A b, hn::Vec<DF> c) {
    return hn::MulAdd(a, b, c);
  }
};

#if HWY_NATIVE_DOT_BF16
struct MultiplyBf16 {
  static HWY_INLINE auto load(const void* p) {
    const hn::Repartition<uint32_t, DF> du;
    const hn::Repartition<hwy::bfloat16_t, DF> db;
    return hn::BitCast(db, hn::LoadU(du, static_cast<const uint32_t*>(p)));
  }
  static HWY_INLINE auto broadcast(const void* p, int r) {
    const hn::Repartition<uint32_t, DF> du;
    const hn::Repartition<hwy::bfloat16_t, DF> db;
    return hn::BitCast(db, hn::Set(du, static_cast<const uint32_t*>(p)[r]));
  }
  template <class A>
  static HWY_INLINE hn::Vec<DF> add(A a, A b, hn::Vec<DF> c) {
    auto unused = hn::Zero(df);  // a native dot adds everything to the first sum
    return hn::ReorderWidenMulAccumulate(df, a, b, c, unused);
  }
};
#endif

// The steps of multiply_tile_with for row r of its registers.
#if LOGITLESS_TILE_2
#define LOGITLESS_DECLARE(r) auto c##r##0 = hn::Zero(df), c##r##1 = hn::Zero(df);
#define LOGITLESS_LOAD(r)                    \
  c##r##0 = hn::LoadU(df, c + r * c_stride); \
  c##r##1 = hn::LoadU(df, c + r * c_stride + n);
#define LOGITLESS_STEP(r)              \
  {                                    \
    const auto x = M::broadcast(a, r); \
    c##r##0 = M::add(x, b0, c##r##0);  \
    c##r##1 = M::add(x, b1, c##r##1);  \
  }
#define LOGITLESS_ADD(r)                                       \
  c##r##0 = hn::Add(hn::LoadU(df, c + r * c_stride), c##r##0); \
  c##r##1 = hn::Add(hn::LoadU(df, c + r * c_stride + n), c##r##1);
#define LOGITLESS_STORE(r)                   \
  hn::StoreU(c##r##0, df, c + r * c_stride); \
  hn::StoreU(c##r##1, df, c + r * c_stride + n);
#else
#define LOGITLESS_DECLARE(r) \
  auto c##r##0 = hn::Zero(df), c##r##1 = hn::Zero(df), c##r##2 = hn::Zero(df);
#define LOGITLESS_LOAD(r)                        \
  c##r##0 = hn::LoadU(df, c + r * c_stride);     \
  c##r##1 = hn::LoadU(df, c + r * c_stride + n); \
  c##r##2 = hn::LoadU(df, c + r * c_stride + 2 * n);
#define LOGITLESS_STEP(r)              \
  {                                    \
    const auto x = M::broadcast(a, r); \
    c##r##0 = M::add(x, b0, c##r##0);  \
    c##r##1 = M::add(x, b1, c##r##1);  \
    c##r##2 = M::add(x, b2, c##r##2);  \
  }
#define LOGITLESS_ADD(r)                                           \
  c##r##0 = hn::Add(hn::LoadU(df, c + r * c_stride), c##r##0);     \
  c##r##1 = hn::Add(hn::LoadU(df, c + r * c_stride + n), c##r##1); \
  c##r##2 = hn::Add(hn::LoadU(df, c + r * c_stride + 2 * n), c##r##2);
#define LOGITLESS_STORE(r)                       \
  hn::StoreU(c##r##0, df, c + r * c_stride);     \
  hn::StoreU(c##r##1, df, c + r * c_stride + n); \
  hn::StoreU(c##r##2, df, c + r * c_stride + 2 * n);
#endif

template <class M>
HWY_NOINLINE void multiply_tile_with(const void* a_panel, const void* b_panel, int64_t k,
                                     float* HWY_RESTRICT c, int64_t c_stride, Onto onto) {
  const int64_t n = hn::Lanes(df);
  const char* HWY_RESTRICT a = static_cast<const char*>(a_panel);
  const char* HWY_RESTRICT b = static_cast<const char*>(b_panel);
  LOGITLESS_TILE_ROWS(LOGITLESS_DECLARE)
  if (onto == Onto::chain) {
    LOGITLESS_TILE_ROWS(LOGITLESS_LOAD)
  }
  if (onto != Onto::nothing) {
    // Prefetches the next tile, which may be in L3.
    for (int64_t r = tile_rows; r < 2 * tile_rows; ++r) {
      hwy::Prefetch(c + r * c_stride);
      hwy::Prefetch(c + r * c_stride + n);
    }
  }
  for (int64_t i = 0; i < k; ++i) {
    const auto b0 = M::load(b);
    const auto b1 = M::load(b + 4 * n);
#if !LOGITLESS_TILE_2
    const auto b2 = M::load(b + 8 * n);
#endif
    hwy::Prefetch(a + prefetch_steps * 4 * tile_rows);
    LOGITLESS_TILE_ROWS(LOGITLESS_STEP)
    a += 4 * tile_rows;
    b += 4 * tile_vectors * n;
  }
  if (onto == Onto::sum) {
    LOGITLESS_TILE_ROWS(LOGITLESS_ADD)
  }
  LOGITLESS_TILE_ROWS(LOGITLESS_STORE)
}
#undef LOGITLESS_DECLARE
#undef LOGITLESS_LOAD
#undef LOGITLESS_STEP
#undef LOGITLESS_ADD
#undef LOGITLESS_STORE

// multiply_tile for a B panel [k][N] of a single vector, whose rows are contiguous.
#define LOGITLESS_DECLARE(r) auto c##r = hn::Zero(df);
#define LOGITLESS_LOAD(r) c##r = hn::LoadU(df, c + r * c_stride);
#define LOGITLESS_STEP(r) c##r = M::add(M::broadcast(a, r), x, c##r);
#define LOGITLESS_STORE(r) hn::StoreU(c##r, df, c + r * c_stride);
template <class M>
HWY_INLINE void multiply_vector_with(const char* HWY_RESTRICT a, const char* HWY_RESTRICT b,
                                     int64_t k, float* HWY_RESTRICT c, int64_t c_stride,
                                     bool accumulate) {
  LOGITLESS_TILE_ROWS(LOGITLESS_DECLARE)
  if (accumulate) {
    LOGITLESS_TILE_ROWS(LOGITLESS_LOAD)
  }
  for (int64_t i = 0; i < k; ++i, a += 4 * tile_rows, b += 4 * hn::Lanes(df)) {
    const auto x = M::load(b);
    LOGITLESS_TILE_ROWS(LOGITLESS_STEP)
  }
  LOGITLESS_TILE_ROWS(LOGITLESS_STORE)
}
#undef LOGITLESS_DECLARE
#undef LOGITLESS_LOAD
#undef LOGITLESS_STEP
#undef LOGITLESS_STORE

HWY_INLINE void multiply_vector(Arithmetic arithmetic, const char* a, const uint32_t* b, int64_t k,
                                float* c, int64_t c_stride, bool accumulate) {
  const char* panel = reinterpret_cast<const char*>(b);
#if HWY_NATIVE_DOT_BF16
  if (arithmetic == Arithmetic::bf16_dot)
    return multiply_vector_with<MultiplyBf16>(a, panel, k, c, c_stride, accumulate);
#endif
  (void)arithmetic;
  multiply_vector_with<MultiplyF32>(a, panel, k, c, c_stride, accumulate);
}

HWY_INLINE void multiply_tile(Arithmetic arithmetic, const void* a, const void* b, int64_t k,
                              float* c, int64_t c_stride, Onto onto) {
#if HWY_NATIVE_DOT_BF16
  if (arithmetic == Arithmetic::bf16_dot)
    return multiply_tile_with<MultiplyBf16>(a, b, k, c, c_stride, onto);
#endif
  (void)arithmetic;
  multiply_tile_with<MultiplyF32>(a, b, k, c, c_stride, onto);
}

}  // namespace HWY_NAMESPACE
}  // namespace logitless::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
