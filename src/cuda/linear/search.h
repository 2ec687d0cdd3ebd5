// SPDX-License-Identifier: Apache-2.0
// A search finds an engine's plans for so many bytes.
#pragma once

#include <array>
#include <vector>

#include "src/cuda/linear/engines.h"

namespace logitless::cuda {

// Returns true where `p` is quicker than `best`, or smaller and as quick.
inline bool is_better(const LinearPlan& p, const LinearPlan& best) {
  return p.seconds < best.seconds || (p.seconds == best.seconds && p.bytes < best.bytes);
}
// `least` is the plan of the fewest bytes; `best` is the one of at most `bytes` that is predicted
// to be the quickest, or `least` where none fits.
struct Found {
  LinearPlan least, best;
};
// Searches the engine's plans. It remembers the last few answers, since planning takes longer than
// enqueuing a small call.
Found search(const Engine& engine, const LinearShape& shape, const DeviceSpeed& speed,
             uint64_t bytes);

// Answers what is planned of a linear op on a device.
struct Asked {
  const Engine& engine;
  LinearShape shape;
  DeviceSpeed speed;
  LinearPlan smallest() const { return search(engine, shape, speed, 0).least; }
  LinearPlan plan(uint64_t bytes) const { return search(engine, shape, speed, bytes).best; }
  LinearPlan settled(uint64_t bytes) const;
  // Returns a plan that needs at most a quarter of the f32 logits beyond the gradients' sums; or,
  // where that is predicted to take 3 % longer, one that may also hold the logits in the input's
  // dtype and the f32 sums of grad_input.
  LinearPlan recommended() const;
};
// This is a call whose plan is chosen. A plan of two passes runs as two such calls, in the memory
// behind the rows' states.
struct Planned {
  const Engine& engine;
  LinearShape shape;
  LinearPlan plan;
};
std::vector<Planned> passes(const Asked& asked, uint64_t bytes);
// Returns the plans of two passes, of which the first makes so many rows of grad_weight. Unlike
// `passes` it allocates nothing.
std::array<LinearPlan, 2> plans_of_passes(const Asked& asked, int64_t first_rows, uint64_t bytes);

inline Asked asked_of(const Call& call, const DeviceInfo& device) {
  const auto [engine, made] = make_call(engines(), call, device);
  return {*engine, made.shape, engine->speed(device)};
}

}  // namespace logitless::cuda
