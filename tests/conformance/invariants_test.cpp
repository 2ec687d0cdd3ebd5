// SPDX-License-Identifier: Apache-2.0
// Properties beyond the table of cases: ignored rows change nothing, rows of a gradient sum to 0, a
// common shift of logits costs no accuracy, gradients are linear in grad_loss, and micro-batches
// add up to the batch.
#include <array>
#include <cmath>
#include <utility>

#include "tests/support/gather.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class Invariants : public ConformanceTest {
 protected:
  // Calls f(problem) if the op of the case has a loss.
  template <class F>
  void with_problem(const Case& c, F&& f) {
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (LossOp<Op>) f(build<Op>(c));
    });
  }
  template <class Op>
  Fields run(const Problem<Op>& p, Memory memory = Memory::recommended) {
    const Outcome outcome = execute(device_, p.op, p.pool, {.memory = memory});
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    return outcome.fields;
  }
};

void expect_zero_rows(const Fields& fields, const std::vector<double>& target, double ignore_index,
                      int64_t reduced) {
  for (const auto& [name, field] : fields) {
    if (name == "grad_weight" || name == "grad_bias" || (name == "loss" && reduced != 0)) continue;
    const size_t columns = field.value.size() / target.size();
    for (size_t k = 0; k < field.value.size(); ++k) {
      if (target[k / columns] != ignore_index) continue;
      EXPECT_EQ(field.value[k], name == "argmax" || name == "rank" ? -1 : 0)
          << name << " of ignored token " << k / columns;
    }
  }
}

// NaN and infinities in the rows of ignored tokens change no bit of anything.
TEST_P(Invariants, IgnoredRowsAreNothing) {
  for (const bool outside : {false, true}) {
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
      for (const Shape& shape : {Shape{9, 19, 37}, Shape{70, 33, 515}}) {
        Case c{.op = op_, .shape = shape, .dtype = dtype_};
        apply_everything(c);
        c.ignored = outside ? 0 : 0.4;
        c.outside = outside ? 0.4 : 0;
        c.options.reduction = reduction;
        with_problem(c, [&](auto p) {
          const Fields clean = run(p);
          std::vector<double> target = read(p.op.target), values = read(rows_of(p.op));
          const size_t columns = values.size() / target.size();
          static constexpr double kGarbage[] = {NAN, INFINITY, -INFINITY};
          for (size_t k = 0; k < values.size(); ++k) {
            double& t = target[k / columns];
            if (t < 0 || t >= static_cast<double>(shape.vocab)) values[k] = kGarbage[k % 3];
          }
          write(rows_of(p.op), values);
          for (double& t : target) t = t < 0 || t >= static_cast<double>(shape.vocab) ? -100 : t;
          // The token weights of ignored tokens may be NaN too.
          std::vector<double> weight = read(p.op.weights.token);
          for (size_t i = 0; i < weight.size(); ++i) weight[i] = target[i] < 0 ? NAN : weight[i];
          write(p.op.weights.token, weight);
          const Fields garbage = run(p);
          EXPECT_EQ(differing_bits(clean, garbage), "") << describe(c);
          expect_zero_rows(garbage, target, -100, reduction == Reduction::none ? 0 : 1);
        });
      }
    }
  }
}

// sum_j (p_j - [j = t]) is 0, to the rounding of the probabilities.
TEST_P(Invariants, GradientRowsSumToZero) {
  if (is_linear(op_)) return;
  Case c{.op = op_, .shape = {33, 1, 1030}, .dtype = dtype_};
  c.options.reduction = Reduction::none;
  with_problem(c, [&](auto p) {
    const Fields fields = run(p);
    if (!fields.contains("grad_logits")) return;
    const std::vector<double>& gradient = fields.at("grad_logits").value;
    for (int64_t i = 0; i < c.shape.tokens; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < c.shape.vocab; ++j) sum += gradient[i * c.shape.vocab + j];
      // The contract's bound B with entropy and |log s| at most log V; twice B for the target's
      // column.
      const double log_v = std::log2(static_cast<double>(c.shape.vocab));
      EXPECT_LE(std::fabs(sum), 2 * 4 * 0x1p-24 * (3 * log_v + 6)) << "row " << i;
    }
  });
}

