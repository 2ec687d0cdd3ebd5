// SPDX-License-Identifier: Apache-2.0
// A call gives the same bits in every run: with any previous contents of memory, on any number of
// threads, and while other calls run.
#include <array>
#include <cstring>
#include <thread>

#include "gtest/gtest.h"
#include "tests/support/executors.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

// Small and large calls, without options and with many, so that a call is one task, a few or many.
// The first has a single token and odd sizes: no other row writes the padding of its tiles.
std::vector<Case> cases_of(OpKind op, DType dtype) {
  const Case plain{.op = op, .dtype = dtype};
  Case everything = plain;
  apply_everything(everything);
  // Exponentials are kept, and their rows of no token.
  Case ignored = plain;
  ignored.ignored = 0.3;
  std::vector<Case> cases{everything, plain, plain, everything, everything, ignored};
  const Shape shapes[] = {{1, 257, 515},  {9, 70, 131},   {301, 40, 300},
                          {301, 40, 300}, {64, 24, 2100}, {301, 40, 300}};
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
      // The second run starts from outputs and a workspace full of NaN.
      const Outcome second = run_case(device_, c, {.memory = memory, .fill = std::byte{0xFF}});
      expect_same(first, second, c, "run twice");
    }
  }
}

TEST_P(Determinism, APlanGivesTheBitsOfRun) {
  std::vector<Case> cases = cases_of(op_, dtype_);
  for (const Placement placement : {Placement::strided, Placement::unaligned}) {
    cases.push_back({.op = op_, .shape = {70, 33, 515}, .dtype = dtype_, .placement = placement});
    apply_everything(cases.back());
  }
  for (const Case& c : cases) {
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome at_once = run_case(device_, c, {.memory = memory});
      const Outcome planned = run_case(device_, c, {.memory = memory, .by = By::plan});
      expect_same(at_once, planned, c, "by a plan");
    }
  }
}

// A plan for tensors of any address gives the results of `run`; the bits are equal where the
// device's kernels do not depend on alignment.
TEST_P(Determinism, APlanOfAnyAddressIsRight) {
  for (const Case& c : cases_of(op_, dtype_)) {
    const RunPlan any{.by = By::plan_of_any_address};
    const Comparison result = judge(device_, c, any);
    EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
    if (!device_.has_threads()) continue;
    expect_same(run_case(device_, c), run_case(device_, c, any), c, "by a plan of any address");
  }
}

// Several threads run one plan at once, each on its own tensors and workspace.
TEST_P(Determinism, OnePlanServesManyThreads) {
  if (!device_.has_threads()) return;
  Case c = cases_of(op_, dtype_)[3];
  with_any_op(op_, [&](auto op) {
    using Op = decltype(op);
    const auto p = build<Op>(c);
    Plan plan;
    ASSERT_TRUE(plan.create(p.op, device_.execution()).ok());
    WorkspaceSize size;
    ASSERT_TRUE(plan.size(&size).ok());
    std::array<Fields, 4> results;
    std::array<Status, 4> statuses;
    std::vector<std::thread> threads;
    for (size_t i = 0; i < results.size(); ++i) {
      threads.emplace_back([&, i] {
        const auto own = build<Op>(c);
        const Bytes scratch(size.recommended);
        for (int k = 0; k < 3 && statuses[i].ok(); ++k) {
          statuses[i] = plan.run(Addresses(own.op), {scratch.data(), size.recommended});
        }
        logitless_op unused{};
        for_each_tensor(own.op, unused,
                        [&](const char* name, Access access, const TensorView& view, auto&&) {
                          if (!view || access == Access::read) return;
                          Field& field = results[i][name];
                          field.value = read(view);
                          field.bits.resize(field.value.size() * sizeof(double));
                          std::memcpy(field.bits.data(), field.value.data(), field.bits.size());
                        });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < results.size(); ++i) {
      ASSERT_TRUE(statuses[i].ok()) << statuses[i].message();
      EXPECT_EQ(differing_bits(results[0], results[i]), "") << "thread " << i;
    }
  });
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

// A workspace sized for one thread serves 64 threads, and the reverse.
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

LOGITLESS_CONFORMANCE_SUITE_OF(Determinism, kAllOps, few_inputs());

}  // namespace
}  // namespace logitless::conformance
