// SPDX-License-Identifier: Apache-2.0
// Measures this machine's peak rates: multiply-adds in registers, reads and copies of memory, on
// the library's own threads and with the instruction set that it uses.
#pragma once

#include <cstdint>

namespace logitless::cli {

// FLOP/s of independent f32 FMAs, the best of `repeats` runs of at least 20 ms.
double probe_fma(int repeats);
// The same for bf16 dot products with f32 sums; 0 if the instruction set has none.
double probe_bf16_dot(int repeats);
// The same for AMX tiles of bf16; 0 if this CPU or kernel has none.
double probe_amx(int repeats);
// Runs the work of probe_amx and returns the FLOP executed.
double amx_loop(int64_t rounds);

struct Bandwidth {
  double read = 0;  // bytes/s
  double copy = 0;  // bytes/s, read and written
};
// Measures with two arrays of 256 MiB, or of an eighth of the available memory if that is less.
Bandwidth probe_bandwidth();

// The memory that is available on this machine, in bytes; 1 GiB if unknown.
uint64_t available_memory();

}  // namespace logitless::cli
