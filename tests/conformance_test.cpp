// SPDX-License-Identifier: Apache-2.0
// Every op of every backend against the double-precision reference: each option alone and with each
// other, and every shape, with per-element bounds and guarded memory.
#include <cstdio>
#include <string>

#include "judge.h"
#include "suite.h"

namespace logitless::conformance {
namespace {

void expect_ok(const Comparison& c, const std::string& what) {
  EXPECT_TRUE(c.ok()) << what << ": " << c.failures << " failures\n" << c.report;
  std::printf("[ ratio    ] %.3f of the bound at worst: %s\n", c.worst_ratio, c.worst.c_str());
}

class Conformance : public ConformanceTest {};

TEST_P(Conformance, EveryOptionAloneAndInPairs) {
  expect_ok(judge_pairs(device_, op_, dtype_), "pairs");
}

TEST_P(Conformance, EveryShape) { expect_ok(judge_shapes(device_, op_, dtype_), "shapes"); }

// The best instruction set ran above; each of the others is forced in turn.
TEST_P(Conformance, EveryInstructionSet) {
  const std::vector<std::string> sets = device_.instruction_sets();
  const size_t step = full() ? 1 : 8;
  for (size_t i = 1; i < sets.size(); ++i) {
    ASSERT_TRUE(device_.force_instruction_set(sets[i])) << sets[i];
    expect_ok(judge_pairs(device_, op_, dtype_,
                          full() ? 0 : (i * 3 + static_cast<size_t>(op_)) % step, step),
              sets[i]);
    if (full()) expect_ok(judge_shapes(device_, op_, dtype_), sets[i]);
  }
  device_.force_instruction_set("");
}

LOGITLESS_CONFORMANCE_SUITE(Conformance);

}  // namespace
}  // namespace logitless::conformance
