// SPDX-License-Identifier: Apache-2.0
// The instruction set of the CPU kernels: this machine's best, or a forced one.
#pragma once

namespace logitless::cpu {

// Reads LOGITLESS_CPU_TARGET once per process; a name that this machine cannot run has no effect.
// Must run before any kernel; the functions below call it themselves.
void initialize_dispatch();

// The current target: "AVX3_SPR", "AVX2", "NEON", ...
const char* target_name();

// Every compiled target that this machine can run, best first, separated by spaces; never empty.
const char* target_names();

// Forces a target of target_names(), for tests and bug reports; nullptr returns to the best one, or
// to LOGITLESS_CPU_TARGET. Returns false and changes nothing if this machine cannot run it. Calls
// in flight on other threads may mix both targets.
bool force_target(const char* name);

}  // namespace logitless::cpu
