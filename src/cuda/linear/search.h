// SPDX-License-Identifier: Apache-2.0
// Searches an engine's plans for a number of bytes.
#pragma once

#include <array>
#include <vector>

#include "src/cuda/linear/engines.h"

namespace logitless::cuda {

// Whether `p` is faster than `best`, or as fast and smaller.
inline bool is_better(const LinearPlan& p, const LinearPlan& best) {
  return p.seconds < best.seconds || (p.seconds == best.seconds && p.bytes < best.bytes);
}
// `least`: the plan with the fewest bytes. `best`: the plan predicted to be fastest in `bytes`, or
// `least` if none fits.
struct Found {
  LinearPlan least, best;
};
// Each thread caches its last few answers: planning takes longer than enqueuing a small call.
Found search(const Engine& engine, const LinearShape& shape, const DeviceSpeed& speed,
             uint64_t bytes);

// Plans a linear op on a device.
struct Asked {
  const Engine& engine;
  LinearShape shape;
  DeviceSpeed speed;
  LinearPlan smallest() const { return search(engine, shape, speed, 0).least; }
  LinearPlan plan(uint64_t bytes) const { return search(engine, shape, speed, bytes).best; }
  LinearPlan settled(uint64_t bytes) const;
  // Returns a plan that needs at most a quarter of the f32 logits and 16 MiB beyond the f32 sums of
  // gradients and a copied weight; or, if that is predicted to take over 3 % longer, one that may
  // instead hold the logits in the input's dtype, the sums of grad_input and 64 MiB.
  LinearPlan recommended() const;
};
// A call with its plan. A plan of two passes is two such calls, in the memory that the rows' states
// leave.
struct Planned {
  const Engine& engine;
  LinearShape shape;
  LinearPlan plan;
};
std::vector<Planned> passes(const Asked& asked, uint64_t bytes);
// The two plans of a plan in two passes, the first of which writes `first_rows` rows of
// grad_weight. Unlike `passes` it allocates nothing.
std::array<LinearPlan, 2> plans_of_passes(const Asked& asked, int64_t first_rows, uint64_t bytes);

inline Asked asked_of(const Call& call, const DeviceInfo& device) {
  const auto [engine, made] = make_call(engines(), call, device);
  return {*engine, made.shape, engine->speed(device)};
}

}  // namespace logitless::cuda
