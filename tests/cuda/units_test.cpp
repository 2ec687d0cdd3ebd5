// SPDX-License-Identifier: Apache-2.0
// A Forward on Hopper sums rows in units of eight tiles (src/cuda/linear/units.h), while with
// gradients another kernel combines the tiles. Both must have the same bits: around every boundary
// of units and of rounds over the multiprocessors, and whichever of the caller's rows count.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "tests/support/gather.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class CudaUnits : public ConformanceTest {
 protected:
  Case plain(Shape shape) const {
    Case c{.op = OpKind::linear_forward,
           .shape = shape,
           .dtype = dtype_,
           .grad_input = dtype_,
           .grad_weight = dtype_,
           .row_statistics = true};
    c.options.reduction = Reduction::none;
    return c;
  }
  void expect_same(bool in_runs) const;
};

// Returns the first field in which row k differs from row rows[k] of `whole`, or "".
std::string difference(const Fields& whole, const Fields& part, const std::vector<int64_t>& rows) {
  for (const auto& [name, field] : part) {
    if (name.starts_with("grad_")) continue;
    for (size_t k = 0; k < rows.size(); ++k) {
      const auto size = static_cast<size_t>(size_of(field.dtype));
      const auto bits = [&](const Field& f, size_t row) {
        return std::vector(f.bits.begin() + static_cast<std::ptrdiff_t>(row * size),
                           f.bits.begin() + static_cast<std::ptrdiff_t>((row + 1) * size));
      };
      const auto row = static_cast<size_t>(rows[k]);
      if (bits(field, k) == bits(whole.at(name), row)) continue;
      char text[160];
      std::snprintf(text, sizeof(text), "%s of row %zu, %.9g, is %.9g as row %zu", name.c_str(),
                    row, whole.at(name).value[row], field.value[k], k);
      return text;
    }
  }
  return "";
}

std::vector<int64_t> every(int64_t tokens) {
  std::vector<int64_t> rows(static_cast<size_t>(tokens));
  std::iota(rows.begin(), rows.end(), int64_t{0});
  return rows;
}

// The tokens that count.
std::vector<int64_t> counting(const Fields& fields) {
  std::vector<int64_t> rows;
  const Field& lse = fields.at("lse");  // 0 where a token does not count
  for (size_t k = 0; k < lse.value.size(); ++k) {
    if (lse.value[k] != 0) rows.push_back(static_cast<int64_t>(k));
  }
  return rows;
}

// The shapes have a tile or a unit minus a column; one unit and a tile or two; 69 units (more than
// a round of 66 clusters) and one or six tiles after a row's last unit; 71 units of few rows, less
// than a round of 132 blocks.
TEST_P(CudaUnits, TheLossAloneIsThatBesideGradients) {
  for (const Shape shape : {Shape{37, 64, 191}, Shape{70, 64, 1535}, Shape{520, 40, 1537},
                            Shape{9, 72, 1729}, Shape{1100, 40, 35401}, Shape{1030, 24, 36300},
                            Shape{9, 24, 110001}, Shape{200, 24, 110001}}) {
    Case c = plain(shape);
    const Outcome alone = run_case(device_, c);
    ASSERT_TRUE(alone.status.ok()) << alone.status.message();
    const std::vector<int64_t> rows = every(shape.tokens);
    const Outcome smallest = run_case(device_, c, {.memory = Memory::minimum});
    ASSERT_TRUE(smallest.status.ok()) << smallest.status.message();
    EXPECT_EQ(difference(alone.fields, smallest.fields, rows), "") << describe(c);
    c.op = OpKind::linear_forward_backward;
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome both = run_case(device_, c, {.memory = memory});
      ASSERT_TRUE(both.status.ok()) << both.status.message();
      EXPECT_EQ(difference(both.fields, alone.fields, rows), "") << describe(c);
    }
  }
}

