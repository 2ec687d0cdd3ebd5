// SPDX-License-Identifier: Apache-2.0
// A token's loss and statistics have the same bits in any batch, at any position, next to any other
// tokens and in any workspace.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <span>

#include "tests/support/gather.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

constexpr OpKind kForwardOps[] = {OpKind::forward, OpKind::forward_backward, OpKind::linear_forward,
                                  OpKind::linear_forward_backward};

class Invariance : public ConformanceTest {
 protected:
  // Whether the backend promises invariance for this case ("Determinism" of the contract). Prints
  // the cases where it does not.
  bool promised(const Case& c) const {
    if (device_.batch_invariant(c)) return true;
    std::printf("[  not promised ] %s: a token's bits may depend on its batch in %s\n",
                device_.name(), describe(c).c_str());
    return false;
  }
  // Cases: row_statistics alone, with more statistics, with many options; with few tokens, those of
  // kAlone, for which linear ops may have their own kernels; temperatures and all statistics; and
  // top-k.
  std::vector<Case> cases(Shape shape) const {
    Case c{.op = op_, .shape = shape, .dtype = dtype_, .row_statistics = true};
    c.options.reduction = Reduction::none;
    std::vector<Case> all(3, c);
    all[1].statistics = true;
    apply_everything(all[2]);
    all[2].options.reduction = Reduction::none;
    for (const Setting& setting : std::span(kAlone).subspan(1)) {
      if (is_linear(op_) && shape.tokens <= 100) setting.apply(all.emplace_back(c));
    }
    all.push_back(all[shape.tokens <= 100 ? 1 : 0]);
    all.back().temperatures = all.back().logprob = all.back().rank = true;
    all.back().sum_p_squared = all.back().mean_logit = all.back().max_logprob = true;
    all.back().mass_above = true;
    if (op_ == OpKind::linear_forward && device_.has_top()) {
      all.push_back(all[1]);
      all.back().listed = 20;
    }
    std::erase_if(all, [&](const Case& one) { return !promised(one); });
    return all;
  }
};

// Returns the first field in which row k of `part` differs from row rows[k] of `whole`, or "". A
// row may have several values.
std::string first_difference(const Fields& whole, const Fields& part,
                             const std::vector<int64_t>& rows) {
  for (const auto& [name, field] : part) {
    if (name.starts_with("grad_")) continue;
    const size_t values = field.value.size() / rows.size();
    const size_t size = values * static_cast<size_t>(size_of(field.dtype));
    const Field& from = whole.at(name);
    for (size_t k = 0; k < rows.size(); ++k) {
      if (std::memcmp(&field.bits[k * size], &from.bits[rows[k] * size], size) == 0) continue;
      char text[160];
      std::snprintf(text, sizeof(text),
                    "%s of token %lld starts with %.9g as row %zu of %zu and %.9g in the whole",
                    name.c_str(), static_cast<long long>(rows[k]), field.value[k * values], k,
                    rows.size(), from.value[rows[k] * values]);
      return text;
    }
  }
  return "";
}

std::vector<int64_t> range(int64_t first, int64_t end) {
  std::vector<int64_t> rows(end - first);
  std::iota(rows.begin(), rows.end(), first);
  return rows;
}

// Batches of one token, a few and many, at other positions and next to other tokens.
std::vector<std::vector<int64_t>> batches(int64_t tokens) {
  std::vector<std::vector<int64_t>> all;
  for (const int64_t row : {int64_t{0}, tokens / 3, tokens / 2 + 1, tokens - 1})
    all.push_back({row});
  for (const int64_t size : {2, 7, 8, 9, 33, 200, 300}) {
    if (size < tokens) all.push_back(range(tokens - size, tokens));
  }
  all.push_back(range(0, tokens));
  std::reverse(all.back().begin(), all.back().end());
  std::vector<int64_t> shuffled = range(0, tokens);
  Random random(7);
  for (int64_t i = tokens - 1; i > 0; --i) std::swap(shuffled[i], shuffled[random.below(i + 1)]);
  all.push_back(shuffled);
  std::vector<int64_t> repeated(41, tokens / 2);
  repeated[17] = 3 % tokens;
  all.push_back(repeated);
  return all;
}

template <class Op>
void expect_invariant(const TestDevice& device, const Case& c, size_t which_case) {
  const Problem<Op> p = build<Op>(c);
  const Outcome whole = execute(device, p.op, p.pool);
  ASSERT_TRUE(whole.status.ok()) << whole.status.message();
  size_t batch = 0;
  for (const std::vector<int64_t>& rows : batches(c.shape.tokens)) {
    if (!in_third(batch++, which_case)) continue;
    const Problem<Op> part = gather(p, rows);
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome outcome = execute(device, part.op, part.pool, {.memory = memory});
      ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
      EXPECT_EQ(first_difference(whole.fields, outcome.fields, rows), "") << describe(c);
      if (outcome.size.minimum == outcome.size.recommended) break;
    }
  }
}

