// SPDX-License-Identifier: Apache-2.0
// An engine runs the linear ops on one family of devices: it says which calls it serves, decides
// the properties of a call on which its kernels depend, and runs a plan. engines.cpp lists the
// engines, best first.
#pragma once

#include <functional>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

// Where store_logits writes raw logits in f32: of the chunk's rows that count, which start at row
// `row` of the compacted input, and of columns [first, first + columns).
struct StoredLogits {
  float* to = nullptr;  // [rows, pitch]  written up to a multiple of 2 columns
  int64_t pitch = 0, row = 0;
  int64_t first = 0, columns = 0;
  // [rows, segments] each: `maximum` and `sum` of columns_of_sums() columns each; or null
  Partials partials{};
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;

  // Whether calls get this engine also if LOGITLESS_CUDA_KERNELS names none.
  virtual bool is_default() const { return true; }
  // Whether the engine serves any call on this device.
  virtual bool serves(const DeviceInfo& device) const = 0;
  // Whether the engine serves this op, by its dtype, strides and the weight's alignment.
  virtual bool serves(const Call& op, const LinearShape& shape) const = 0;
  // Whether calls may ask for the largest logits. That needs kernels that see a row's logits in
  // memory.
  virtual bool lists_logits() const { return false; }
  // For `info`: whether a token's loss and statistics are independent of its batch for every call
  // that it serves with 16-bit inputs and aligned rows.
  virtual bool is_batch_invariant() const = 0;
  // Whether the row_reference that this call writes is exactly the row's maximum.
  virtual bool finds_maximum(const LinearShape& shape) const = 0;

  virtual void describe(const Call& op, LinearCall* call, const DeviceInfo& device) const = 0;
  // The device's speeds, from which plans' seconds are predicted.
  virtual DeviceSpeed speed(const DeviceInfo& device) const = 0;

  // Calls consider(plan) with every plan of at most `bytes` that may be the best, complete except
  // for its seconds; larger plans are allowed too. With 0 bytes, with the candidates for the
  // smallest plan.
  virtual void each_plan(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes,
                         const std::function<void(const LinearPlan&)>& consider) const = 0;
  // Makes expensive decisions, for the chosen plan only.
  virtual void complete(const LinearShape&, const DeviceSpeed&, LinearPlan*) const {}
  // Returns `best`, or a better plan of several passes with `minimum` to `bytes` bytes. If `best`
  // has several passes and was planned for fewer bytes, they are planned again. With a minimum of 0
  // (while the minimum is searched for) it may return a smaller plan that is hardly slower.
  virtual LinearPlan in_passes(const LinearShape&, const DeviceSpeed&, uint64_t /*minimum*/,
                               uint64_t /*bytes*/, const LinearPlan& best) const {
    return best;
  }
  // Allocates the arrays that only this engine has.
  virtual void place(Lifetime lifetime, const LinearShape& shape, const LinearPlan& plan,
                     Arena* arena, LinearMemory* memory) const = 0;
  // Visits the plan's steps in order; `seconds` predicts the time of one of them.
  virtual void for_steps(const LinearShape& shape, const LinearPlan& plan,
                         StepVisitor* visitor) const = 0;
  virtual double seconds(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                         const Step& step) const = 0;
  // Columns per sum of store_logits; 0 if the engine stores no logits. Heads must be of 16 bits,
  // with a weight that is copied or has aligned rows.
  virtual int64_t columns_of_sums() const { return 0; }
  // Computes a head's raw logits and their sums.
  virtual void store_logits(const LinearWork&, const StoredLogits&) const {}
  // Runs a plan. `workspace` has the plan's bytes, in which the engine places its arrays.
  virtual void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
                   const DeviceInfo& device, Stream* stream) const = 0;
};

// Whether TMA and vector loads may read the view, whose address may be unknown.
bool is_aligned(const Tensor& v);
// Whether kernels can read the weight's rows 16 bytes at a time, in its memory or in a copy.
bool has_aligned_rows(const Tensor& weight, const LinearShape& shape);

// For an engine's describe(): `columns` columns of E are in the caller's `kept`, written by Forward
// and read by Backward.
void lay_out_kept(const Call& op, int64_t columns, LinearCall* call);
// For f16 inputs: E is kept as codes (numbers.cuh), which dz overwrites; not with a softcap.
void keep_codes(LinearCall* call);

}  // namespace logitless::cuda