// Rows that count are compacted, or, in a small workspace, loaded from the caller's input: one by
// one, or 64 neighbours at a time. The products must be the same, whatever lies between the rows
// and whatever depth remains after the last 64.
void CudaUnits::expect_same(bool in_runs) const {
  for (const Shape shape : {Shape{1300, 40, 1999}, Shape{700, 72, 1536}, Shape{90, 520, 333},
                            Shape{2600, 64, 35401}, Shape{77, 17, 200}}) {
    Case c = plain(shape);
    c.ignored = 0.4;
    using Op = LinearCrossEntropyForward;
    const Problem<Op> p = build<Op>(c);
    if (in_runs) {
      std::vector<double> target = read(p.op.target);
      for (size_t k = 0; k < target.size(); ++k)
        target[k] = k % 110 > 69 ? -100 : static_cast<double>(k % 100);
      write(p.op.target, target);
    }
    const Outcome some = execute(device_, p.op, p.pool);
    ASSERT_TRUE(some.status.ok()) << some.status.message();
    const std::vector<int64_t> rows = counting(some.fields);
    ASSERT_GT(rows.size(), static_cast<size_t>(shape.tokens / 3));
    ASSERT_LT(rows.size(), static_cast<size_t>(shape.tokens));
    const Problem<Op> dense = gather(p, rows);
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome all = execute(device_, dense.op, dense.pool, {.memory = memory});
      ASSERT_TRUE(all.status.ok()) << all.status.message();
      EXPECT_EQ(difference(some.fields, all.fields, rows), "") << describe(c);
    }
    // Workspaces that lead to chunks of tokens, or to one chunk without room for compacted rows.
    const uint64_t copy = static_cast<uint64_t>(shape.tokens * shape.hidden) * 2;
    const auto [least, most, alignment] = some.size;
    for (const uint64_t bytes : {least, std::max(least, most - std::min(most, copy / 2))}) {
      const Outcome other =
          execute(device_, p.op, p.pool, {.memory = Memory::exact, .bytes = bytes});
      ASSERT_TRUE(other.status.ok()) << other.status.message();
      EXPECT_EQ(difference(some.fields, other.fields, every(shape.tokens)), "") << describe(c);
    }
  }
}

TEST_P(CudaUnits, OfTheRowsThatCountAlone) { expect_same(false); }
TEST_P(CudaUnits, OfRowsThatCountInRuns) { expect_same(true); }

// Inputs with gaps between elements, or that tensor maps cannot address, are copied first. They
// give the same bits, even in the smallest workspace, where rows that count are copied one by one.
TEST_P(CudaUnits, OfRowsThatAreCopiedFirst) {
  const std::vector<int64_t> rows = every(600);
  for (const int64_t hidden : {72, 520}) {
    for (const double ignored : {0.0, 0.3}) {
      Case c = plain({600, hidden, 3100});
      c.ignored = ignored;
      Problem<LinearCrossEntropyForward> p = build<LinearCrossEntropyForward>(c);
      const Outcome direct = execute(device_, p.op, p.pool);
      ASSERT_TRUE(direct.status.ok()) << direct.status.message();
      const std::vector<double> values = read(p.op.input);
      for (const Layout& layout :
           {Layout{.stride = {hidden + 8, 1}}, Layout{.stride = {hidden + 3, 1}},
            Layout{.stride = {2 * hidden + 6, 2}}, Layout{.stride = {1, 600}},
            Layout{.offset = 1}}) {
        p.op.input = p.pool.add(dtype_, {600, hidden}, values, layout);
        for (const Memory memory : {Memory::recommended, Memory::minimum}) {
          const Outcome other = execute(device_, p.op, p.pool, {.memory = memory});
          ASSERT_TRUE(other.status.ok()) << other.status.message();
          EXPECT_EQ(difference(direct.fields, other.fields, rows), "")
              << describe(c) << ", stride " << layout.stride[0]
              << (memory == Memory::minimum ? ", minimum" : "");
        }
      }
    }
  }
}

// Only Hopper's engine adds in this order.
std::vector<std::string> hopper_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) {
    return name != "cuda" ||
           !device(name).batch_invariant({.op = OpKind::linear_forward, .dtype = DType::bf16});
  });
  return names;
}

constexpr OpKind kLossAlone[] = {OpKind::linear_forward};
constexpr DType kHalves[] = {DType::f16, DType::bf16};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaUnits);
INSTANTIATE_TEST_SUITE_P(All, CudaUnits,
                         testing::Combine(testing::ValuesIn(hopper_alone()),
                                          testing::ValuesIn(kLossAlone),
                                          testing::ValuesIn(kHalves)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
