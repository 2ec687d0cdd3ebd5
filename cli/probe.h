// SPDX-License-Identifier: Apache-2.0
// These measure what this machine can do: multiply-adds in registers, reads and copies of memory,
// on the library's own threads and with the instruction set that it uses.
#pragma once

#include <cstdint>

namespace logitless::cli {

// Returns FLOP/s of independent f32 FMAs, the best of `repeats` runs of at least 20 ms.
double probe_fma(int repeats);
// Returns the same for bf16 dot products with f32 sums, or 0 where the instruction set has none.
double probe_bf16_dot(int repeats);
// Returns the same for AMX tiles of bf16, or 0 where this CPU or kernel has none.
double probe_amx(int repeats);
// Runs the work of probe_amx and returns the FLOP done.
double amx_loop(int64_t rounds);

struct Bandwidth {
  double read = 0;  // it counts bytes/s
  double copy = 0;  // it counts bytes/s, read and written
};
// Measures over arrays far larger than any cache, as memory allows.
Bandwidth probe_bandwidth();

// Returns the bytes that a process may still take, or 1 GiB where the system does not tell.
uint64_t available_memory();

}  // namespace logitless::cli
