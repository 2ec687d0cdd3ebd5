// SPDX-License-Identifier: Apache-2.0
// An engine runs the linear ops on one family of devices. It says which calls it serves, decides
// the facts of a call that its kernels need, and runs a plan. engines.h lists them, best first.
#pragma once

#include <functional>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

// An engine stores raw logits in f32 there: those of the chunk's rows that count, which begin at
// row `row` of the compacted input, and of columns [first, first + columns).
struct StoredLogits {
  float* to = nullptr;  // [rows, pitch]  columns up to a multiple of 2 are written
  int64_t pitch = 0, row = 0;
  int64_t first = 0, columns = 0;
  // [rows, segments] each: `maximum` and `sum` of columns_of_sums() columns; or null
  Partials partials{};
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;

  // Returns true where any call at all is served on this device.
  virtual bool serves(const DeviceInfo& device) const = 0;
  // Returns true where this op is served, which its dtype, its strides and the alignment of its
  // weight decide.
  virtual bool serves(const Call& op, const LinearShape& shape) const = 0;
  // Returns true where calls may ask for the largest logits, which takes kernels that see a row's
  // logits in memory.
  virtual bool lists_logits() const { return false; }
  // Returns true where a token's loss and statistics do not depend on its batch, and every call of
  // 16-bit inputs with aligned rows is served, so that `info` may say so.
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
  // `bytes`; where `best` has several itself, made for fewer bytes, they are planned anew for
  // these. Where the minimum itself is looked for (0), it returns a smaller one that is hardly
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
  // Returns how many columns a sum of store_logits has, which serves heads of 16 bits whose weight
  // has aligned rows or is copied; or 0, where it serves none.
  virtual int64_t columns_of_sums() const { return 0; }
  // Makes a head's raw logits, and their sums.
  virtual void store_logits(const LinearWork&, const StoredLogits&) const {}
  // `workspace` has the plan's bytes, which the engine lays its arrays out in.
  virtual void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                   const DeviceInfo& device, Stream* stream) const = 0;
};

// An engine's describe calls this to say that so many columns of E lie in the caller's kept memory:
// Forward keeps them there, Backward makes its gradients of them.
void lay_out_kept(const Call& op, int64_t columns, LinearCall* call);
// Says of f16 inputs that codes of E are stored (numbers.cuh), which become dz in their place.
void keep_codes(LinearCall* call);

}  // namespace logitless::cuda
