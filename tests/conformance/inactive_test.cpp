// SPDX-License-Identifier: Apache-2.0
// Tokens without an upstream gradient in Backward get gradient rows of 0. Nothing of their rows is
// read, but they count in the normalizer. kept_inactive_test.cpp tests the same with kept state.
#include <algorithm>
#include <cmath>
#include <functional>

#include "tests/support/nonfinite.h"

namespace logitless::conformance {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_inactive(int64_t token) { return token % 5 == 1 || token % 7 == 3; }
// The number of tokens, and the one inactive token of some tests.
constexpr int64_t kAll = 37, kOne = 16;

// The upstream gradients that can be 0.
enum class Upstream { grad_loss, token_weight, statistics, statistics_alone, either };
constexpr Upstream kUpstreams[] = {Upstream::grad_loss, Upstream::token_weight,
                                   Upstream::statistics, Upstream::statistics_alone,
                                   Upstream::either};

// Sets the elements that `which` selects to 0, some of them to -0.
void clear(const TensorView& view, const std::function<bool(int64_t)>& which) {
  std::vector<double> values = read(view);
  for (size_t i = 0; i < values.size(); ++i) {
    if (which(static_cast<int64_t>(i))) values[i] = i % 2 == 0 ? 0.0 : -0.0;
  }
  write(view, values);
}

class InactiveTokens : public ConformanceTest {
 protected:
  Case plain(Reduction reduction, Upstream upstream) const {
    Case c{.op = op_, .shape = {kAll, 24, 131}, .dtype = dtype_, .bias = true};
    c.options.reduction = reduction;
    c.options.out_of_range = OutOfRange::ignore;
    c.ignored = 0.1;
    c.bias_dtype = dtype_;
    c.saved_state = c.token_weight = c.fault = true;
    c.grad_loss = upstream != Upstream::token_weight;
    if (upstream == Upstream::statistics || upstream == Upstream::statistics_alone)
      c.grad_lse = c.grad_target_logit = c.grad_entropy = true;
    return c;
  }
  // Clears the upstream gradients of this kind for the inactive tokens. Returns false, and clears
  // nothing, where such a token would not be inactive.
  template <class Op>
  bool clear_upstream(Problem<Op>* p, Upstream upstream) const {
    const bool each = p->op.options.reduction == Reduction::none;
    switch (upstream) {
      case Upstream::grad_loss:
        if (!each) return false;
        clear(p->op.grad_loss, is_inactive);
        return true;
      case Upstream::token_weight:
        clear(p->op.weights.token, is_inactive);
        return true;
      case Upstream::either:
        if (!each) return false;
        clear(p->op.grad_loss, [](int64_t i) { return is_inactive(i) && i % 2 == 0; });
        clear(p->op.weights.token, [](int64_t i) { return is_inactive(i) && i % 2 == 1; });
        return true;
      case Upstream::statistics_alone:
        write(p->op.grad_loss, std::vector<double>(element_count(p->op.grad_loss), 0.0));
        break;
      case Upstream::statistics:
        clear(p->op.weights.token, is_inactive);
        break;
    }
    for (const TensorView& view : {p->op.grad_lse, p->op.grad_target_logit, p->op.grad_entropy})
      clear(view, is_inactive);
    return true;
  }
  template <class Op>
  Outcome judged(const Problem<Op>& p, const std::string& what,
                 Memory memory = Memory::recommended) {
    const Outcome outcome = execute(device_, p.op, p.pool, {.memory = memory});
    const Comparison result = compare(expected(device_, p.op, p.model), outcome);
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
    return outcome;
  }
  // Calls f(problem with inactive tokens, description) for every reduction and kind of upstream
  // gradient that can make a token inactive.
  template <class F>
  void for_upstreams(F&& f) {
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (BackwardOnlyOp<Op>) {
        for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
          for (const Upstream upstream : kUpstreams) {
            Problem<Op> p = build<Op>(plain(reduction, upstream));
            if (!clear_upstream(&p, upstream)) continue;
            f(&p, "reduction " + std::to_string(static_cast<int>(reduction)) + ", upstream " +
                      std::to_string(static_cast<int>(upstream)));
          }
        }
      }
    });
  }
};

