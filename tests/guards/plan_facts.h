// SPDX-License-Identifier: Apache-2.0
// These functions tell what the planners decide for a public op. plan_facts.cpp is the one file of
// this guard that knows the planners' own types: where those move it moves along, and what it says
// stays.
#pragma once

#include <string>
#include <vector>

#include "assumed.h"
#include "plan_calls.h"

namespace logitless::guards {

// Returns devices of every type. Those of CUDA answer only while an AssumedMachine lives.
std::vector<Assumed> assumed_devices();

// Holds what `workspace` says. `text` lists the recommended sizes of 1, 2 and 8 threads where they
// differ, or says with which status the call was refused; `recommended` is the last of them.
struct Sizes {
  bool ok = false;
  uint64_t minimum = 0, recommended = 0;
  std::string text;
};
Sizes sizes_of(const AnyOp& op, const Assumed& assumed);

// Returns every decision of `run` in a workspace of `bytes`, as key=value without the usual values.
std::string decision_of(const AnyOp& op, const Assumed& assumed, uint64_t bytes);

// Says where sizes_of a CPU call is not what the public `workspace` answers on this machine, or
// what is wrong with the call, or "" where all is well. The sizes on CUDA are that answer
// themselves.
std::string check_sizes(const AnyOp& op);

}  // namespace logitless::guards
