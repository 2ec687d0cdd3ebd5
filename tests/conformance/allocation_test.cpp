// SPDX-License-Identifier: Apache-2.0
// The CPU backend allocates nothing in a run, for any op and options and even if the run fails: the
// workspace is all it needs. Only starting the threads of the library's own pool, once, allocates.
#include <algorithm>
#include <cstdlib>
#include <set>
#include <string_view>
#include <vector>

#include "tests/support/allocation_count.h"
#include "tests/support/executors.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class Allocation : public ConformanceTest {
 protected:
  void expect_none(const Case& c, const Executor* executor, Memory memory) {
    with_op(op_, [&](auto op) {
      const auto p = build<decltype(op)>(c);
      Execution execution = device_.execution();
      execution.executor = executor;
      WorkspaceSize size;
      ASSERT_TRUE(workspace(p.op, execution, &size).ok()) << describe(c);
      const uint64_t bytes = memory == Memory::minimum ? size.minimum : size.recommended;
      const Bytes scratch(bytes + 1);
      expect_none(p.op, {scratch.data(), bytes}, execution, StatusCode::ok, describe(c));
      if (size.minimum == 0) return;
      expect_none(p.op, {scratch.data(), size.minimum - 1}, execution,
                  StatusCode::workspace_too_small, describe(c));
    });
  }
  template <class Op>
  void expect_none(const Op& op, const Workspace& scratch, const Execution& execution,
                   StatusCode wanted, const std::string& what) {
    const int64_t before = allocations();
    const Status status = run(op, scratch, execution);
    const int64_t after = allocations();
    EXPECT_EQ(after, before) << what;
    EXPECT_EQ(status.code(), wanted) << what << ": " << status.message();
    Plan plan;
    if (!plan.create(op, execution, scratch.bytes).ok()) return;
    const Addresses addresses(op);
    const int64_t between = allocations();
    const Status run_again = plan.run(addresses, scratch, execution.stream);
    EXPECT_EQ(allocations(), between) << what << " by a plan";
    EXPECT_EQ(run_again.code(), wanted) << what << ": " << run_again.message();
  }
  // Each option of the contract alone.
  std::vector<Case> options() const {
    std::vector<Case> all;
    for (const Pair& pair : feature_pairs(op_, dtype_)) {
      const Case c = case_of(op_, dtype_, pair);
      if (pair.first == pair.second && !is_refused(device_, c)) all.push_back(c);
    }
    return all;
  }
  // Without options and with many of them, in every placement of tensors.
  std::vector<Case> placements() const {
    std::vector<Case> all;
    for (const Placement placement :
         {Placement::dense, Placement::padded, Placement::strided, Placement::transposed,
          Placement::broadcast, Placement::unaligned}) {
      all.push_back({.op = op_, .shape = {70, 33, 515}, .dtype = dtype_, .placement = placement});
      Case everything = all.back();
      apply_everything(everything);
      all.push_back(everything);
    }
    return all;
  }
};

TEST_P(Allocation, NoneWhileRunning) {
  if (!device_.has_threads()) return;
  const SerialExecutor serial(4);
  const std::vector<Case> options = this->options(), placements = this->placements();
  for (size_t i = 0; i < options.size(); ++i) {
    if (eighth() && i % 8 != 0) continue;
    expect_none(options[i], serial.get(), i % 2 == 0 ? Memory::recommended : Memory::minimum);
  }
  // Starts the pool's threads, once per process.
  run_case(device_, placements.front());
  for (const Case& c : placements) {
    expect_none(c, serial.get(), Memory::minimum);
    if (c.placement == Placement::dense) expect_none(c, nullptr, Memory::recommended);
  }
}

