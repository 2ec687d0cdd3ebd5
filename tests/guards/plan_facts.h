// SPDX-License-Identifier: Apache-2.0
// What the planners decide for a public op. plan_facts.cpp is this guard's only file that uses the
// planners' own types: it follows their changes, and its output stays the same.
#pragma once

#include <string>
#include <vector>

#include "assumed.h"
#include "plan_calls.h"

namespace logitless::guards {

// Returns CUDA, CPU and WebGPU devices. Those of CUDA answer only while an AssumedMachine lives.
std::vector<Assumed> assumed_devices();

// The answer of `workspace`. `text` lists the recommended sizes for 1, 2 and 8 threads where they
// differ, or the status of a refusal; `recommended` is the last size.
struct Sizes {
  bool ok = false;
  uint64_t minimum = 0, recommended = 0;
  std::string text;
};
Sizes sizes_of(const AnyOp& op, const Assumed& assumed);

// Returns every decision of `run` in a workspace of `bytes`, as key=value without usual values.
std::string decision_of(const AnyOp& op, const Assumed& assumed, uint64_t bytes);

// Returns "" if sizes_of a CPU call equals the public `workspace` on this machine, else what
// differs or is wrong with the call. (On GPUs sizes_of calls `workspace` itself.)
std::string check_sizes(const AnyOp& op);

}  // namespace logitless::guards
