// SPDX-License-Identifier: Apache-2.0
// Helpers for tests of kept state: a Forward that keeps, the Backward after it, and a fixture.
#pragma once

#include <limits>

#include "judge.h"
#include "problem.h"
#include "suite.h"

namespace logitless::conformance {

using Forward = LinearCrossEntropyForward;
using Backward = LinearCrossEntropyBackward;

inline constexpr std::byte garbage{0xFF};  // NaN, which shows reads of unwritten memory
inline constexpr uint64_t whole = std::numeric_limits<uint64_t>::max();

// The shapes and key of the state that Forward keeps in `bytes`.
inline Kept kept_of(const TestDevice& device, Forward forward, uint64_t bytes) {
  place(forward, device.tensors());
  Kept kept;
  const Status status = kept_size(forward, device.execution(), bytes, &kept);
  EXPECT_TRUE(status.ok()) << status.message();
  return kept;
}

// A Forward and the Backward that follows it.
struct Steps {
  Problem<Backward> problem;
  Forward forward{};
  Kept kept;

  // Gives room for `columns` columns, a multiple of 64 (0: for all).
  Steps(const TestDevice& device, const Case& c, int64_t columns) : problem(build<Backward>(c)) {
    Backward& op = problem.op;
    forward = {.input = op.input,
               .weight = op.weight,
               .bias = op.bias,
               .target = op.target,
               .options = op.options,
               .weights = op.weights};
    kept = kept_of(device, forward, whole);
    if (columns > 0 && kept.columns > 0) {
      const uint64_t rows = static_cast<uint64_t>(kept.rows_shape[0] * kept.rows_shape[1]) * 4;
      const int64_t blocks = kept.shape[0] / ((c.shape.tokens + 63) / 64 * 64);
      kept = kept_of(device, forward,
                     rows + (kept.bytes - rows) / static_cast<uint64_t>(blocks) *
                                static_cast<uint64_t>(columns / 64));
    }
    const auto of_tokens = [&] { return problem.pool.reserve(DType::f32, {c.shape.tokens}); };
    forward.statistics.row_reference = of_tokens();
    forward.statistics.row_log_sum = of_tokens();
    if (op.grad_entropy) forward.statistics.entropy = of_tokens();
    if (kept.columns == 0) return;
    forward.kept = problem.pool.reserve(op.input.dtype, {kept.shape[0], kept.shape[1]});
    forward.kept_rows = problem.pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
  }

  // Gives Backward the state that Forward wrote.
  void hand_over(const Outcome& outcome) {
    Backward& op = problem.op;
    op.row_reference = forward.statistics.row_reference;
    op.row_log_sum = forward.statistics.row_log_sum;
    write_bits(op.row_reference, outcome.fields.at("row_reference"));
    write_bits(op.row_log_sum, outcome.fields.at("row_log_sum"));
    if (op.grad_entropy) {
      op.entropy = forward.statistics.entropy;
      write_bits(op.entropy, outcome.fields.at("entropy"));
    }
    if (kept.columns == 0) return;
    op.kept = forward.kept;
    op.kept_rows = forward.kept_rows;
    op.kept_key = kept.key;
    take_kept(outcome);
  }
  void take_kept(const Outcome& outcome) {
    write_bits(problem.op.kept, outcome.kept.at("kept"));
    write_bits(problem.op.kept_rows, outcome.kept.at("kept_rows"));
  }
};

class KeptState : public ConformanceTest {
 protected:
  // Runs Forward and gives Backward its state; false if a target out of range makes Forward fail.
  bool keep(Steps* steps, Memory memory = Memory::recommended) {
    const Outcome outcome =
        execute(device_, steps->forward, steps->problem.pool, {.memory = memory, .fill = garbage});
    if (!outcome.status.ok()) {
      const auto code = outcome.status.code();
      EXPECT_EQ(code, StatusCode::target_out_of_range) << outcome.status.message();
      return false;
    }
    EXPECT_TRUE(outcome.violations.empty()) << outcome.violations[0];
    steps->hand_over(outcome);
    return true;
  }
  Outcome backward(const Steps& steps, Memory memory = Memory::recommended) {
    return execute(device_, steps.problem.op, steps.problem.pool,
                   {.memory = memory, .fill = garbage});
  }
  void expect_judged(const Steps& steps, const Outcome& outcome, const std::string& what) {
    const Comparison result =
        compare(expected(device_, steps.problem.op, steps.problem.model), outcome);
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
  }
  Case plain(int64_t tokens, int64_t vocab) const {
    Case c{.op = op_, .shape = {tokens, 40, vocab}, .dtype = dtype_};
    c.saved_state = true;
    c.grad_loss = true;
    c.options.reduction = Reduction::none;
    c.options.out_of_range = OutOfRange::ignore;
    c.ignored = 0.1;
    return c;
  }
};

}  // namespace logitless::conformance
