// SPDX-License-Identifier: Apache-2.0
// Multiplies AMX tiles in registers. Uses intrinsics, because Highway has no AMX.
#include "cli/probe.h"
#include "src/cpu/gemm.h"

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#endif

namespace logitless::cli {

#if defined(__x86_64__) && defined(__linux__)

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Four accumulators, like the library's own AMX kernel.
__attribute__((target("amx-tile,amx-bf16"))) void multiply_tiles(int64_t rounds) {
  TileConfig config;
  asm volatile("" : "+m"(config));  // the compiler does not know that the intrinsic reads all of it
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

}  // namespace

double amx_loop(int64_t rounds) {
  if (!cpu::amx_available()) return 0;
  multiply_tiles(rounds);
  return 4 * 16.0 * 16 * 32 * 2 * static_cast<double>(rounds);
}

#else

double amx_loop(int64_t) { return 0; }

#endif

}  // namespace logitless::cli