// Fills the rows of inactive tokens with NaN and infinities.
void poison(const TensorView& view) {
  std::vector<double> values = read(view);
  const size_t columns = values.size() / kAll;
  for (size_t k = 0; k < values.size(); ++k) {
    const double kinds[] = {kNan, kInf, -kInf};
    if (is_inactive(static_cast<int64_t>(k / columns))) values[k] = kinds[k % columns % 3];
  }
  write(view, values);
}

TEST_P(InactiveTokens, HaveZeroRowsWhateverTheirRowHolds) {
  for_upstreams([&](auto* p, const std::string& what) {
    for (const Memory memory : {Memory::recommended, Memory::minimum}) {
      const Outcome before = judged(*p, what, memory);
      for (const auto& [name, field] : before.fields) {
        if (name != "grad_input" && name != "grad_logits") continue;
        const size_t columns = field.value.size() / kAll;
        for (size_t k = 0; k < field.value.size(); ++k) {
          if (!is_inactive(static_cast<int64_t>(k / columns))) continue;
          ASSERT_EQ(field.value[k], 0) << what << ": " << name << " of token " << k / columns;
        }
      }
      const TensorView views[] = {rows_of(p->op), p->op.row_reference, p->op.row_log_sum,
                                  p->op.entropy};
      std::vector<std::vector<double>> clean;
      for (const TensorView& view : views) {
        clean.push_back(view ? read(view) : std::vector<double>{});
        if (view) poison(view);
      }
      const Outcome after = execute(device_, p->op, p->pool, {.memory = memory});
      EXPECT_EQ(differing_bits(before.fields, after.fields), "") << what;
      EXPECT_EQ(after.fault, 0) << what;
      for (size_t i = 0; i < clean.size(); ++i) {
        if (views[i]) write(views[i], clean[i]);
      }
    }
  });
}

// A gradient of 0 times an infinite or NaN weight is NaN, so such a token is active.
TEST_P(InactiveTokens, ZeroTimesInfinityIsActive) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (BackwardOnlyOp<Op>) {
      for (const double factor : {kInf, -kInf, kNan}) {
        for (const bool weight : {false, true}) {
          Case c = plain(Reduction::none, Upstream::grad_loss);
          c.ignored = 0;
          Problem<Op> p = build<Op>(c);
          const TensorView& zero = weight ? p.op.grad_loss : p.op.weights.token;
          const TensorView& other = weight ? p.op.weights.token : p.op.grad_loss;
          clear(zero, is_inactive);
          set(other, kOne, factor);
          // With 16-bit gradients a non-finite grad_loss may also change other rows, so only its
          // own is judged.
          const bool others = weight || dtype_ == DType::f32;
          const Fields fields = weight ? judged(p, "0 times no number").fields
                                       : execute(device_, p.op, p.pool).fields;
          const Field& field = fields.at(LinearOp<Op> ? "grad_input" : "grad_logits");
          const size_t columns = field.value.size() / kAll;
          for (int64_t i = 0; i < kAll; ++i) {
            const double x = field.value[static_cast<size_t>(i) * columns];
            if (i != kOne && !others) continue;
            EXPECT_EQ(std::isnan(x), i == kOne) << i << " " << factor;
          }
        }
      }
    }
  });
}

// An upstream gradient of any one statistic makes a token active, even if it is not finite.
TEST_P(InactiveTokens, AnyGradientOfAStatisticMakesATokenActive) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (BackwardOnlyOp<Op>) {
      for (const double value : {0.5, kNan}) {
        for (const int which : {0, 1, 2}) {
          Case c = plain(Reduction::none, Upstream::statistics_alone);
          c.ignored = 0;
          Problem<Op> p = build<Op>(c);
          const TensorView views[] = {p.op.grad_lse, p.op.grad_target_logit, p.op.grad_entropy};
          for (const TensorView& view : {p.op.grad_loss, views[0], views[1], views[2]})
            write(view, std::vector<double>(kAll, 0.0));
          set(views[which], kOne, value);
          // If one column's gradient is NaN, the other elements of its row have no bound.
          const Fields fields = std::isnan(value) ? execute(device_, p.op, p.pool).fields
                                                  : judged(p, std::to_string(which)).fields;
          const Field& field = fields.at(LinearOp<Op> ? "grad_input" : "grad_logits");
          const size_t columns = field.value.size() / kAll;
          bool any = false;
          for (size_t k = kOne * columns; k < (kOne + 1) * columns; ++k)
            any = any || field.value[k] != 0;
          EXPECT_TRUE(any) << which;
        }
      }
    }
  });
}

