// SPDX-License-Identifier: Apache-2.0
// What a plan owns, and what it refuses when it runs: docs/semantics.md, "Plans". determinism_test
// compares its bits with those of `run`.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace logitless {
namespace {

constexpr int64_t n = 3, d = 4, v = 5;

// A head's loss and gradient of N = 3, D = 4, V = 5 in f32, with a normalizer.
struct Head {
  alignas(64) std::array<float, n * d> input{};
  alignas(64) std::array<float, v * d + 4> weight{}, grad_weight{};
  alignas(64) std::array<int64_t, n> target{1, 2, 3};
  alignas(64) float loss = -1;
  std::vector<std::max_align_t> memory = std::vector<std::max_align_t>(1 << 16);

  Head() {
    for (size_t i = 0; i < input.size(); ++i) input[i] = 0.25f * static_cast<float>(i % 5);
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = 0.5f * static_cast<float>(i % 3);
  }
  LinearCrossEntropyForwardBackward op(double normalizer = 2) {
    LinearCrossEntropyForwardBackward made{
        .input = matrix_view(input.data(), DType::f32, n, d),
        .weight = matrix_view(weight.data(), DType::f32, v, d),
        .target = vector_view(target.data(), DType::i64, n),
        .loss = scalar_view(&loss, DType::f32),
        .grad_weight = matrix_view(grad_weight.data(), DType::f32, v, d)};
    made.options.normalizer = normalizer;
    return made;
  }
  Workspace workspace(uint64_t bytes) {
    void* start = memory.data();
    size_t room = memory.size() * sizeof(memory[0]);
    std::align(64, bytes, start, room);
    return {start, bytes};
  }
};

uint64_t bytes_of(const Plan& plan) {
  WorkspaceSize size;
  EXPECT_TRUE(plan.size(&size).ok());
  EXPECT_EQ(size.minimum, size.recommended);
  return size.minimum;
}

void expect_refused(const Status& status, StatusCode code, const std::string& part) {
  EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(code)) << status.message();
  EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status.message();
}

TEST(PlanRules, AddressesStandInTheOrderOfTheCStruct) {
  Head head;
  const Addresses found(head.op());
  const std::span<void* const> addresses = found;
  const void* wanted[] = {head.input.data(), head.weight.data(), head.target.data(), &head.loss,
                          head.grad_weight.data()};
  ASSERT_EQ(addresses.size(), std::size(wanted));
  for (size_t i = 0; i < std::size(wanted); ++i) EXPECT_EQ(addresses[i], wanted[i]) << i;
}

// A plan copies what it was created from: options, views and the executor may change or go.
TEST(PlanRules, OwnsWhatItWasCreatedFrom) {
  Head head;
  Plan plan;
  int regions = 0;
  {
    auto executor = std::make_unique<Executor>(
        Executor{sizeof(Executor), 2, &regions,
                 [](void* state, int64_t count, void (*fn)(void*, int64_t), void* context) {
                   ++*static_cast<int*>(state);
                   for (int64_t i = 0; i < count; ++i) fn(context, i);
                 }});
    auto op = std::make_unique<LinearCrossEntropyForwardBackward>(head.op());
    ASSERT_TRUE(plan.create(*op, {.executor = executor.get()}).ok());
    executor->parallel_for = nullptr;
    op->options.softcap = 1;
  }
  const auto op = head.op();
  ASSERT_TRUE(run(op, head.workspace(bytes_of(plan)), {}).ok());
  const float expected = head.loss;
  head.loss = -1;
  ASSERT_TRUE(plan.run(Addresses(op), head.workspace(bytes_of(plan))).ok());
  EXPECT_EQ(head.loss, expected);
}

