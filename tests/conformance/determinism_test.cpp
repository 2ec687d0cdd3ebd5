// SPDX-License-Identifier: Apache-2.0
// A call gives the same bits run after run, whatever memory held before, on any number of threads,
// next to other calls.
#include <thread>

#include "gtest/gtest.h"
#include "tests/support/executors.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

// The cases are small and large, plain and with everything, so that a call is one task, few and
// many. One of them is a single tile of odd width, whose padding no other tile has written.
std::vector<Case> cases_of(OpKind op, DType dtype) {
  const Case plain{.op = op, .dtype = dtype};
  Case everything = plain;
  apply_everything(everything);
  std::vector<Case> cases{everything, plain, plain, everything, everything};
  const Shape shapes[] = {
      {1, 257, 515}, {9, 70, 131}, {301, 40, 300}, {301, 40, 300}, {64, 24, 2100}};
  for (size_t i = 0; i < cases.size(); ++i) cases[i].shape = shapes[i], cases[i].seed = i + 1;
  return cases;
}

class Determinism : public ConformanceTest {
 protected:
  // Fails where the two runs differ.
  void expect_same(const Outcome& a, const Outcome& b, const Case& c, const std::string& what) {
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    ASSERT_TRUE(b.status.ok()) << b.status.message();
    EXPECT_EQ(differing_bits(a.fields, b.fields), "") << describe(c) << ": " << what;
    for (const std::string& violation : b.violations) ADD_FAILURE() << violation;
  }
};

TEST_P(Determinism, RunTwice) {
  for (const Case& c : cases_of(op_, dtype_)) {
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome first = run_case(device_, c, {.memory = memory, .fill = std::byte{0}});
      // What outputs and workspace held before must not matter either: here it is NaN.
      const Outcome second = run_case(device_, c, {.memory = memory, .fill = std::byte{0xFF}});
      expect_same(first, second, c, "run twice");
    }
  }
}

TEST_P(Determinism, AnyNumberOfThreads) {
  if (!device_.has_threads()) return;
  for (const Case& c : cases_of(op_, dtype_)) {
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const SerialExecutor one(1);
      const Outcome first = run_case(device_, c, {.memory = memory, .executor = one.get()});
      for (const int threads : {2, 3, 7, 64}) {
        const ThreadExecutor many(threads);
        expect_same(first, run_case(device_, c, {.memory = memory, .executor = many.get()}), c,
                    std::to_string(threads) + " threads");
      }
      for (const bool backwards : {false, true}) {
        const SerialExecutor claims(64, backwards);
        expect_same(first, run_case(device_, c, {.memory = memory, .executor = claims.get()}), c,
                    "one thread as 64");
      }
    }
  }
}

// The workspace that one thread asks for serves 64, and the other way round.
TEST_P(Determinism, AnyNumberOfThreadsInOneWorkspace) {
  if (!device_.has_threads()) return;
  const SerialExecutor one(1), many(64);
  for (const Case& c : cases_of(op_, dtype_)) {
    const uint64_t small = run_case(device_, c, {.executor = one.get()}).size.recommended;
    const uint64_t large = run_case(device_, c, {.executor = many.get()}).size.recommended;
    for (const uint64_t bytes : {small, large}) {
      const auto run = [&](const Executor* executor) {
        return run_case(device_, c,
                        {.memory = Memory::exact, .bytes = bytes, .executor = executor});
      };
      const Outcome first = run(one.get());
      if (!first.status.ok()) {
        ADD_FAILURE() << first.status.message();
        continue;
      }
      expect_same(first, run(many.get()), c, "64 threads in the workspace of one");
      const ThreadExecutor seven(7);
      expect_same(first, run(seven.get()), c, "7 threads in the same workspace");
    }
  }
}

TEST_P(Determinism, OwnPoolOfAnySize) {
  if (!device_.has_threads()) return;
  for (const Case& c : cases_of(op_, dtype_)) {
    logitless_set_num_threads(1);
    const Outcome first = run_case(device_, c);
    for (const int threads : {2, 3, 7, 64}) {
      logitless_set_num_threads(threads);
      expect_same(first, run_case(device_, c), c, "pool of " + std::to_string(threads));
    }
    logitless_set_num_threads(0);
  }
}

TEST_P(Determinism, CallsAtTheSameTime) {
  Case c{.op = op_, .shape = {60, 40, 300}, .dtype = dtype_};
  apply_everything(c);
  const Outcome alone = run_case(device_, c);
  std::vector<Outcome> together(4);
  std::vector<std::thread> threads;
  for (Outcome& outcome : together) {
    threads.emplace_back([&] { outcome = run_case(device_, c); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Outcome& outcome : together) expect_same(alone, outcome, c, "four calls at once");
}

LOGITLESS_CONFORMANCE_SUITE_OF(Determinism, kOps, few_inputs());

}  // namespace
}  // namespace logitless::conformance
