// SPDX-License-Identifier: Apache-2.0
// An engine runs the linear ops on one family of devices. It says which calls it serves, decides
// the facts of a call that its kernels need, and runs a plan. engines.cpp lists them, best first.
#pragma once

#include <array>
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

  // Returns true where any call at all is served on this device.
  virtual bool serves(const DeviceInfo& device) const = 0;
  // Returns true where this op is served, which its dtype, its strides and the alignment of its
  // weight decide.
  virtual bool serves(const Call& op, const LinearShape& shape) const = 0;
  // Returns true where a token's loss and statistics, of a call that is served, do not depend on
  // its batch.
  virtual bool is_batch_invariant() const = 0;
  // Returns true where the row_reference that such a call writes is the row's maximum, not a number
  // near it.
  virtual bool finds_maximum(const LinearShape& shape) const = 0;

  // Sets the facts of call->shape that depend on the engine's kernels.
  virtual void describe(const Call& op, LinearCall* call, const DeviceInfo& device) const = 0;
  // Returns the speeds that its plans' seconds are predicted from on this device.
  virtual DeviceSpeed speed(const DeviceInfo& device) const = 0;

  // Calls consider(plan) with every plan of at most `bytes` that is worth a look, complete but for
  // its seconds; it may pass larger ones too. If `bytes` is 0, it passes those that the smallest
  // plan is chosen from.
  virtual void each_plan(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes,
                         const std::function<void(const LinearPlan&)>& consider) const = 0;
  // Decides what takes long to decide. It is asked of the chosen plan alone.
  virtual void complete(const LinearShape&, const DeviceSpeed&, LinearPlan*) const {}
  // Returns `best` or a plan of several passes that is better, of at least `minimum` and at most
  // `bytes`. Where the minimum itself is looked for (0), it returns a smaller one that is hardly
  // slower.
  virtual LinearPlan in_passes(const LinearShape&, const DeviceSpeed&, uint64_t /*minimum*/,
                               uint64_t /*bytes*/, const LinearPlan& best) const {
    return best;
  }
  // Takes the arrays of the plan that this engine alone has.
  virtual void place(Lifetime lifetime, const LinearShape& shape, const LinearPlan& plan,
                     Arena* arena, LinearMemory* memory) const = 0;
  // Visits what the plan does, step by step; step_time predicts the seconds of one of them.
  virtual void for_steps(const LinearShape& shape, const LinearPlan& plan,
                         StepVisitor* visitor) const = 0;
  virtual double seconds(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                         const Step& step) const = 0;
  // `workspace` has the plan's bytes, which the engine lays its arrays out in.
  virtual void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                   const DeviceInfo& device, Stream* stream) const = 0;
};

// Returns all engines, best first; the last one serves every call.
std::span<const Engine* const> engines();
// Tests call this while no call is running, with a list in the place of the library's own or, with
// none, to have that again.
void replace_engines(std::span<const Engine* const> replacement);
// Returns invalid_argument where LOGITLESS_CUDA_KERNELS names no engine that serves this device.
// Every op asks this before it looks for its engine.
Status check_named_engine(const DeviceInfo& device);
// Returns the best engine that serves some call on this device, or this op, of a list that ends
// with one that serves every op. If LOGITLESS_CUDA_KERNELS names an engine, only it and the last
// one are considered.
const Engine& engine_for(const DeviceInfo& device);
const Engine& engine_for(std::span<const Engine* const> engines, const Call& op,
                         const LinearShape& shape, const DeviceInfo& device);

// An engine's describe calls this to say that so many columns of E lie in the caller's kept memory:
// Forward keeps them there, Backward makes its gradients of them.
void lay_out_kept(const Call& op, int64_t columns, LinearCall* call);
// Says of f16 inputs that codes of E are stored (numbers.cuh), which become dz in their place.
void keep_codes(LinearCall* call);

// An engine takes an op like this: with what its kernels need to know of the call.
struct EngineCall {
  const Engine* engine;
  LinearCall call;
};
EngineCall make_call(std::span<const Engine* const> engines, const Call& call,
                     const DeviceInfo& device);

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
// An engine runs an op as one pass over the vocabulary, or as two passes one after the other.
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
// What is decided of a linear op in so many bytes: who runs it, and the plan of each pass.
struct LinearDecisions {
  const Engine* engine = nullptr;
  LinearPlan plan;
  std::array<LinearPlan, 2> pass{};  // they are decided where `plan` has two passes
};
LinearDecisions decide_linear(const Call& call, uint64_t bytes, const DeviceInfo& device);
LinearPasses linear_passes(const Call& call, const LinearDecisions& decided,
                           const Workspace& workspace, const DeviceInfo& device);

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