// The table of cases has no Combine.
TEST_P(Allocation, NoneOfACombine) {
  if (!device_.has_threads() || op_ != OpKind::softmax || dtype_ != DType::f32) return;
  constexpr int64_t shards = 3, tokens = 700, vocab = 12;
  std::vector<float> states(shards * tokens, 0.5f), weights(vocab, 1), written(11 * tokens);
  constexpr int64_t listed = 4;
  std::vector<int64_t> indices(shards * tokens * listed, 1), argmax(tokens);
  std::vector<float> lists(shards * tokens * listed, 0.5f);
  std::vector<float> top(tokens * listed);
  std::vector<int64_t> top_ids(tokens * listed);
  Combine op;
  op.options = {.label_smoothing = 0.1f, .vocab_total = vocab};
  float* next = written.data();
  const logitless_op unused{};
  for_each_tensor(op, unused, [&](std::string_view name, Access access, TensorView& view, auto&&) {
    static const std::set<std::string_view> left_out{"rank", "mass_above", "fault", "normalizer",
                                                     "temperature"};
    if (left_out.contains(name)) return;
    if (name == "target") {
      view = vector_view(indices.data(), DType::i64, tokens);
    } else if (name.starts_with("shard_top")) {
      const bool index = name == "shard_top_ids";
      view = matrix_view(index ? static_cast<void*>(indices.data()) : lists.data(),
                         index ? DType::i64 : DType::f32, shards, tokens * listed);
    } else if (name == "top_logits") {
      view = matrix_view(top.data(), DType::f32, tokens, listed);
    } else if (name == "top_ids") {
      view = matrix_view(top_ids.data(), DType::i64, tokens, listed);
    } else if (name.starts_with("shard_")) {
      const bool index = name == "shard_argmax";
      view = matrix_view(index ? static_cast<void*>(indices.data()) : states.data(),
                         index ? DType::i64 : DType::f32, shards, tokens);
    } else if (access == Access::read) {
      const bool of_classes = name == "vocab_weight";
      view = vector_view(of_classes ? weights.data() : states.data(), DType::f32,
                         of_classes ? vocab : tokens);
    } else if (name == "argmax") {
      view = vector_view(argmax.data(), DType::i64, tokens);
    } else {
      view = vector_view(next, DType::f32, name == "loss" ? 1 : tokens);
      next += tokens;
    }
  });
  const SerialExecutor serial(4);
  Execution execution = device_.execution();
  execution.executor = serial.get();
  WorkspaceSize size;
  ASSERT_TRUE(workspace(op, execution, &size).ok());
  const Bytes scratch(size.minimum);
  expect_none(op, {scratch.data(), size.minimum}, execution, StatusCode::ok, "combine");
  std::fill(indices.begin(), indices.end(), vocab);
  expect_none(op, {scratch.data(), size.minimum}, execution, StatusCode::target_out_of_range,
              "combine");
}

// Covers a Forward that keeps state, and a Backward whose kept state no Forward has written.
TEST_P(Allocation, NoneWithKeptState) {
  if (!device_.has_threads() || dtype_ == DType::f16) return;
  const SerialExecutor serial(4);
  Case c{.op = op_, .shape = {70, 33, 515}, .dtype = dtype_};
  c.saved_state = true;
  with_op(op_, [&](auto op) {
    if constexpr (KeepingOp<decltype(op)>) {
      auto p = build<decltype(op)>(c);
      const LinearCrossEntropyForward forward{
          .input = p.op.input, .weight = p.op.weight, .target = p.op.target};
      Execution execution = device_.execution();
      execution.executor = serial.get();
      Kept kept;
      ASSERT_TRUE(kept_size(forward, execution, UINT64_MAX, &kept).ok());
      p.op.kept = p.pool.reserve(dtype_, {kept.shape[0], kept.shape[1]});
      p.op.kept_rows = p.pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
      if constexpr (GradientOp<decltype(op)>) p.op.kept_key = kept.key;
      WorkspaceSize size;
      const Status status = workspace(p.op, execution, &size);
      ASSERT_TRUE(status.ok()) << status.message();
      const Bytes scratch(size.minimum);
      expect_none(p.op, {scratch.data(), size.minimum}, execution, StatusCode::ok, describe(c));
    }
  });
}

// A refusal's message is written to the caller's memory, without an allocation.
TEST_P(Allocation, NoneWhereACallIsRefused) {
  if (!device_.has_threads()) return;
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    Case c{.op = op_, .shape = {7, 5, 9}, .dtype = dtype_};
    const auto p = build<Op>(c);
    const Bytes memory(1 << 20);
    const Workspace scratch{memory.data(), memory.size()};
    const Execution execution = device_.execution();
    Op wrong = p.op;
    TensorView& view = [&]() -> TensorView& {
      if constexpr (LinearOp<Op>) {
        return wrong.weight;
      } else {
        return wrong.logits;
      }
    }();
    view.rank = 1;
    expect_none(wrong, scratch, execution, StatusCode::wrong_shape, "rank");
    wrong = p.op, view.stride[0] = -1;
    expect_none(wrong, scratch, execution, StatusCode::invalid_argument, "stride");
    wrong = p.op, view.data = nullptr;
    expect_none(wrong, scratch, execution, StatusCode::invalid_argument, "data");
    wrong = p.op, view.dtype = DType::i64;
    expect_none(wrong, scratch, execution, StatusCode::wrong_dtype, "dtype");
    if constexpr (LossOp<Op>) {
      wrong = p.op;
      write(wrong.target, std::vector<double>(7, 9));
      expect_none(wrong, scratch, execution, StatusCode::target_out_of_range, "target");
    }
  });
}

TEST(AllocationCount, IsKept) {
  const int64_t before = allocations();
  std::vector<int> one(3);
  EXPECT_GT(allocations(), before) << one.size();
  const int64_t between = allocations();
  void* volatile memory = std::malloc(7);
  std::free(memory);
  if (counts_malloc()) {
    EXPECT_GT(allocations(), between);
  }
}

LOGITLESS_CONFORMANCE_SUITE(Allocation);

}  // namespace
}  // namespace logitless::conformance
