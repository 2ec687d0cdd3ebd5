// SPDX-License-Identifier: Apache-2.0
// A call with grad_input_first can be run in three parts, between which the caller may enqueue work
// of its own, such as the exchange of grad_input over a group's ranks:
//   1  all steps up to the last that writes grad_input
//   2  through the next product of grad_weight: its first half, where the plan has halves
//   3  the rest
#pragma once

#include "src/cuda/linear/engine.h"
#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/steps.h"

namespace logitless::cuda {

// Visits the steps of one part, or all of them.
class Parts final : public StepVisitor {
 public:
  Parts(int part, StepVisitor* visitor) : part_(part), visitor_(visitor) {}

  void enumerate(const Engine& engine, const LinearShape& shape, const LinearPlan& plan) {
    if (part_ == 0) return engine.for_steps(shape, plan, visitor_);
    LastInput last;
    engine.for_steps(shape, plan, &last);
    last_input_ = last.place;
    engine.for_steps(shape, plan, this);
  }

  void visit(const Step& step) override {
    const int part = place_++ <= last_input_ ? 1 : halved_ ? 3 : 2;
    if (part == 2 && step.kind == StepKind::grad_weight) halved_ = true;
    if (part == part_) visitor_->visit(step);
  }

 private:
  struct LastInput final : StepVisitor {
    void visit(const Step& step) override {
      if (step.kind == StepKind::grad_input || step.kind == StepKind::write_grad_input ||
          step.kind == StepKind::both_gradients) {
        place = next;
      }
      ++next;
    }
    int64_t next = 0, place = -1;
  };

  int part_;
  StepVisitor* visitor_;
  int64_t last_input_ = -1, place_ = 0;
  bool halved_ = false;
};

}  // namespace logitless::cuda
