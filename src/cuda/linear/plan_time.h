// SPDX-License-Identifier: Apache-2.0
// What the cost models of every engine share: seconds on a device, from its measured speed.
#pragma once

#include <algorithm>
#include <cmath>

#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

// cost(size) of every piece of `total`: whole ones and what is left.
template <class F>
double in_pieces(int64_t total, int64_t piece, F&& cost) {
  const int64_t left = total % piece;
  return static_cast<double>(total / piece) * cost(piece) + (left > 0 ? cost(left) : 0);
}

// An estimate sees this of a plan: one of alike steps, and a hundred of parts that differ, for a
// large vocabulary has very many and some hundred plans are compared.
class Estimate {
 public:
  int64_t begin_repeat(int64_t) { return 1; }
  void end_repeat(int64_t) {}
  int64_t most_parts() const { return 100; }
};
// Adds up seconds(step).
template <class F>
class Price : public Estimate {
 public:
  explicit Price(F seconds) : seconds_(seconds) {}
  void visit(const Step& step) { sums_[depth_] += seconds_(step); }
  int64_t begin_repeat(int64_t) {
    sums_[++depth_] = 0;
    return 1;
  }
  void end_repeat(int64_t count) {
    const double each = sums_[depth_--];
    sums_[depth_] += static_cast<double>(count) * each;
  }
  double seconds() const { return sums_[0]; }

 private:
  F seconds_;
  int depth_ = 0;
  double sums_[4] = {};  // of the call, of a chunk's steps, of a panel's
};

// A call's seconds under a plan whose sizes are all chosen: its steps', and what is in front of
// them. A call without tokens as if there were one.
template <template <class> class Steps, class F>
double predicted_time(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed,
                      F&& seconds) {
  LinearShape some = shape;
  some.tokens = std::max<int64_t>(shape.tokens, 1);
  Price price([&](const Step& step) { return seconds(some, plan, speed, step); });
  Steps(some, plan, &price).enumerate();
  constexpr double unit = 1e-14;  // so that two plans of the same steps tie
  return std::round((price.seconds() + 30 * speed.launch) / unit) * unit;
}

// Prices a step that every engine does alike.
inline double shared_step_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                               const Step& step) {
  const double outputs = static_cast<double>(s.rows_of_weight()) * static_cast<double>(s.hidden);
  switch (step.kind) {
    case StepKind::tokens:
      // Rows that are copied one by one where not all tokens count take half as long again.
      return p.copies_input ? 0 : 1e-6;
    case StepKind::copy_weight:
      return outputs * 2 * static_cast<double>(size_of(s.dtype)) / speed.memory;
    case StepKind::write_grad_weight:
      return p.grad_weight_sum ? outputs * 6 / speed.memory : 0;
    case StepKind::write_grad_input:
      return p.sum_rows > 0 ? speed.launch : 0;
    default:
      return 0;
  }
}

// True where rows of grad_weight are added to what is there.
inline bool adds_to_weight(const LinearShape& s, const LinearPlan& p) {
  return p.grad_weight_sum || (s.grad_weight_f32 && p.chunks > 1);
}

}  // namespace logitless::cuda
