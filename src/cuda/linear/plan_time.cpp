// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/plan_time.h"

#include <algorithm>
#include <cmath>

namespace logitless::cuda {
namespace {

class Price final : public Estimate {
 public:
  Price(const Engine& engine, const LinearShape& shape, const LinearPlan& plan,
        const DeviceSpeed& speed)
      : engine_(engine), s_(shape), p_(plan), speed_(speed) {
    engine.for_steps(shape, plan, this);
  }
  void visit(const Step& step) override { sums_[depth_] += engine_.seconds(s_, p_, speed_, step); }
  int64_t begin_repeat(int64_t) override {
    sums_[++depth_] = 0;
    return 1;
  }
  void end_repeat(int64_t count) override {
    const double each = sums_[depth_--];
    sums_[depth_] += static_cast<double>(count) * each;
  }
  double seconds() const { return sums_[0]; }

 private:
  const Engine& engine_;
  const LinearShape& s_;
  const LinearPlan& p_;
  const DeviceSpeed& speed_;
  int depth_ = 0;
  double sums_[4] = {};  // by depth of repetition: the call's steps, a chunk's, a panel's
};

}  // namespace

double predicted_time(const Engine& engine, const LinearShape& shape, const LinearPlan& plan,
                      const DeviceSpeed& speed) {
  LinearShape some = shape;
  some.tokens = std::max<int64_t>(shape.tokens, 1);
  const Price price(engine, some, plan, speed);
  // seconds are rounded to this, so that plans with the same steps tie
  constexpr double unit = 1e-14;
  return std::round((price.seconds() + 30 * speed.launch) / unit) * unit;
}

double shared_step_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                        const Step& step) {
  const auto outputs = [&] {
    return static_cast<double>(s.rows_of_weight()) * static_cast<double>(s.hidden);
  };
  switch (step.kind) {
    case StepKind::tokens:
      // Prefers a compacted copy: without it, if some tokens do not count, the caller's rows are
      // copied one by one, which takes about 1.5 times as long.
      return p.copies_input ? 0 : 1e-6;
    case StepKind::copy_weight:
      return outputs() * 2 * static_cast<double>(size_of(s.dtype)) / speed.memory;
    case StepKind::write_grad_weight:
      return sums_grad_weight(s, p) ? outputs() * 6 / speed.memory : 0;
    case StepKind::write_grad_input:
      return p.sum_rows > 0 ? speed.launch : 0;
    default:
      return 0;
  }
}

}  // namespace logitless::cuda
