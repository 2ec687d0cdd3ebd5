// SPDX-License-Identifier: Apache-2.0
// For the cost models of every engine: they predict seconds on a device from its measured speed.
#pragma once

#include "src/cuda/linear/engine.h"

namespace logitless::cuda {

// Sums cost(size) over the pieces of `total`: the whole ones and the rest.
template <class F>
double in_pieces(int64_t total, int64_t piece, F&& cost) {
  const int64_t left = total % piece;
  return static_cast<double>(total / piece) * cost(piece) + (left > 0 ? cost(left) : 0);
}

// Visits a plan for an estimate: sees one of several alike steps, and at most a hundred parts that
// differ, because a large vocabulary has very many and some hundred plans are compared.
class Estimate : public StepVisitor {
 public:
  int64_t begin_repeat(int64_t) override { return 1; }
  int64_t most_parts() const override { return 100; }
};

// The seconds of a call under a plan whose sizes are all chosen: its steps, and what precedes them.
// A call without tokens is priced as one with a token.
double predicted_time(const Engine& engine, const LinearShape& shape, const LinearPlan& plan,
                      const DeviceSpeed& speed);

// Prices a step that all engines run alike.
double shared_step_time(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                        const Step& step);

// Whether rows of grad_weight are added to what is there.
inline bool adds_to_weight(const LinearShape& s, const LinearPlan& p) {
  return sums_grad_weight(s, p) || (s.grad_weight_f32 && p.chunks > 1);
}

}  // namespace logitless::cuda
