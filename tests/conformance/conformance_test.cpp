// SPDX-License-Identifier: Apache-2.0
// Compares every op of the case table, on every backend, with the double-precision reference: each
// option alone and in pairs, and every shape, with a bound per element and guarded memory.
#include <cstdio>
#include <string>

#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

void expect_ok(const Comparison& c, const std::string& what) {
  EXPECT_TRUE(c.ok()) << what << ": " << c.failures << " failures\n" << c.report;
  std::printf("[ ratio    ] %.3f of the bound at worst: %s\n", c.worst_ratio, c.worst.c_str());
}

class Conformance : public ConformanceTest {
 protected:
  // An eighth of the cases for one instruction set, chosen by a seed; the sets' eighths all differ.
  Part part_of(size_t set) const {
    const size_t seed =
        set * 3 + static_cast<size_t>(op_) * 5 + static_cast<size_t>(dtype_) + rotation();
    return {seed % 8, 8};
  }
};

TEST_P(Conformance, EveryOptionAloneAndInPairs) {
  expect_ok(judge_pairs(device_, op_, dtype_, eighth() ? part_of(0) : Part{}), "pairs");
}

TEST_P(Conformance, EveryShape) {
  expect_ok(judge_shapes(device_, op_, dtype_, eighth() ? part_of(0) : Part{}), "shapes");
}

// The tests above run the best instruction set; this one forces each of the others.
TEST_P(Conformance, EveryInstructionSet) {
  const std::vector<std::string> sets = device_.instruction_sets();
  for (size_t i = 1; i < sets.size(); ++i) {
    ASSERT_TRUE(device_.force_instruction_set(sets[i])) << sets[i];
    const Part part = full() ? Part{} : part_of(i);
    expect_ok(judge_pairs(device_, op_, dtype_, part), sets[i] + ", pairs");
    expect_ok(judge_shapes(device_, op_, dtype_, part), sets[i] + ", shapes");
  }
  device_.force_instruction_set("");
}

std::vector<Parameter> all_of_them() {
  std::vector<Parameter> all;
  for (const std::string& name : device_names()) {
    for (const OpKind op : kAllOps) {
      for (const DType dtype : inputs()) all.emplace_back(name, op, dtype);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Conformance, testing::ValuesIn(all_of_them()), parameter_name);

}  // namespace
}  // namespace logitless::conformance
