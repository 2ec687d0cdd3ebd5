// SPDX-License-Identifier: Apache-2.0
// An engine runs the linear ops on one family of devices: it says which calls it serves, decides
// the facts of a call that its kernels depend on, and runs a plan. engines.h lists them, best
// first.
#pragma once

#include <functional>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

// Where store_logits puts raw logits in f32: of the chunk's rows that count, which begin at row
// `row` of the compacted input, and of columns [first, first + columns).
struct StoredLogits {
  float* to = nullptr;  // [rows, pitch]  written up to a multiple of 2 columns
  int64_t pitch = 0, row = 0;
  int64_t first = 0, columns = 0;
  // [rows, segments] each: `maximum` and `sum` of columns_of_sums() columns; or null
  Partials partials{};
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;

  // Whether any call at all is served on this device.
  virtual bool serves(const DeviceInfo& device) const = 0;
  // Whether this op is served; its dtype, its strides and the alignment of its weight decide.
  virtual bool serves(const Call& op, const LinearShape& shape) const = 0;
  // Whether calls may ask for the largest logits, which takes kernels that see a row's logits in
  // memory.
  virtual bool lists_logits() const { return false; }
  // For `info`: whether a token's loss and statistics are independent of its batch, and every call
  // of 16-bit inputs with aligned rows is served.
  virtual bool is_batch_invariant() const = 0;
  // Whether the row_reference that such a call writes is the row's maximum, rather than near it.
  virtual bool finds_maximum(const LinearShape& shape) const = 0;

  virtual void describe(const Call& op, LinearCall* call, const DeviceInfo& device) const = 0;
  // The speeds from which its plans' seconds are predicted on this device.
  virtual DeviceSpeed speed(const DeviceInfo& device) const = 0;

  // Calls consider(plan) with every plan of at most `bytes` that is worth a look, complete except
  // for its seconds; larger ones are allowed too. With 0 bytes, with those that the smallest plan
  // is chosen from.
  virtual void each_plan(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes,
                         const std::function<void(const LinearPlan&)>& consider) const = 0;
  // Decides what takes long to decide, for the chosen plan alone.
  virtual void complete(const LinearShape&, const DeviceSpeed&, LinearPlan*) const {}
  // Returns `best` or a better plan of several passes, of `minimum` to `bytes` bytes; if `best` has
  // several passes, made for fewer bytes, they are planned anew for these. With a minimum of 0 (the
  // minimum is being looked for) returns a smaller plan that is hardly slower.
  virtual LinearPlan in_passes(const LinearShape&, const DeviceSpeed&, uint64_t /*minimum*/,
                               uint64_t /*bytes*/, const LinearPlan& best) const {
    return best;
  }
  // Takes the arrays of the plan that only this engine has.
  virtual void place(Lifetime lifetime, const LinearShape& shape, const LinearPlan& plan,
                     Arena* arena, LinearMemory* memory) const = 0;
  // Visits what the plan does, step by step; `seconds` predicts one of them.
  virtual void for_steps(const LinearShape& shape, const LinearPlan& plan,
                         StepVisitor* visitor) const = 0;
  virtual double seconds(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                         const Step& step) const = 0;
  // Columns of a sum of store_logits; 0 where the engine stores no logits. Heads must be of 16
  // bits, with a weight that is copied or has aligned rows.
  virtual int64_t columns_of_sums() const { return 0; }
  // Makes a head's raw logits, and their sums.
  virtual void store_logits(const LinearWork&, const StoredLogits&) const {}
  // `workspace` has the plan's bytes; the engine places its arrays in it.
  virtual void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                   const DeviceInfo& device, Stream* stream) const = 0;
};

// For an engine's describe: `columns` columns of E are in the caller's kept memory, written by
// Forward and read by Backward.
void lay_out_kept(const Call& op, int64_t columns, LinearCall* call);
// For f16 inputs: codes of E are stored (numbers.cuh), which become dz in their place.
void keep_codes(LinearCall* call);

}  // namespace logitless::cuda
