// SPDX-License-Identifier: Apache-2.0
// An engine runs the linear ops on one family of devices. It says which calls it serves, decides
// the facts of a call that its kernels need, and runs a plan. engines.cpp lists them, best first.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;

  // True where any call at all is served on this device.
  virtual bool serves(const DeviceInfo& device) const = 0;
  // True where this op is, by its dtype, its strides and the alignment of its weight.
  virtual bool serves(const Call& op, const LinearShape& shape) const = 0;
  // True where a token's loss and statistics, of a call that is served, do not depend on its batch.
  virtual bool is_batch_invariant() const = 0;
  // True where the row_reference that such a call writes is the row's maximum, not a number near
  // it.
  virtual bool finds_maximum(const LinearShape& shape) const = 0;

  // Tells what the engine's kernels make of the op: facts of call->shape that depend on them.
  virtual void describe(const Call& op, LinearCall* call, const DeviceInfo& device) const = 0;
  // Returns what its plans count with on this device.
  virtual DeviceSpeed speed(const DeviceInfo& device) const = 0;

  // Calls consider(plan) with every plan of at most `bytes` that is thought of, and maybe with
  // larger ones, but for its seconds; 0: with those that the smallest one is chosen from.
  virtual void each_plan(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes,
                         const std::function<void(const LinearPlan&)>& consider) const = 0;
  // Decides of one of these what takes long to say and is asked of the one that is chosen alone.
  virtual void complete(const LinearShape&, const DeviceSpeed&, LinearPlan*) const {}
  // Returns `best` of these or a plan of several passes: a better one of at least `minimum` and at
  // most `bytes`; where the minimum is looked for (0), a smaller one that is hardly slower.
  virtual LinearPlan in_passes(const LinearShape&, const DeviceSpeed&, uint64_t /*minimum*/,
                               uint64_t /*bytes*/, const LinearPlan& best) const {
    return best;
  }
  // Visits what the plan does, step by step; and about how many seconds one of them takes.
  virtual void for_steps(const LinearShape& shape, const LinearPlan& plan,
                         StepVisitor* visitor) const = 0;
  virtual double seconds(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                         const Step& step) const = 0;
  // `workspace` has the plan's bytes.
  virtual void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                   const DeviceInfo& device, Stream* stream) const = 0;
};

// All of them, best first; the last one serves every call.
std::span<const Engine* const> engines();
// invalid_argument where LOGITLESS_CUDA_KERNELS names none of them that serves this device: every
// op asks before it looks for its engine.
Status check_named_engine(const DeviceInfo& device);
// The best one that serves some call on this device; or this op, of a list that ends with one
// that serves every op. One that LOGITLESS_CUDA_KERNELS names leaves the others out but the last.
const Engine& engine_for(const DeviceInfo& device);
const Engine& engine_for(std::span<const Engine* const> engines, const Call& op,
                         const LinearShape& shape, const DeviceInfo& device);

// Says that so many columns of E lie in the caller's kept memory, for an engine's describe: what
// Forward keeps of them, or what Backward makes of what is there.
void lay_out_kept(const Call& op, int64_t columns, LinearCall* call);
// Says of f16 inputs that codes of E are stored (numbers.cuh), which become dz in their place.
void keep_codes(LinearCall* call);

// An op as its engine takes it.
struct EngineCall {
  const Engine* engine;
  LinearCall call;
};
EngineCall make_call(std::span<const Engine* const> engines, const Call& call,
                     const DeviceInfo& device);

// True where `p` is quicker than `best`, or smaller and as quick.
inline bool is_better(const LinearPlan& p, const LinearPlan& best) {
  return p.seconds < best.seconds || (p.seconds == best.seconds && p.bytes < best.bytes);
}
// The plan of the fewest bytes; and the quickest of at most `bytes`, by what each is thought to
// take, or the smallest where none fits.
struct Found {
  LinearPlan least, best;
};
// Remembers the last few answers.
Found search(const Engine& engine, const LinearShape& shape, const DeviceSpeed& speed,
             uint64_t bytes);
// How an engine runs an op in a workspace: in one pass over the vocabulary or in two, one after the
// other.
struct LinearPass {
  LinearCall call;
  LinearPlan plan;
  char* workspace = nullptr;
};
struct LinearPasses {
  const Engine* engine = nullptr;
  int count = 0;
  std::array<LinearPass, 2> pass{};
};
LinearPasses linear_passes(const Call& call, const Workspace& workspace, const DeviceInfo& device);

// Answers what is planned of a linear op on a device.
struct Asked {
  const Engine& engine;
  LinearShape shape;
  DeviceSpeed speed;
  LinearPlan smallest() const { return search(engine, shape, speed, 0).least; }
  LinearPlan plan(uint64_t bytes) const { return search(engine, shape, speed, bytes).best; }
  LinearPlan settled(uint64_t bytes) const;
  // At most a quarter of the f32 logits beyond the gradients' sums; or, where that is predicted to
  // take 3 % longer, the logits in the input's dtype and the f32 sums of grad_input.
  LinearPlan recommended() const;
};
// A call that runs in one pass; a plan of two is two of them, behind the rows' states.
struct Planned {
  const Engine& engine;
  LinearShape shape;
  LinearPlan plan;
};
std::vector<Planned> passes(const Asked& asked, uint64_t bytes);

inline Asked asked_of(const Call& call, const DeviceInfo& device) {
  const auto [engine, made] = make_call(engines(), call, device);
  return {*engine, made.shape, engine->speed(device)};
}

}  // namespace logitless::cuda
