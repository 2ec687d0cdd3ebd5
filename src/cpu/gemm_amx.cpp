// SPDX-License-Identifier: Apache-2.0
// Products of bf16 panels on Intel AMX: 32 x 32 of C in four tile registers, a step of 32 along k.
//
// An A panel is [k / 32][32 rows][32 bf16], a B panel [k / 2][32 columns] of pairs. A step is four
// tile loads and four TDPBF16PS of 16 cycles each; the loads are hidden (measured: 3.84 TFLOP/s per
// core with and without them). Each element of C is an in-order chain over pairs of k, whatever the
// other rows hold.
#include "src/cpu/gemm.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#endif

namespace logitless::cpu {

#if defined(__x86_64__) && defined(__linux__)

namespace {

constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM of Linux
constexpr long tile_data = 18;               // XFEATURE_XTILEDATA of Linux

bool detect_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool bf16 = d >> 22 & 1, tile = d >> 24 & 1;
  return bf16 && tile && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A panel of B with this depth stays in L1 while all A panels pass: 512 x 32 bf16 is 32 KiB.
constexpr int64_t depth = 512;

__attribute__((target("amx-tile,amx-bf16"))) void micro(const char* a, const char* b, int64_t steps,
                                                        float* c, int64_t c_stride,
                                                        bool accumulate) {
  const int64_t stride = c_stride * 4;
  if (accumulate) {
    _tile_loadd(0, c, stride);
    _tile_loadd(1, c + 16, stride);
    _tile_loadd(2, c + 16 * c_stride, stride);
    _tile_loadd(3, c + 16 * c_stride + 16, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, a += 2048, b += 2048) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 128);
    _tile_loadd(7, b + 64, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + 1024, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, stride);
  _tile_stored(1, c + 16, stride);
  _tile_stored(2, c + 16 * c_stride, stride);
  _tile_stored(3, c + 16 * c_stride + 16, stride);
}

}  // namespace

bool amx_available() {
  static const bool available = detect_amx();
  return available;
}

__attribute__((target("amx-tile,amx-bf16"))) void multiply_amx(const Product& p) {
  TileConfig config;
  asm volatile("" : "+m"(config));  // the intrinsic does not declare that it reads the struct
  _tile_loadconfig(&config);
  for (int64_t j = 0; j < p.b_panels; ++j) {
    const char* b = static_cast<const char*>(p.b) + j * p.b_panel_stride;
    for (int64_t k = 0; k < p.k; k += depth) {
      const int64_t steps = std::min(depth, p.k - k) / 32;
      for (int64_t i = 0; i < p.a_panels; ++i) {
        const char* a = static_cast<const char*>(p.a) + i * p.a_panel_stride;
        // A sum continues the chains too: the products of bf16 round more than long chains lose.
        micro(a + k * 64, b + k * 64, steps, p.c + i * 32 * p.c_stride + j * 32, p.c_stride,
              p.onto != Onto::nothing || k > 0);
      }
    }
  }
  _tile_release();
}

#else

bool amx_available() { return false; }
void multiply_amx(const Product&) {}

#endif

}  // namespace logitless::cpu
