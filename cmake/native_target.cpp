// SPDX-License-Identifier: Apache-2.0
// Prints the best of the targets that this compiler supports and this machine runs:
// cmake/highway.cmake runs this program for LOGITLESS_CPU_TARGETS=native.
#include <cstdint>
#include <cstdio>

#include "src/cpu/targets.h"
// Highway's headers must come after the list of targets.
#include "hwy/highway.h"
#include "hwy/targets.h"

int main() {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  std::puts(hwy::TargetName(targets & -targets));  // lower bits are better targets
}
