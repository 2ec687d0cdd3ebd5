// SPDX-License-Identifier: Apache-2.0
// Any workspace of at least the minimum gives right results. A run writes nothing beyond the
// workspace; with eight threads or on a GPU it uses all of its recommended size but for kSlack.
#include <algorithm>
#include <utility>

#include "tests/support/executors.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

// A workspace's last bytes may stay untouched: buffers are rounded up to the alignment, and the
// last tile's rows may be partly filled.
constexpr uint64_t kSlack = 1024;

class WorkspaceSizes : public ConformanceTest {
 protected:
  std::vector<Case> cases() const {
    std::vector<Case> all;
    for (const Shape& shape :
         {Shape{1, 7, 5}, Shape{33, 70, 515}, Shape{600, 24, 300}, Shape{9, 257, 2100}}) {
      Case c{.op = op_, .shape = shape, .dtype = dtype_};
      all.push_back(c);
      apply_everything(c);
      all.push_back(c);
      c.grad_weight = DType::bf16;
      c.placement = Placement::strided;
      all.push_back(c);
    }
    return all;
  }
};

TEST_P(WorkspaceSizes, AnySizeFromTheMinimumOn) {
  for (const Case& c : cases()) {
    const auto [least, most, alignment] = workspace_of(device_, c);
    EXPECT_LE(least, most);
    EXPECT_TRUE(alignment >= 1 && (alignment & (alignment - 1)) == 0) << alignment;
    if (most == 0) continue;
    const Comparison result =
        judge_sizes(device_, c,
                    {least, least + 1, least + (most - least) / 3, least + 2 * (most - least) / 3,
                     most, most + 1000, 3 * most});
    EXPECT_TRUE(result.ok()) << result.report;
  }
}

TEST_P(WorkspaceSizes, LessThanTheMinimumIsRefused) {
  for (const Case& c : cases()) {
    const uint64_t least = workspace_of(device_, c).minimum;
    if (least == 0) continue;
    for (const uint64_t bytes : {least - 1, uint64_t{0}}) {
      const Outcome outcome = run_case(device_, c, {.memory = Memory::exact, .bytes = bytes});
      EXPECT_EQ(outcome.status.code(), StatusCode::workspace_too_small);
      EXPECT_EQ(outcome.violations, std::vector<std::string>{});
      EXPECT_EQ(outcome.touched, 0u);
    }
  }
}

// `workspace` reads no data. If addresses are missing, its answer serves any.
TEST_P(WorkspaceSizes, AskedWithoutData) {
  for (const Case& c : cases()) {
    const WorkspaceSize with_data = workspace_of(device_, c);
    Case elsewhere = c;
    if (c.placement == Placement::dense) elsewhere.placement = Placement::unaligned;
    const WorkspaceSize unaligned = workspace_of(device_, elsewhere);
    with_any_op(op_, [&](auto op) {
      auto p = build<decltype(op)>(c);
      place(p.op, device_.tensors());
      logitless_op unused{};
      for_each_tensor(p.op, unused,
                      [](const char*, Access, TensorView& view, auto&&) { view.data = nullptr; });
      WorkspaceSize without;
      const Status status = workspace(p.op, device_.execution(), &without);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_GE(without.minimum, std::max(with_data.minimum, unaligned.minimum));
      EXPECT_GE(without.recommended, std::max(with_data.recommended, unaligned.recommended));
      if (device_.synchronous()) {  // such backends plan without addresses
        EXPECT_EQ(without.minimum, with_data.minimum);
        EXPECT_EQ(without.recommended, with_data.recommended);
      }
    });
  }
}

