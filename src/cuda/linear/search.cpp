// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/search.h"

#include <algorithm>
#include <functional>

#include "src/cuda/linear/plan_time.h"

namespace logitless::cuda {
namespace {

// Returns the plan with the fewest bytes, and among equals the fastest. The time is computed only
// where it is compared, since it takes longer than the rest.
LinearPlan smallest_of(const Engine& engine, const LinearShape& s, const DeviceSpeed& speed) {
  LinearPlan least;
  const auto timed = [&](LinearPlan p) {
    if (p.seconds == 0) p.seconds = predicted_time(engine, s, p, speed);
    return p;
  };
  const auto choose = [&](const LinearPlan& p) {
    if (least.bytes == 0 || p.bytes < least.bytes) {
      least = p;
    } else if (p.bytes == least.bytes) {
      least = timed(least);
      const LinearPlan alike = timed(p);
      if (alike.seconds < least.seconds) least = alike;
    }
  };
  engine.each_plan(s, speed, 0, std::ref(choose));
  return least.bytes == 0 ? least : engine.in_passes(s, speed, 0, 0, timed(least));
}

// Returns the fastest plan of `least.bytes` to `bytes`, and among equals the smallest. each_plan
// may offer smaller plans, which it left out of the search for the minimum because they are slow.
LinearPlan quickest_of(const Engine& engine, const LinearShape& s, const DeviceSpeed& speed,
                       const LinearPlan& least, uint64_t bytes) {
  if (bytes < least.bytes) return least;
  LinearPlan best;
  const auto choose = [&](const LinearPlan& thought) {
    if (thought.bytes > bytes || thought.bytes < least.bytes) return;
    LinearPlan p = thought;
    p.seconds = predicted_time(engine, s, p, speed);
    if (best.bytes == 0 || is_better(p, best)) best = p;
  };
  engine.each_plan(s, speed, bytes, std::ref(choose));
  return engine.in_passes(s, speed, least.bytes, bytes, best.bytes == 0 ? least : best);
}

}  // namespace

std::array<LinearPlan, 2> plans_of_passes(const Asked& asked, int64_t first_rows, uint64_t bytes) {
  const auto& [engine, s, speed] = asked;
  const uint64_t left = bytes - state_bytes(s);
  return {search(engine, first_pass(s, first_rows), speed, left).best,
          search(engine, second_pass(s, first_rows), speed, left).best};
}

std::vector<Planned> passes(const Asked& asked, uint64_t bytes) {
  const auto& [engine, s, speed] = asked;
  const LinearPlan p = asked.plan(bytes);
  if (p.kind != PlanKind::two_passes) return {{engine, s, p}};
  const auto [first, second] = plans_of_passes(asked, p.first_rows, bytes);
  return {{engine, first_pass(s, p.first_rows), first},
          {engine, second_pass(s, p.first_rows), second}};
}

Found search(const Engine& engine, const LinearShape& shape, const DeviceSpeed& speed,
             uint64_t bytes) {
  struct Answer {
    const Engine* engine = nullptr;
    LinearShape shape;
    DeviceSpeed speed;
    uint64_t bytes = 0;
    Found found;
  };
  constexpr size_t most = 24;
  thread_local std::array<Answer, most> answers;
  thread_local size_t next = 0;
  Answer answer{&engine, shape, speed, bytes, {}};
  bool knows_least = false;
  for (const Answer& known : answers) {
    if (known.engine != &engine || known.shape != shape || known.speed != speed) continue;
    if (known.bytes == bytes) return known.found;
    answer.found.least = known.found.least, knows_least = true;
  }
  auto& [least, best] = answer.found;
  if (!knows_least) least = smallest_of(engine, shape, speed);
  best = quickest_of(engine, shape, speed, least, bytes);
  engine.complete(shape, speed, &least);
  engine.complete(shape, speed, &best);
  answers[next++ % most] = answer;
  return answer.found;
}

// Returns the fastest plan in `bytes` that is also chosen, or ties with the choice, if a caller
// brings exactly that plan's bytes.
LinearPlan Asked::settled(uint64_t bytes) const {
  LinearPlan best = plan(bytes);
  for (int tries = 0; tries < 4; ++tries) {
    const LinearPlan again = plan(best.bytes);
    if (again.seconds <= best.seconds) break;
    best = again;
  }
  return best;
}

LinearPlan Asked::recommended() const {
  constexpr uint64_t mib = uint64_t{1} << 20;
  const uint64_t logits = uint64_t(shape.tokens) * shape.vocab;
  const uint64_t input_sums = shape.grad_input ? uint64_t(shape.tokens) * shape.hidden * 4 : 0;
  uint64_t sums = input_sums;
  if (shape.grad_weight && !(shape.kernels.direct_grad_weight && shape.grad_weight_f32)) {
    sums += uint64_t(shape.vocab) * shape.hidden * 4;
  }
  if (shape.copies_weight) sums += uint64_t(shape.vocab) * (shape.hidden + 8) * 4;
  const uint64_t quarter = logits + sums + 16 * mib;
  const uint64_t whole = logits * size_of(shape.dtype) + input_sums + 64 * mib;
  const LinearPlan small = settled(quarter);
  if (whole <= quarter) return small;
  const LinearPlan large = settled(whole);
  // A gain of 3 % by the model was about 5 % as measured on a GPU, with 12 shapes.
  return small.seconds > 1.03 * large.seconds ? large : small;
}

}  // namespace logitless::cuda
