// SPDX-License-Identifier: Apache-2.0
// The CPU kernels use the best instruction set that this machine has, or one that is forced.
#pragma once

namespace logitless::cpu {

// Reads LOGITLESS_CPU_TARGET, once a process; a name that this machine cannot run changes nothing.
// It is called before any kernel runs, and by the other functions too.
void initialize_dispatch();

// Returns the target that runs now: "AVX3_SPR", "AVX2", "NEON", ...
const char* target_name();

// Returns every compiled target that this machine can run, best first, as a space-separated list,
// which is never empty.
const char* target_names();

// Forces a target of target_names() (tests, bug reports); nullptr returns to the best one, or to
// LOGITLESS_CPU_TARGET. It returns false and changes nothing if this machine cannot run the target.
// Calls in flight on other threads may mix both targets.
bool force_target(const char* name);

}  // namespace logitless::cpu