TEST_P(Invariance, OfTheBatch) {
  size_t which_case = 0;
  for (const Shape& shape : {Shape{1024, 40, 300}, {70, 33, 1030}, {37, 257, 130}}) {
    for (const Case& c : cases(shape)) {
      ++which_case;
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        if constexpr (ForwardOp<Op>) expect_invariant<Op>(device_, c, which_case);
      });
    }
  }
}

TEST_P(Invariance, OfTheWorkspace) {
  size_t which_case = 0;
  for (const Shape& shape : {Shape{300, 40, 515}, Shape{33, 70, 2100}, Shape{8, 31, 1030}}) {
    for (const Case& c : cases(shape)) {
      ++which_case;
      size_t run = 0;
      const Outcome first = run_case(device_, c, {.memory = Memory::minimum});
      ASSERT_TRUE(first.status.ok()) << first.status.message();
      const auto [least, most, alignment] = first.size;
      const std::vector<int64_t> rows = range(0, shape.tokens);
      for (const uint64_t bytes :
           {least + 1, least + 4096, least + (most - least) / 7, least + (most - least) / 2,
            most - (most > least ? 1 : 0), most, most + 64, 2 * most, 5 * most + 1000003}) {
        if (!in_third(run++, which_case)) continue;
        const Outcome other = run_case(device_, c, {.memory = Memory::exact, .bytes = bytes});
        ASSERT_TRUE(other.status.ok()) << other.status.message();
        EXPECT_EQ(first_difference(first.fields, other.fields, rows), "")
            << describe(c) << ", workspace " << bytes;
      }
    }
  }
}

// Makes some rows whose targets are far below or above other columns, some columns with almost no
// probability, and one row of NaN.
template <class Op>
void put_far_rows(Problem<Op>* p, int64_t nan_row) {
  const auto [tokens, hidden, vocab] =
      std::array{p->op.input.shape[0], p->op.input.shape[1], p->op.weight.shape[0]};
  constexpr int64_t target = 600, loud = 300;
  std::vector<double> input = read(p->op.input), weight = read(p->op.weight);
  for (int64_t i = 0; i < tokens; ++i) {
    double* row = &input[i * hidden];
    row[hidden - 1] = i == 2 ? 100 : i == 3 ? -40 : 0;  // the target's logit
    row[hidden - 2] = i == 5 || i == 17 ? 200 : 0;      // one logit far above the target's
    row[hidden - 3] = 1;                                // 64 logits far below the target's
    if (i == nan_row) row[0] = std::nan("");
  }
  for (int64_t j = 0; j < vocab; ++j) {
    double* row = &weight[j * hidden];
    if (j == target) std::fill(row, row + hidden, 0.0);
    row[hidden - 1] = j == target ? 1 : 0;
    row[hidden - 2] = j == loud ? 1 : 0;
    row[hidden - 3] = j >= 256 && j < 320 ? -90 : 0;
  }
  write(p->op.input, input);
  write(p->op.weight, weight);
  write(p->op.target, std::vector<double>(tokens, target));
}
TEST_P(Invariance, BesideFarRows) {
  if (!is_linear(op_)) return;
  constexpr int64_t tokens = 24, nan_row = 9;
  for (const Setting& setting : kAlone) {
    Case c{.op = op_, .shape = {tokens, 16, 700}, .dtype = dtype_};
    setting.apply(c);
    c.options.reduction = Reduction::none;
    if (!promised(c)) continue;
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (ForwardOp<Op> && LinearOp<Op>) {
        Problem<Op> p = build<Op>(c);
        put_far_rows(&p, nan_row);
        const Outcome whole = execute(device_, p.op, p.pool);
        ASSERT_TRUE(whole.status.ok()) << whole.status.message();
        for (int64_t i = 0; i < tokens; ++i) {
          if (i == nan_row) continue;
          const Problem<Op> one = gather(p, {i});
          const Fields alone = execute(device_, one.op, one.pool).fields;
          EXPECT_EQ(first_difference(whole.fields, alone, {i}), "") << setting.name;
        }
      }
    });
  }
}

// A token's statistics do not depend on the reduction.
TEST_P(Invariance, OfTheReduction) {
  for (const bool all_statistics : {false, true}) {
    Case c{.op = op_, .shape = {130, 40, 300}, .dtype = dtype_, .statistics = all_statistics};
    c.row_statistics = true;
    c.options.reduction = Reduction::none;
    const Outcome none = run_case(device_, c);
    c.options.reduction = Reduction::sum;
    const Outcome sum = run_case(device_, c);
    ASSERT_TRUE(none.status.ok() && sum.status.ok());
    for (const auto& [name, field] : sum.fields) {
      if (name == "loss" || name.starts_with("grad_")) continue;
      EXPECT_EQ(field.bits, none.fields.at(name).bits) << name;
    }
  }
}

LOGITLESS_CONFORMANCE_SUITE_OF(Invariance, kForwardOps, few_inputs());

}  // namespace
}  // namespace logitless::conformance