TEST(PlanRules, RefusesOtherAddresses) {
  Head head;
  const auto op = head.op();
  Plan plan;
  ASSERT_TRUE(plan.create(op, {}).ok());
  const Workspace memory = head.workspace(bytes_of(plan));
  const Addresses found(op);
  const auto at = [&](size_t i, void* address) {
    const std::span<void* const> all = found;
    std::vector<void*> addresses(all.begin(), all.end());
    addresses[i] = address;
    return plan.run(addresses, memory);
  };
  const auto before = head.grad_weight;
  char* weight = reinterpret_cast<char*>(head.weight.data());
  expect_refused(at(1, weight + 4), StatusCode::invalid_argument, "weight is at address");
  expect_refused(at(1, weight + 8), StatusCode::invalid_argument, "multiples of 16, as when");
  expect_refused(at(1, weight + 2), StatusCode::misaligned, "weight");
  expect_refused(at(1, nullptr), StatusCode::invalid_argument, "weight has shape [5, 4] and NULL");
  expect_refused(at(4, weight), StatusCode::invalid_argument, "grad_weight overlaps weight");
  expect_refused(at(4, memory.data), StatusCode::invalid_argument,
                 "grad_weight overlaps the workspace");
  expect_refused(plan.run({}, memory), StatusCode::invalid_argument, "addresses: 0 are given");
  EXPECT_EQ(head.loss, -1);
  EXPECT_EQ(head.grad_weight, before);
  EXPECT_TRUE(at(1, weight).ok());
}

