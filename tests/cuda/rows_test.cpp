// SPDX-License-Identifier: Apache-2.0
// Rows of given logits that a cluster of 2, 4 or 8 blocks shares, and rows too long for a cluster,
// which are read twice: compared with the reference, in place, at unaligned addresses, in batches.
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

// Rows of these lengths take clusters of 1, 2, 4 and 8 blocks; the longest are read twice.
constexpr int64_t kVocabularies[] = {19000, 33003, 50257, 100001, 128256, 200003, 950001};
constexpr OpKind kRowOps[] = {OpKind::softmax, OpKind::forward, OpKind::backward,
                              OpKind::forward_backward};

class CudaRows : public ConformanceTest {
 protected:
  void expect_right(const Case& c) {
    const Comparison result = judge(device_, c);
    EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
  }
};

TEST_P(CudaRows, AreRight) {
  for (const int64_t vocab : kVocabularies) {
    Case c{.op = op_, .shape = {3, 1, vocab}, .dtype = dtype_};
    c.grad_input = dtype_;
    expect_right(c);
    c.in_place = true;
    expect_right(c);
  }
}

TEST_P(CudaRows, AreRightWithEveryOption) {
  for (const int64_t vocab : kVocabularies) {
    Case c{.op = op_, .shape = {3, 1, vocab}, .dtype = dtype_};
    apply_everything(c);
    c.ignored = c.outside = 0;
    expect_right(c);
    c.placement = Placement::strided;
    expect_right(c);
  }
}

// If a row's token does not count, the row's blocks write zeros instead: whole words and single
// elements at the ends, in place or not. They must not touch its statistics.
TEST_P(CudaRows, AreRightBesideTokensThatDoNotCount) {
  if (!has_loss(op_)) return;
  for (const int64_t vocab : {301, 19000, 33003, 50257, 128256, 950001}) {
    Case c{.op = op_, .shape = {6, 1, vocab}, .dtype = dtype_};
    c.grad_input = dtype_;
    c.ignored = 0.4;
    c.outside = 0.2;
    c.statistics = has_forward(op_);
    expect_right(c);
    c.in_place = true;
    expect_right(c);
    c.in_place = false;
    c.grad_input = dtype_ == DType::f32 ? DType::bf16 : DType::f32;
    c.placement = vocab % 2 == 0 ? Placement::unaligned : Placement::strided;
    expect_right(c);
  }
}

// Rows may start while tokens are still being compacted, by one block or by many.
TEST_P(CudaRows, AreRightWhileThousandsOfTokensArePrepared) {
  if (!has_loss(op_)) return;
  for (const int64_t tokens : {8192, 30000}) {
    for (const double ignored : {0.0, 0.9, 1.0}) {
      for (const Reduction reduction : {Reduction::mean, Reduction::none}) {
        Case c{.op = op_, .shape = {tokens, 1, 5}, .dtype = dtype_, .ignored = ignored};
        c.options.reduction = reduction;
        c.vocab_weight = true;
        expect_right(c);
      }
    }
  }
}

// A cluster's blocks end at different times, while blocks of the next cluster start.
TEST_P(CudaRows, KeepTheirBitsAmongMany) {
  for (const int64_t vocab : {int64_t{50257}, int64_t{128256}}) {
    Case c{.op = op_, .shape = {300, 1, vocab}, .dtype = dtype_, .in_place = true};
    c.grad_input = dtype_;
    c.statistics = has_forward(op_);
    const Outcome first = run_case(device_, c);
    ASSERT_TRUE(first.status.ok()) << first.status.message();
    for (int run = 0; run < 3; ++run) {
      const Outcome again = run_case(device_, c);
      for (const auto& [name, field] : again.fields) {
        EXPECT_EQ(field.bits == first.fields.at(name).bits, true) << name << ", " << describe(c);
      }
    }
  }
}

std::vector<std::string> cuda_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaRows);
INSTANTIATE_TEST_SUITE_P(All, CudaRows,
                         testing::Combine(testing::ValuesIn(cuda_alone()),
                                          testing::ValuesIn(kRowOps), testing::ValuesIn(inputs())),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
