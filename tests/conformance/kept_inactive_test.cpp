// SPDX-License-Identifier: Apache-2.0
// Kept state with tokens that have no upstream gradient. Belongs to the suite of kept_test.cpp.
#include <algorithm>
#include <cmath>
#include <functional>

#include "tests/support/kept.h"

namespace logitless::conformance {
namespace {

using Which = std::function<bool(int64_t)>;  // which tokens are inactive

// Patterns of inactive tokens: at random, a run of more than 64, all but one, all.
const Which kPatterns[] = {
    [](int64_t i) { return i * 2654435761u % 97 < 73; },
    [](int64_t i) { return i >= 20 && i < 115; },
    [](int64_t i) { return i != 77; },
    [](int64_t) { return true; },
};

void clear(const TensorView& view, const Which& inactive) {
  if (!view) return;
  std::vector<double> values = read(view);
  for (size_t i = 0; i < values.size(); ++i) {
    if (inactive(static_cast<int64_t>(i))) values[i] = 0;
  }
  write(view, values);
}

void clear_upstream(const Backward& op, const Which& inactive) {
  for (const TensorView& view : {op.grad_loss, op.grad_lse, op.grad_target_logit, op.grad_entropy})
    clear(view, inactive);
}

// Upstream gradients that take different code paths.
const Setting kKinds[] = {
    {"losses", [](Case&) {}},
    {"entropy", [](Case& c) { c.grad_entropy = true; }},
    {"every statistic", [](Case& c) { c.grad_lse = c.grad_target_logit = c.grad_entropy = true; }},
    {"a bias and a softcap", [](Case& c) { c.bias = true, c.options.softcap = 20; }},
};

TEST_P(KeptState, ServesInactiveTokens) {
  for (const Setting& kind : kKinds) {
    for (const int64_t columns : {0, 192}) {
      for (const Which& inactive : kPatterns) {
        for (const bool consumes : {false, true}) {
          Case c = plain(130, 421);
          c.shape.hidden = 24;
          c.fault = true;
          kind.apply(c);
          Steps steps(device_, c, columns);
          clear_upstream(steps.problem.op, inactive);
          ASSERT_TRUE(keep(&steps));
          if (consumes && steps.kept.columns == 0) continue;
          steps.problem.op.consume_kept = consumes;
          const Outcome outcome = backward(steps, consumes ? Memory::minimum : Memory::recommended);
          expect_judged(steps, outcome, std::string(kind.name) + ", " + std::to_string(columns));
          const Field& grad = outcome.fields.at("grad_input");
          for (size_t k = 0; k < grad.value.size(); ++k) {
            if (!inactive(static_cast<int64_t>(k) / c.shape.hidden)) continue;
            ASSERT_EQ(grad.value[k], 0) << kind.name << " " << k;
          }
        }
      }
    }
  }
}

// Nothing is read of inactive tokens: their kept rows are NaN, and they are given another log sum
// than the kept one.
TEST_P(KeptState, OfAnInactiveTokenIsNotRead) {
  for (const Setting& kind : kKinds) {
    for (const int64_t columns : {0, 192}) {
      Fields clean;
      for (const bool poisoned : {false, true}) {
        Case c = plain(130, 421);
        c.shape.hidden = 24;
        c.fault = true;
        kind.apply(c);
        Steps steps(device_, c, columns);
        Backward& op = steps.problem.op;
        clear_upstream(op, kPatterns[0]);
        std::vector<double> input = read(op.input);
        for (size_t k = 0; poisoned && k < input.size(); ++k) {
          if (kPatterns[0](static_cast<int64_t>(k) / 24)) input[k] = k % 2 == 0 ? NAN : INFINITY;
        }
        write(op.input, input);
        ASSERT_TRUE(keep(&steps));
        std::vector<double> log_sum = read(op.row_log_sum);
        for (size_t i = 0; poisoned && i < log_sum.size(); ++i) {
          if (kPatterns[0](static_cast<int64_t>(i))) log_sum[i] = 17;
        }
        write(op.row_log_sum, log_sum);
        const Outcome outcome = backward(steps);
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
        EXPECT_EQ(outcome.fault, 0) << kind.name;
        if (!poisoned) clean = outcome.fields;
        EXPECT_EQ(differing_bits(clean, outcome.fields), "") << kind.name << ", " << columns;
      }
    }
  }
}

// A Backward with few active tokens that consumes the kept state marks all of it as consumed.
TEST_P(KeptState, ConsumedByFewServesNone) {
  Case c = plain(130, 421);
  c.ignored = 0;
  c.fault = true;
  Steps steps(device_, c, 0);
  if (steps.kept.columns == 0 || !device_.keeps_state(dtype_)) return;
  ASSERT_TRUE(keep(&steps));
  Backward& op = steps.problem.op;
  const std::vector<double> usual = read(op.grad_loss);
  clear_upstream(op, kPatterns[0]);
  op.consume_kept = true;
  const Outcome first = backward(steps);
  expect_judged(steps, first, "consumed");
  steps.take_kept(first);
  write(op.grad_loss, usual);
  const Outcome second = backward(steps);
  EXPECT_EQ(second.fault, 2);
  for (const double x : second.fields.at("grad_input").value) ASSERT_TRUE(std::isnan(x));
}

// If the only upstream gradient is 0, every token is inactive: nothing is read, and infinite
// exponentials give gradients of 0.
TEST_P(KeptState, OfNoGradientAtAll) {
  for (const bool accumulates : {false, true}) {
    Case c = plain(130, 421);
    c.data = Data::large;
    c.options.reduction = Reduction::sum;
    c.accumulate = accumulates;
    c.temperatures = c.fault = true;
    Steps steps(device_, c, 0);
    ASSERT_TRUE(keep(&steps));
    Backward& op = steps.problem.op;
    write(op.grad_loss, {0.0});
    std::vector<double> temperature = read(op.weights.temperature);
    temperature[3] = -1;
    write(op.weights.temperature, temperature);
    expect_judged(steps, backward(steps), accumulates ? "added" : "written");
  }
}

// A Backward with few active tokens, or none, leaves kept state that serves the next one.
TEST_P(KeptState, ServesTheOthersAfterFew) {
  for (const int64_t columns : {0, 192}) {
    for (const Which& inactive : kPatterns) {
      Case c = plain(130, 421);
      c.shape.hidden = 24;
      c.grad_lse = true;
      Steps steps(device_, c, columns);
      if (steps.kept.columns == 0) return;
      ASSERT_TRUE(keep(&steps));
      Backward& op = steps.problem.op;
      const std::vector<double> usual = read(op.grad_loss), lse = read(op.grad_lse);
      const Outcome fresh = backward(steps);
      clear_upstream(op, inactive);
      const Outcome few = backward(steps);
      ASSERT_TRUE(few.status.ok()) << few.status.message();
      steps.take_kept(few);
      write(op.grad_loss, usual);
      write(op.grad_lse, lse);
      const Outcome second = backward(steps);
      expect_judged(steps, second, "all after few");
      EXPECT_EQ(differing_bits(fresh.fields, second.fields), "") << columns;
    }
  }
}

}  // namespace
}  // namespace logitless::conformance