// A plan created without or with an unaligned address runs on aligned and unaligned tensors.
TEST(PlanRules, APlanOfNoAddressTakesAny) {
  Head head;
  const auto op = head.op();
  auto moved = op, nowhere = op;
  moved.weight.data = head.weight.data() + 1;
  nowhere.weight.data = nullptr;
  for (const auto& created : {moved, nowhere}) {
    Plan plan;
    ASSERT_TRUE(plan.create(created, {}).ok());
    for (const auto& ran : {op, moved}) {
      const Status status = plan.run(Addresses(ran), head.workspace(bytes_of(plan)));
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
}

TEST(PlanRules, AWorkspaceHasItsBytes) {
  Head head;
  auto op = head.op();
  // Enough tokens for plans of several sizes.
  constexpr int64_t tokens = 512;
  std::vector<float> input(tokens * d, 0.5f);
  std::vector<int64_t> target(tokens, 1);
  op.input = matrix_view(input.data(), DType::f32, tokens, d);
  op.target = vector_view(target.data(), DType::i64, tokens);
  WorkspaceSize size;
  ASSERT_TRUE(workspace(op, {}, &size).ok());
  ASSERT_LT(size.minimum, size.recommended);
  Plan plan;
  ASSERT_TRUE(plan.create(op, {}).ok());
  EXPECT_EQ(bytes_of(plan), size.recommended);
  expect_refused(plan.create(op, {}, size.minimum - 1), StatusCode::workspace_too_small, "bytes");
  EXPECT_EQ(bytes_of(plan), size.recommended) << "a refused create left the plan as it was";
  expect_refused(plan.run(Addresses(op), head.workspace(size.recommended - 1)),
                 StatusCode::workspace_too_small, "workspace");
  ASSERT_TRUE(plan.create(op, {}, size.minimum).ok());
  EXPECT_EQ(bytes_of(plan), size.minimum);
  // Workspace beyond the size that the plan was created for is not touched.
  const Workspace more = head.workspace(size.recommended);
  char* end = static_cast<char*>(more.data) + size.minimum;
  std::memset(end, 0x5A, size.recommended - size.minimum);
  ASSERT_TRUE(plan.run(Addresses(op), more).ok());
  for (uint64_t i = 0; i < size.recommended - size.minimum; ++i) ASSERT_EQ(end[i], 0x5A) << i;
}

TEST(PlanRules, TheNormalizerMayChange) {
  Head head;
  Plan plan, counted;
  ASSERT_TRUE(plan.create(head.op(2), {}).ok());
  ASSERT_TRUE(counted.create(head.op(0), {}).ok());
  const auto op = head.op(7);
  const Workspace memory = head.workspace(bytes_of(plan));
  ASSERT_TRUE(run(op, memory, {}).ok());
  const float of_seven = head.loss;
  const auto grad_of_seven = head.grad_weight;
  ASSERT_TRUE(plan.run(Addresses(op), memory, nullptr, 7).ok());
  EXPECT_EQ(head.loss, of_seven);
  EXPECT_EQ(head.grad_weight, grad_of_seven);
  ASSERT_TRUE(plan.run(Addresses(op), memory).ok());
  EXPECT_NE(head.loss, of_seven);
  head.loss = -1;
  for (const double wrong : {-1.0, double(INFINITY), double(NAN)}) {
    expect_refused(plan.run(Addresses(op), memory, nullptr, wrong), StatusCode::invalid_argument,
                   "normalizer is");
  }
  expect_refused(counted.run(Addresses(op), memory, nullptr, 7), StatusCode::invalid_argument,
                 "normalizer is 7; allowed: 0");
  EXPECT_EQ(head.loss, -1);
}

// A part other than 0 needs an op with grad_input_first, which only a Backward of a head has.
TEST(PlanRules, PartsAreThoseOfABackwardWithGradInputFirst) {
  Head head;
  alignas(64) std::array<float, n * d> grad_input{};
  LinearCrossEntropyBackward op{
      .input = matrix_view(head.input.data(), DType::f32, n, d),
      .weight = matrix_view(head.weight.data(), DType::f32, v, d),
      .target = vector_view(head.target.data(), DType::i64, n),
      .grad_input = matrix_view(grad_input.data(), DType::f32, n, d),
      .grad_weight = matrix_view(head.grad_weight.data(), DType::f32, v, d)};
  Plan plan, ordered;
  ASSERT_TRUE(plan.create(op, {}).ok());
  op.grad_input_first = true;
  ASSERT_TRUE(ordered.create(op, {}).ok());
  const Workspace memory = head.workspace(bytes_of(ordered));
  const auto run = [&](const Plan& p, int part) {
    return p.run(Addresses(op), memory, nullptr, 0, part);
  };
  expect_refused(run(plan, 1), StatusCode::invalid_argument, "part is 1; allowed: 0, since");
  expect_refused(run(ordered, 4), StatusCode::invalid_argument, "part is 4; allowed: 0 to 3");
  expect_refused(run(ordered, -1), StatusCode::invalid_argument, "part is -1; allowed: 0 to 3");
  EXPECT_EQ(head.grad_weight[0], 0);
  ASSERT_TRUE(run(ordered, 0).ok());
  const auto whole = head.grad_weight;
  const auto whole_input = grad_input;
  head.grad_weight.fill(0), grad_input.fill(0);
  ASSERT_TRUE(run(ordered, 1).ok());
  EXPECT_EQ(grad_input, whole_input);
  grad_input.fill(7);  // after part 1 it is the caller's
  ASSERT_TRUE(run(ordered, 2).ok());
  ASSERT_TRUE(run(ordered, 3).ok());
  EXPECT_EQ(head.grad_weight, whole);
  EXPECT_EQ(grad_input[0], 7);
  logitless_op other = LOGITLESS_OP_INIT(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD);
  other.grad_input_first = 1;
  logitless_workspace_size size = LOGITLESS_WORKSPACE_SIZE_INIT;
  logitless_status status = LOGITLESS_STATUS_INIT;
  EXPECT_EQ(logitless_workspace(&other, nullptr, &size, &status), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(status.message, "grad_input_first is set"), nullptr) << status.message;
}

TEST(PlanRules, NothingIsNoPlan) {
  Head head;
  Plan plan;
  WorkspaceSize size;
  expect_refused(plan.size(&size), StatusCode::invalid_argument, "plan is NULL");
  expect_refused(plan.run({}, {}), StatusCode::invalid_argument, "plan is NULL");
  ASSERT_TRUE(plan.create(head.op(), {}).ok());
  Plan other = std::move(plan);
  expect_refused(plan.size(&size), StatusCode::invalid_argument, "plan is NULL");  // NOLINT
  EXPECT_TRUE(other.size(&size).ok());
  expect_refused(other.size(nullptr), StatusCode::invalid_argument, "size is NULL");
  logitless_plan_destroy(nullptr);
}

}  // namespace
}  // namespace logitless
