// SPDX-License-Identifier: Apache-2.0
// Helpers of every engine's cost model, which predicts seconds from a device's measured speed.
#pragma once

#include "src/cuda/linear/engine.h"

namespace logitless::cuda {

// Sums cost(size) over the pieces of `total`: the whole pieces and the remainder.
template <class F>
double in_pieces(int64_t total, int64_t piece, F&& cost) {
  const int64_t left = total % piece;
  return static_cast<double>(total / piece) * cost(piece) + (left > 0 ? cost(left) : 0);
}

// Visits a plan for an estimate: one of several equal steps, and at most a hundred different parts
// of lent E, because a large vocabulary has very many and hundreds of plans are compared.
class Estimate : public StepVisitor {
 public:
  int64_t begin_repeat(int64_t) override { return 1; }
  int64_t most_parts() const override { return 100; }
};

// The seconds of a call with a complete plan: its steps, and fixed costs. A call without tokens is
// priced like one with a single token.
double predicted_time(const Engine& engine, const LinearShape& shape, const LinearPlan& plan,
                      const DeviceSpeed& speed);

// Predicts the time of a step that all engines share.
double shared_step_time(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                        const Step& step);

// Whether products of grad_weight write f32 sums or add to an f32 grad_weight.
inline bool adds_to_weight(const LinearShape& s, const LinearPlan& p) {
  return sums_grad_weight(s, p) || (s.grad_weight_f32 && p.chunks > 1);
}

}  // namespace logitless::cuda