// grad_bias is the sum of the gradient's rows, each of which sums to 0.
TEST_P(Invariants, GradBiasSumsToZero) {
  if (!is_linear(op_)) return;
  Case c{.op = op_, .shape = {33, 40, 515}, .dtype = dtype_, .bias_dtype = dtype_, .bias = true};
  c.options.reduction = Reduction::none;
  with_problem(c, [&](auto p) {
    const Fields fields = run(p);
    if (!fields.contains("grad_bias")) return;
    double sum = 0, magnitude = 0;
    for (const double g : fields.at("grad_bias").value) sum += g, magnitude += std::fabs(g);
    const double unit = dtype_ == DType::f32 ? 0x1p-24 : dtype_ == DType::f16 ? 0x1p-11 : 0x1p-8;
    EXPECT_LE(std::fabs(sum), (dtype_ == DType::f32 ? 100 : 2) * unit * magnitude);
  });
}

// A class that is the target of one token gets one large term and hundreds of small terms of the
// same sign, each of which could vanish when the sum is rounded.
TEST_P(Invariants, ManySmallTermsAfterALargeOne) {
  if (!is_linear(op_) || !has_gradient(op_)) return;
  Case c{.op = op_,
         .shape = {261, 17, 17001},
         .dtype = dtype_,
         .data = Data::constant,
         .wants_grad_input = false,
         .wants_grad_bias = true};
  const Comparison result = judge(device_, c);
  EXPECT_TRUE(result.ok()) << result.report;
}

// A common offset of a row's logits that f32 holds exactly costs no accuracy.
TEST_P(Invariants, ShiftOfTheLogits) {
  if (is_linear(op_) || dtype_ != DType::f32) return;
  for (const double shift : {64.0, 8192.0}) {
    Case c{.op = op_, .shape = {9, 1, 515}, .dtype = dtype_};
    c.options.reduction = Reduction::none;
    with_problem(c, [&](auto p) {
      std::vector<double> logits = read(rows_of(p.op));
      for (double& z : logits) z = std::nearbyint(z * 256) / 256;
      write(rows_of(p.op), logits);
      const reference::Result want = expected(device_, p.op, p.model);
      for (double& z : logits) z += shift;
      write(rows_of(p.op), logits);
      // The shifted result is compared within the bounds of the unshifted logits.
      const Comparison result = compare(want, run(p));
      EXPECT_TRUE(result.ok()) << "shift " << shift << "\n" << result.report;
    });
  }
}
TEST_P(Invariants, ShiftOfTheProducts) {
  if (!is_linear(op_) || has_gradient(op_)) return;
  constexpr int64_t tokens = 9, hidden = 64, vocab = 515;
  for (const auto& [shift, biased] : std::array<std::pair<double, bool>, 4>{
           {{64, false}, {8192, false}, {64, true}, {8192, true}}}) {
    Case c{.op = op_, .shape = {tokens, hidden, vocab}, .dtype = dtype_, .bias = biased};
    c.options.reduction = Reduction::none;
    with_problem(c, [&](auto p) {
      if constexpr (LinearOp<decltype(p.op)>) {
        // Products are multiples of a quarter; the first element of the hidden axis is the shift.
        std::vector<double> input = read(p.op.input), weight = read(p.op.weight);
        for (double& x : input) x = std::nearbyint(x * 2) / 2;
        for (double& x : weight) x = std::nearbyint(x * 2) / 2;
        for (int64_t i = 0; i < tokens; ++i) input[i * hidden] = 1;
        const auto write_column = [&](double value) {
          for (int64_t j = 0; j < vocab; ++j) weight[j * hidden] = value;
          write(p.op.weight, weight);
        };
        write(p.op.input, input);
        if (p.op.bias) write(p.op.bias, std::vector<double>(vocab, 0));
        write_column(0);
        const reference::Result want = expected(device_, p.op, p.model);
        write_column(shift);
        const Comparison result = compare(want, run(p));
        EXPECT_TRUE(result.ok()) << "shift " << shift << (biased ? ", a bias" : "") << "\n"
                                 << result.report;
      }
    });
  }
}

