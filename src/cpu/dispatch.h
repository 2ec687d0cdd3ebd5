// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU kernels use: the best this machine has, or the one forced.
#pragma once

namespace logitless::cpu {

// Reads LOGITLESS_CPU_TARGET, once a process; a name this machine cannot run changes nothing.
// Called before any kernel runs; the other functions call it too.
void initialize_dispatch();

// "AVX3_SPR", "AVX2", "NEON", ...: what runs now.
const char* target_name();

// Every compiled target this machine can run, best first, as a space-separated list; "" never.
const char* target_names();

// Forces a target of target_names() (tests, bug reports); nullptr: the best one, or
// LOGITLESS_CPU_TARGET. False and no change if this machine cannot run it. Calls in flight on other
// threads may mix both targets.
bool force_target(const char* name);

}  // namespace logitless::cpu
