// SPDX-License-Identifier: Apache-2.0
// This is Hopper's engine: its own kernels multiply and form the sums, E and dz in one
// (forward.cuh), and make the gradients' products (product.cuh).
#pragma once

#include "src/cuda/linear/engine.h"

namespace logitless::cuda::sm90 {

class HopperEngine final : public Engine {
 public:
  const char* name() const override { return "sm90"; }
  bool serves(const DeviceInfo& device) const override;
  bool serves(const Call& op, const LinearShape& shape) const override;
  bool is_batch_invariant() const override { return true; }
  bool finds_maximum(const LinearShape& s) const override { return s.sums.has(SumKind::maximum); }
  void describe(const Call& op, LinearCall* call, const DeviceInfo& device) const override;
  DeviceSpeed speed(const DeviceInfo& device) const override;
  void each_plan(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes,
                 const std::function<void(const LinearPlan&)>& consider) const override;
  void complete(const LinearShape& shape, const DeviceSpeed& speed,
                LinearPlan* plan) const override;
  LinearPlan in_passes(const LinearShape& shape, const DeviceSpeed& speed, uint64_t minimum,
                       uint64_t bytes, const LinearPlan& best) const override;
  void place(Lifetime lifetime, const LinearShape& shape, const LinearPlan& plan, Arena* arena,
             LinearMemory* memory) const override;
  void for_steps(const LinearShape& shape, const LinearPlan& plan,
                 StepVisitor* visitor) const override;
  double seconds(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                 const Step& step) const override;
  void run(const LinearCall& call, const LinearPlan& plan, char* workspace,
           const DeviceInfo& device, Stream* stream) const override;
};

// plan_time.cpp says how many slots of slices (cut.h) the products of a plan can use; the plan has
// all but these.
int32_t slots_of(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed);

}  // namespace logitless::cuda::sm90