// grad_loss times a power of two multiplies every gradient by it, to the bit.
TEST_P(Invariants, LinearInGradLoss) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
    Case c{.op = op_, .shape = {33, 40, 300}, .dtype = dtype_, .grad_loss = true};
    c.options.reduction = reduction;
    with_problem(c, [&](auto p) {
      using Op = decltype(p.op);
      if constexpr (GradientOp<Op>) {
        const Fields once = run(p);
        std::vector<double> upstream = read(p.op.grad_loss);
        for (double& g : upstream) g *= 8;
        write(p.op.grad_loss, upstream);
        const Fields eight = run(p);
        for (const auto& [name, field] : once) {
          if (!name.starts_with("grad_")) continue;
          for (size_t k = 0; k < field.value.size(); ++k) {
            // Leaves out values so small that one of the two runs may have flushed them to 0.
            if (std::fabs(field.value[k]) < 1e-30) continue;
            ASSERT_EQ(eight.at(name).value[k], 8 * field.value[k]) << name << " " << k;
          }
        }
        for (double& g : upstream) g = 0;
        write(p.op.grad_loss, upstream);
        for (const auto& [name, field] : run(p)) {
          if (!name.starts_with("grad_")) continue;
          for (const double g : field.value) ASSERT_EQ(g, 0) << name;
        }
      }
    });
  }
}

// Two accumulated micro-batches with one normalizer add up to the batch. In the smallest workspace
// the second has several chunks of at most 64 tokens, and a grad_weight that no product can write
// has its sums elsewhere.
TEST_P(Invariants, MicroBatchesAddUp) {
  if (!is_linear(op_)) return;
  constexpr int64_t tokens = 150, hidden = 33, vocab = 300;
  Case c{.op = op_, .shape = {tokens, hidden, vocab}, .dtype = dtype_, .bias_dtype = dtype_};
  c.bias = true;
  c.options.normalizer = tokens;
  with_problem(c, [&](auto p) {
    using Op = decltype(p.op);
    if constexpr (LinearOp<Op> && GradientOp<Op>) {
      std::vector<int64_t> first, second;
      for (int64_t i = 0; i < tokens; ++i) (i < 13 ? first : second).push_back(i);
      const Fields one = run(gather(p, first), Memory::minimum);
      const reference::Result want = expected(device_, p.op, p.model);
      for (const Layout& layout : {Layout{}, Layout{.stride = {1, vocab + 3}}}) {
        auto rest = gather(p, second);
        rest.op.accumulate_grad_weight = true;
        rest.op.grad_weight =
            rest.pool.add(DType::f32, {vocab, hidden}, one.at("grad_weight").value, layout);
        write(rest.op.grad_bias, one.at("grad_bias").value);
        const Fields both = run(rest, Memory::minimum);
        for (const char* name : {"grad_weight", "grad_bias"}) {
          reference::Result part;
          part.outputs[name] = want.outputs.at(name);
          const Comparison result = compare(part, Fields{{name, both.at(name)}});
          EXPECT_TRUE(result.ok()) << "stride " << layout.stride[1] << "\n" << result.report;
        }
      }
    }
  });
}

// The host's normalizer is a double: it may be below or above the range of f32. If it is not 0, the
// mean is not empty.
TEST_P(Invariants, NormalizersThatNoF32Holds) {
  struct Numbers {
    double normalizer, token_weight, grad_loss;
  };
  for (const Numbers n :
       {Numbers{1e-46, 1e-20, 1e-30}, {3e-40, 1e-10, 1e-30}, {1e39, 1e15, 1e20}, {5, 1, 1}}) {
    Case c{.op = op_, .shape = {9, 5, 40}, .dtype = dtype_};
    c.options.reduction = Reduction::mean;
    c.options.normalizer = n.normalizer;
    c.options.empty_mean = EmptyMean::nan;
    c.token_weight = c.grad_loss = true;
    with_problem(c, [&](auto p) {
      write(p.op.weights.token, std::vector<double>(9, n.token_weight));
      if constexpr (GradientOp<decltype(p.op)>) write(p.op.grad_loss, {n.grad_loss});
      const Fields got = run(p);
      const Comparison result = compare(expected(device_, p.op, p.model), got);
      EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
      for (const auto& [name, field] : got) {
        EXPECT_TRUE(std::isfinite(field.value[0]) && field.value[0] != 0) << name;
      }
    });
  }
}

LOGITLESS_CONFORMANCE_SUITE_OF(Invariants, kLossOps, inputs());

}  // namespace
}  // namespace logitless::conformance
