// SPDX-License-Identifier: Apache-2.0
// The CPU backend allocates nothing while it runs: what it needs is the workspace.
#include <atomic>
#include <cstdlib>
#include <new>

#include "executors.h"
#include "problem.h"
#include "suite.h"

namespace {

std::atomic<int64_t> allocations{0};

void* allocate(size_t bytes, size_t alignment) {
  ++allocations;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace logitless::conformance {
namespace {

class Allocation : public ConformanceTest {};

TEST_P(Allocation, NoneWhileRunning) {
  if (!device_.has_threads()) return;
  const SerialExecutor serial(4);
  for (const Placement placement : {Placement::dense, Placement::strided}) {
    Case c{.op = op_, .shape = {70, 33, 515}, .dtype = dtype_, .placement = placement};
    c.ignored = 0.2;
    c.statistics = c.vocab_weight = c.token_weight = c.bias = true;
    c.bias_dtype = dtype_;
    c.options.label_smoothing = 0.1f;
    with_op(op_, [&](auto op) {
      const auto p = build<decltype(op)>(c);
      Execution execution = device_.execution();
      execution.executor = serial.get();
      WorkspaceSize size;
      ASSERT_TRUE(workspace(p.op, execution, &size).ok());
      const Bytes scratch(size.recommended + 1);
      const int64_t before = allocations;
      const Status status = run(p.op, {scratch.data(), size.recommended}, execution);
      EXPECT_EQ(allocations, before);
      EXPECT_TRUE(status.ok()) << status.message();
    });
  }
}

TEST(AllocationCount, IsKept) {
  const int64_t before = allocations;
  std::vector<int> one(3);
  EXPECT_GT(allocations, before) << one.size();
}

LOGITLESS_CONFORMANCE_SUITE(Allocation);

}  // namespace
}  // namespace logitless::conformance
