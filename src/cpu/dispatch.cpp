// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set of the CPU kernels. Highway indexes its tables of function pointers
// by one target per process. To force a target, Highway is told that the machine supports no other.
#include "src/cpu/dispatch.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "src/cpu/targets.h"
// Highway's headers must come after the list of targets.
#include "hwy/highway.h"
#include "hwy/targets.h"

namespace logitless::cpu {
namespace {

// Lower bits are better targets.
int64_t best_of(int64_t targets) { return targets & -targets; }

struct Supported {
  int64_t targets;  // compiled and supported by this machine
  char names[256];

  Supported() : targets(hwy::SupportedTargets() & HWY_TARGETS), names{} {
    size_t used = 0;
    for (int64_t rest = targets; rest != 0; rest &= rest - 1) {
      const char* name = hwy::TargetName(best_of(rest));
      const size_t length = std::strlen(name);
      if (used + length + 2 > sizeof(names)) break;
      if (used > 0) names[used++] = ' ';
      std::memcpy(names + used, name, length);
      used += length;
    }
  }
};

const Supported& supported() {
  static const Supported value;
  return value;
}

int64_t find(const char* name) {
  for (int64_t rest = supported().targets; rest != 0; rest &= rest - 1) {
    if (std::strcmp(hwy::TargetName(best_of(rest)), name) == 0) return best_of(rest);
  }
  return 0;
}

// The target that kernels run on; 0 before the first call.
std::atomic<int64_t> chosen{0};

// Restricts Highway to `target`; 0 lifts the restriction.
void restrict_to(int64_t target) {
  chosen.store(target != 0 ? target : best_of(supported().targets));
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Returns the target that LOGITLESS_CPU_TARGET names, or 0 if it names none that this machine can
// run.
int64_t target_from_environment() {
  static const int64_t target = [] {
    const char* name = std::getenv("LOGITLESS_CPU_TARGET");
    const int64_t found = name != nullptr ? find(name) : 0;
    restrict_to(found);
    return found;
  }();
  return target;
}

}  // namespace

void initialize_dispatch() { target_from_environment(); }

const char* target_name() {
  initialize_dispatch();
  return hwy::TargetName(chosen.load());
}

const char* target_names() {
  supported();
  initialize_dispatch();
  return supported().names;
}

bool force_target(const char* name) {
  const int64_t from_environment = target_from_environment();
  const int64_t target = name != nullptr ? find(name) : from_environment;
  if (name != nullptr && target == 0) return false;
  restrict_to(target);
  return true;
}

}  // namespace logitless::cpu