// Without any active token gradients are zeros, or, if accumulated, unchanged.
TEST_P(InactiveTokens, AllOfThem) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (BackwardOnlyOp<Op>) {
      for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
        for (const bool accumulate : {false, true}) {
          Case c = plain(reduction, Upstream::grad_loss);
          c.accumulate = accumulate && is_linear(op_);
          Problem<Op> p = build<Op>(c);
          write(p.op.grad_loss, std::vector<double>(element_count(p.op.grad_loss), 0.0));
          const TensorView& rows = rows_of(p.op);
          write(rows, std::vector<double>(element_count(rows), kNan));
          const Fields fields = judged(p, "all inactive").fields;
          for (const auto& [name, field] : fields) {
            std::vector<double> wanted(field.value.size(), 0.0);
            if constexpr (LinearOp<Op>) {
              if (c.accumulate && name == "grad_weight") wanted = read(p.op.grad_weight);
              if (c.accumulate && name == "grad_bias") wanted = read(p.op.grad_bias);
            }
            EXPECT_EQ(field.value, wanted) << name;
          }
        }
      }
    }
  });
}

// Inactive tokens get the gradients of ignored ones, with the normalizer that counts them.
TEST_P(InactiveTokens, AreIgnoredOnesThatCountInTheNormalizer) {
  for_upstreams([&](auto* p, const std::string& what) {
    const auto want = expected(device_, p->op, p->model);
    std::vector<double> target = read(p->op.target);
    int64_t counted = 0;
    for (size_t i = 0; i < target.size(); ++i) {
      const bool counts = target[i] >= 0 && target[i] < 131;
      counted += counts;
      if (is_inactive(static_cast<int64_t>(i))) {
        target[i] = static_cast<double>(p->op.options.ignore_index);
      }
    }
    write(p->op.target, target);
    if (p->op.options.reduction == Reduction::mean) {
      p->op.options.normalizer = static_cast<double>(counted);
    }
    const Comparison result = compare(want, execute(device_, p->op, p->pool));
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
  });
}

// With accumulation into grad_weight, and in place of the logits.
TEST_P(InactiveTokens, InPlaceAndAccumulating) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (BackwardOnlyOp<Op>) {
      Case c = plain(Reduction::none, Upstream::grad_loss);
      c.saved_state = false;
      c.in_place = !is_linear(op_);
      c.grad_input = is_linear(op_) ? DType::f32 : dtype_;
      c.accumulate = is_linear(op_);
      Problem<Op> p = build<Op>(c);
      clear(p.op.grad_loss, is_inactive);
      judged(p, "in place or accumulating");
    }
  });
}

// ForwardBackward multiplies an inactive token's row by 0, so a NaN there stays NaN.
TEST_P(InactiveTokens, KeepTheirNaNInForwardBackward) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op> && GradientOp<Op>) {
      Case c = plain(Reduction::none, Upstream::grad_loss);
      c.ignored = 0;
      Problem<Op> p = build<Op>(c);
      clear(p.op.weights.token, is_inactive);
      set(rows_of(p.op), kOne * rows_of(p.op).shape[1], kNan);
      const Fields fields = judged(p, "weights of 0").fields;
      const Field& rows = fields.at(LinearOp<Op> ? "grad_input" : "grad_logits");
      const size_t columns = rows.value.size() / kAll;
      for (size_t i = 0; i < kAll; ++i) {
        if (!is_inactive(static_cast<int64_t>(i))) continue;
        const bool nan = i == kOne;
        EXPECT_EQ(std::isnan(fields.at("loss").value[i]), nan) << i;
        EXPECT_EQ(std::isnan(rows.value[i * columns]), nan) << i;
      }
    }
  });
}
constexpr OpKind kGradientOps[] = {OpKind::backward, OpKind::forward_backward,
                                   OpKind::linear_backward, OpKind::linear_forward_backward};
LOGITLESS_CONFORMANCE_SUITE_OF(InactiveTokens, kGradientOps, inputs());

}  // namespace
}  // namespace logitless::conformance