// The largest allowed sizes get an answer, although no machine has the memory.
TEST_P(WorkspaceSizes, OfTheLargestShapes) {
  if (!device_.synchronous()) return;  // a GPU may have lower limits
  constexpr int64_t most = int64_t{1} << 56, root = int64_t{1} << 28;
  for (const Shape& shape : {Shape{1, 1, most}, Shape{1, most, 1}, Shape{most, 1, 1},
                             Shape{root, root, root}, Shape{3, most / 3, 3}}) {
    if (!is_linear(op_) && shape.hidden == most) continue;
    Case c{.op = op_, .shape = {2, 3, 4}, .dtype = dtype_};
    apply_everything(c);
    c.teacher_hidden = 0;  // the same as the student's
    with_any_op(op_, [&](auto op) {
      auto p = build<decltype(op)>(c);
      place(p.op, device_.tensors());
      logitless_op unused{};
      for_each_tensor(p.op, unused, [&](const char*, Access, TensorView& view, auto&&) {
        view.data = nullptr;
        for (int32_t d = 0; d < view.rank; ++d) {
          const int64_t size = view.shape[d];
          if (size == 2) view.shape[d] = shape.tokens;
          if (size == 3) view.shape[d] = shape.hidden;
          if (size == 4) view.shape[d] = shape.vocab;
        }
        if (view.rank == 2) view.stride = {view.shape[1], 1};
      });
      WorkspaceSize size;
      const Status status = workspace(p.op, device_.execution(), &size);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_LE(size.minimum, size.recommended);
      const double rows = static_cast<double>(shape.tokens);
      if (device_.has_threads() && has_loss(op_)) {
        EXPECT_GE(static_cast<double>(size.minimum), 8 * rows);
      }
    });
  }
}

// Returns the end of the workspace's bytes that runs change. It runs twice, with tasks handed to
// threads in both orders and over two fill patterns.
uint64_t touched_end(const TestDevice& device, const Case& c, Memory memory, int threads,
                     uint64_t* given) {
  uint64_t end = 0;
  for (const bool backwards : {false, true}) {
    const SerialExecutor executor(threads, backwards);
    const Outcome outcome = run_case(device, c,
                                     {.memory = memory,
                                      .executor = device.has_threads() ? executor.get() : nullptr,
                                      .fill = backwards ? std::byte{0xA5} : std::byte{0x5A}});
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    end = std::max(end, outcome.touched);
    *given = outcome.given;
  }
  return end;
}

// A CPU plan of two heads ends with room for a packed tile of the weight, which a run of few tokens
// leaves untouched if multiply_unpacked serves. That depends on the weight's address, which a plan
// does not know. Rows whose elements are not contiguous are always packed.
uint64_t left_unpacked(const TestDevice& device, const Case& c) {
  const bool apart = c.placement == Placement::strided || c.placement == Placement::transposed;
  if (!device.has_threads() || !diverges(c.op) || apart) return 0;
  return uint64_t{192} * 4 * std::max(c.shape.hidden, c.teacher_hidden);
}

// Any number of threads uses all of the minimum. Eight threads or more use all of the recommended
// size, which has room for eight.
TEST_P(WorkspaceSizes, BytesAskedForAreBytesTouched) {
  // Only the reference has neither threads nor a queue; it needs no workspace.
  if (!device_.has_threads() && device_.synchronous()) return;
  std::vector<std::pair<Memory, int>> runs{{Memory::minimum, 1}, {Memory::recommended, 1}};
  if (device_.has_threads()) {
    runs = {{Memory::minimum, 1},
            {Memory::minimum, 5},
            {Memory::recommended, 8},
            {Memory::recommended, 11}};
  }
  for (Case c : cases()) {
    c.ignored = c.outside = 0;  // `workspace` does not read which tokens count
    for (const auto& [memory, threads] : runs) {
      uint64_t given = 0;
      const uint64_t end = touched_end(device_, c, memory, threads, &given);
      EXPECT_LE(given - end, kSlack + left_unpacked(device_, c))
          << describe(c) << ", " << threads << " threads, "
          << (memory == Memory::minimum ? "minimum" : "recommended") << ": " << end << " of "
          << given << " bytes touched";
    }
  }
}

LOGITLESS_CONFORMANCE_SUITE_OF(WorkspaceSizes, kAllOps, few_inputs());

}  // namespace
}  // namespace logitless::conformance
