// SPDX-License-Identifier: Apache-2.0
// The edge table of docs/semantics.md: no tokens, one column, empty means, targets out of range,
// ties, order of the options.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class Edges : public ConformanceTest {
 protected:
  // Runs the case with `change` applied to its op, compares it with the reference and returns the
  // outputs.
  template <class Change>
  Fields run(const Case& c, Change&& change) {
    return with_op(op_, [&](auto op) {
      auto p = build<decltype(op)>(c);
      change(p.op);
      const Outcome outcome = execute(device_, p.op, p.pool);
      const Comparison result = compare(expected(device_, p.op, p.model), outcome);
      EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
      return outcome.fields;
    });
  }
  Fields run(const Case& c) {
    return run(c, [](auto&) {});
  }
  Case plain(Shape shape) const {
    return {.op = op_, .shape = shape, .dtype = dtype_, .statistics = true};
  }
};

void expect_all(const Fields& fields, const std::string& name, double value) {
  if (!fields.contains(name)) return;
  for (const double x : fields.at(name).value) {
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(x)) << name << " is " << x;
    } else {
      EXPECT_EQ(x, value) << name;
    }
  }
}

void expect_all_gradients(const Fields& fields, double value) {
  for (const char* name : {"grad_logits", "grad_input", "grad_weight", "grad_bias"})
    expect_all(fields, name, value);
}

TEST_P(Edges, NoTokens) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
    for (const EmptyMean empty : {EmptyMean::zero, EmptyMean::nan}) {
      for (const bool accumulate : {false, true}) {
        Case c = plain({0, 5, 7});
        c.options.reduction = reduction;
        c.options.empty_mean = empty;
        c.bias = true;
        c.bias_dtype = dtype_;
        c.accumulate = accumulate;
        const Fields fields = run(c);
        const bool nan = reduction == Reduction::mean && empty == EmptyMean::nan;
        expect_all(fields, "loss", nan ? NAN : 0);
        if (!accumulate) expect_all_gradients(fields, 0);
      }
    }
  }
}

// The sum of grad_input over a long row, most of whose terms are small beside the sum of those
// before.
TEST_P(Edges, LongSumsOfSmallTerms) {
  if (!is_linear(op_)) return;
  for (const Data data : {Data::normal, Data::peaked, Data::large}) {
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      Case c = plain({24, 1, 40000});
      c.data = data;
      c.options.logit_scale = -0.7f;
      with_op(op_, [&](auto op) {
        auto p = build<decltype(op)>(c);
        // cuBLASLt sums in one chain, whose bound is that of one-signed terms. These mostly are.
        p.model.structured = std::string(device_.name()) == "cuda" && dtype_ == DType::f32;
        const Outcome outcome = execute(device_, p.op, p.pool, {.memory = memory});
        const Comparison result = compare(expected(device_, p.op, p.model), outcome);
        EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
      });
    }
  }
}

TEST_P(Edges, OneColumn) {
  for (const float z_loss : {0.0f, 0.5f}) {
    Case c = plain({6, 11, 1});
    c.options.z_loss = z_loss;
    const Fields fields = run(c);
    if (z_loss > 0) continue;
    expect_all(fields, "loss", 0);
    expect_all(fields, "entropy", 0);
    expect_all_gradients(fields, 0);
  }
}

TEST_P(Edges, EveryTokenIgnored) {
  for (const EmptyMean empty : {EmptyMean::zero, EmptyMean::nan}) {
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      Case c = plain({9, 5, 40});
      c.ignored = 1;
      c.options.empty_mean = empty;
      c.options.reduction = reduction;
      const Fields fields = run(c);
      const bool nan = reduction == Reduction::mean && empty == EmptyMean::nan;
      expect_all(fields, "loss", nan ? NAN : 0);
      expect_all(fields, "lse", 0);
      expect_all(fields, "argmax", -1);
      expect_all_gradients(fields, 0);
    }
  }
}

// The normalizer is exactly 0: given as 0, or the sum of class weights that are all 0.
TEST_P(Edges, NormalizerOfZero) {
  for (const EmptyMean empty : {EmptyMean::zero, EmptyMean::nan}) {
    for (const bool given : {false, true}) {
      Case c = plain({9, 5, 40});
      c.options.empty_mean = empty;
      c.vocab_weight = !given;
      c.normalizer = given ? NormalizerKind::f32 : NormalizerKind::counted;
      const Fields fields = run(c, [&](auto& op) {
        if constexpr (LossOp<std::remove_reference_t<decltype(op)>>) {
          if (given) write(op.weights.normalizer, {0});
          if (!given) write(op.weights.vocab, std::vector<double>(40, 0));
        }
      });
      const double value = empty == EmptyMean::nan ? NAN : 0;
      expect_all(fields, "loss", value);
      expect_all(fields, "grad_logits", value);
      expect_all(fields, "grad_input", value);
    }
  }
}

// Normalizers as tensors, of either sign and any size. Both 32-bit words of an i64 must be read.
TEST_P(Edges, NormalizersOfAView) {
  if (!has_loss(op_)) return;
  for (const double value : {1.0, -1.0, -5.0, -127.0, -128.0, -129.0, 4294967296.0, -4294967295.0,
                             -4294967296.0, 12345678901.0, -12345678901.0}) {
    for (const NormalizerKind kind : {NormalizerKind::f32, NormalizerKind::i64}) {
      Case c = plain({4, 5, 9});
      c.options.reduction = Reduction::mean;
      c.normalizer = kind;
      run(c, [&](auto& op) {
        if constexpr (LossOp<std::remove_reference_t<decltype(op)>>) {
          write(op.weights.normalizer, {value});
        }
      });
    }
  }
}

TEST_P(Edges, TargetsOutside) {
  for (const DType dtype : {DType::i32, DType::i64}) {
    std::vector<double> outside{40, 41, -1, -99, -101, -2147483648.0, 2147483647};
    if (dtype == DType::i64)
      outside.insert(outside.end(), {4294967296.0, 4294967299.0, -0x1p63, 0x1p62});
    for (const double target : outside) {
      Case c = plain({9, 5, 40});
      c.target = dtype;
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        if constexpr (LossOp<Op>) {
          Problem<Op> p = build<Op>(c);
          std::vector<double> targets = read(p.op.target);
          targets[8] = -100;
          write(p.op.target, targets);
          const Outcome ignored = execute(device_, p.op, p.pool);
          targets[8] = target;
          write(p.op.target, targets);
          const Outcome refused = execute(device_, p.op, p.pool);
          if (device_.synchronous()) {
            EXPECT_EQ(refused.status.code(), StatusCode::target_out_of_range) << target;
            EXPECT_EQ(refused.violations, std::vector<std::string>{}) << target;
          } else {
            const Comparison result = compare(expected(device_, p.op, p.model), refused);
            EXPECT_TRUE(result.ok()) << target << "\n" << result.report;
          }
          p.op.options.out_of_range = OutOfRange::ignore;
          const Outcome passed_over = execute(device_, p.op, p.pool);
          ASSERT_TRUE(passed_over.status.ok()) << passed_over.status.message();
          EXPECT_EQ(differing_bits(ignored.fields, passed_over.fields), "") << target;
        }
      });
    }
  }
}

void set_targets(const TensorView& view, const std::vector<int64_t>& targets) {
  auto* first = static_cast<std::byte*>(view.data) + view.byte_offset;
  for_each_element(view, [&](int64_t i, int64_t offset) {
    const auto narrow = static_cast<int32_t>(targets[i]);
    if (view.dtype == DType::i64) {
      std::memcpy(first + offset, &targets[i], sizeof(int64_t));
    } else {
      std::memcpy(first + offset, &narrow, sizeof(narrow));
    }
  });
}

// An asynchronous backend cannot return a status for a target out of range: it writes a loss of
// NaN, gradient rows of zeros and the fault word. Some targets are so far outside that an address
// made from one would crash; some equal a valid target in their low 32 bits.
TEST_P(Edges, TargetsOutsideOfAnAsynchronousBackend) {
  if (device_.synchronous()) return;
  constexpr int64_t kFar = int64_t{1} << 32;
  const std::vector<int64_t> bad{
      40, -1, kFar + 3, 3 - kFar, INT64_MAX, INT64_MIN, INT64_MIN + 5, int64_t{1} << 62, -99};
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
    // With the last count, every token's target is out of range.
    for (const size_t count : {size_t{1}, size_t{4}, bad.size()}) {
      for (const DType dtype : {DType::i32, DType::i64}) {
        for (const bool weighted : {false, true}) {
          Case c = plain({9, 5, 40});
          c.options.reduction = reduction;
          c.target = dtype;
          c.fault = c.bias = true;
          c.bias_dtype = dtype_;
          c.vocab_weight = c.token_weight = weighted;
          with_op(op_, [&](auto op) {
            using Op = decltype(op);
            if constexpr (LossOp<Op>) {
              const Problem<Op> p = build<Op>(c);
              std::vector<int64_t> target = read_integers(p.op.target);
              for (size_t i = 0; i < count; ++i) {
                const bool fits = bad[i] == static_cast<int32_t>(bad[i]);
                target[8 - i] = dtype == DType::i64 || fits ? bad[i] : -1 - static_cast<int>(i);
              }
              set_targets(p.op.target, target);
              ASSERT_EQ(tokens_outside(p.op).size(), count);
              for (const double before : {0, 6, 1}) {  // the word's other bits are kept
                write(p.op.fault, {before});
                const Outcome outcome = execute(device_, p.op, p.pool);
                const Comparison result = compare(expected(device_, p.op, p.model), outcome);
                EXPECT_TRUE(result.ok()) << count << " outside\n" << result.report;
                EXPECT_EQ(outcome.fault & 1, 1);
              }
              // With out_of_range = ignore there is no fault.
              Op passes = p.op;
              passes.options.out_of_range = OutOfRange::ignore;
              write(p.op.fault, {6});
              EXPECT_EQ(execute(device_, passes, p.pool).fault, 6);
            }
          });
        }
      }
    }
  }
}

// The argmax is the lowest index among equal logits, wherever in the row they are.
TEST_P(Edges, Ties) {
  const int64_t vocab = 3000, hidden = 24;
  const std::vector<std::vector<int64_t>> ties{
      {0, 1}, {17, 900, 2999}, {1023, 1024}, {5, 2998}, {2047, 2048, 2049}};
  for (const std::vector<int64_t>& tied : ties) {
    Case c = plain({3, hidden, vocab});
    const Fields fields = run(c, [&](auto& op) {
      using Op = std::remove_reference_t<decltype(op)>;
      if constexpr (LinearOp<Op>) {
        // Rows of weight that are three times the input have the largest logit.
        std::vector<double> input = read(op.input), weight = read(op.weight);
        for (int64_t i = 0; i < 3; ++i)
          std::copy_n(input.begin(), hidden, input.begin() + i * hidden);
        for (const int64_t j : tied) {
          for (int64_t d = 0; d < hidden; ++d) weight[j * hidden + d] = 3 * input[d];
        }
        write(op.input, input);
        write(op.weight, weight);
      } else {
        std::vector<double> logits = read(op.logits);
        for (int64_t i = 0; i < 3; ++i) {
          for (const int64_t j : tied) logits[i * vocab + j] = 20;
        }
        write(op.logits, logits);
      }
    });
    expect_all(fields, "argmax", static_cast<double>(tied[0]));
  }
}

// Compares with a closed form: the scale comes first, then the softcap, then the temperature.
TEST_P(Edges, OrderOfTheOptions) {
  Case c = plain({1, 1, 2});
  c.options.logit_scale = 2;
  c.options.softcap = 3;
  c.options.temperature = 0.5f;
  const Fields fields = run(c, [](auto& op) {
    using Op = std::remove_reference_t<decltype(op)>;
    if constexpr (LinearOp<Op>) {
      write(op.input, {1});
      write(op.weight, {1, -0.5});
    } else {
      write(op.logits, {1, -0.5});
    }
    if constexpr (LossOp<Op>) write(op.target, {0});
  });
  if (!fields.contains("loss")) return;
  const double z0 = 3 * std::tanh(2 * 1.0 / 3) / 0.5, z1 = 3 * std::tanh(2 * -0.5 / 3) / 0.5;
  EXPECT_NEAR(fields.at("loss").value[0], std::log1p(std::exp(z1 - z0)), 1e-5);
  EXPECT_NEAR(fields.at("target_logit").value[0], z0, 1e-5);
}

// Scale, softcap and temperature near the ends of f32 that leave logits of usual size. Values
// beyond are refused (rejects.h).
TEST_P(Edges, ExtremeMaps) {
  using Map = std::array<float, 3>;
  for (const auto& [scale, softcap, temperature] :
       {Map{1, 1e30f, 1}, Map{1, 8e37f, 1}, Map{1e30f, 5e30f, 1e30f}, Map{-1e37f, 8e37f, 1e37f},
        Map{1e-30f, 5e-30f, 1e-30f}, Map{1, 1e-30f, 1e-30f}, Map{1e-3f, 8e34f, 1e-3f},
        Map{3e37f, 0, 1e38f}, Map{-2e-38f, 0, 3e-38f}, Map{1.2e-38f, 1, 1}}) {
    Case c = plain({5, 7, 40});
    c.options.logit_scale = scale, c.options.softcap = softcap, c.options.temperature = temperature;
    const Comparison result = judge(device_, c);
    EXPECT_TRUE(result.ok()) << scale << " " << softcap << " " << temperature << result.report;
  }
}

TEST_P(Edges, ALogitScaleOfZeroMakesThemAllEqual) {
  Case c = plain({5, 7, 40});
  c.options.logit_scale = 0;
  const Fields fields = run(c);
  expect_all(fields, "target_logit", 0);
  expect_all_gradients(fields, 0);
}

// More tokens than one thread block compacts, with gaps between those that count.
TEST_P(Edges, ManyTokensSomeIgnored) {
  if (op_ == OpKind::softmax) return;
  Case c = plain({2500, 3, 11});
  c.ignored = 0.4;
  const Comparison result = judge(device_, c);
  EXPECT_TRUE(result.ok()) << result.report;
}

// z-loss would be 0 * lse^2, where lse^2 overflows and the product is NaN.
TEST_P(Edges, ATokenOfWeightZeroHasNoLossHoweverLargeItsLogits) {
  Case c = plain({5, 3, 40});
  c.options.z_loss = 1e-3f;
  c.token_weight = true;
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op> && !LinearOp<Op>) {
      if (dtype_ == DType::f16) return;  // f16 has no such numbers
      Problem<Op> p = build<Op>(c);
      std::vector<double> logits = read(p.op.logits), weights = read(p.op.weights.token);
      for (int64_t j = 0; j < 40; ++j) logits[2 * 40 + j] = -2e30;
      weights[2] = 0;
      write(p.op.logits, logits);
      write(p.op.weights.token, weights);
      const Outcome outcome = execute(device_, p.op, p.pool);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
      EXPECT_TRUE(std::isfinite(outcome.fields.at("loss").value.at(0)));
      const Comparison result = compare(expected(device_, p.op, p.model), outcome);
      EXPECT_TRUE(result.ok()) << result.report;
    }
  });
}

// A call in place gives the same bits as one with separate memory.
TEST_P(Edges, InPlace) {
  if (is_linear(op_) || op_ == OpKind::forward) return;
  for (const Placement placement : {Placement::dense, Placement::padded, Placement::strided,
                                    Placement::transposed, Placement::unaligned}) {
    for (const Shape& shape : {Shape{9, 1, 37}, Shape{33, 1, 2100}, Shape{1, 1, 5000}}) {
      Case c = plain(shape);
      c.placement = placement;
      c.grad_input = dtype_;
      const Outcome apart = run_case(device_, c);
      c.in_place = true;
      const Outcome in_place = run_case(device_, c);
      ASSERT_TRUE(apart.status.ok() && in_place.status.ok()) << in_place.status.message();
      EXPECT_EQ(differing_bits(apart.fields, in_place.fields), "") << describe(c);
    }
  }
}

// Six statistics as columns of one matrix: disjoint elements of one buffer.
TEST_P(Edges, StatisticsInOneMatrix) {
  if (!has_forward(op_)) return;
  const Case c = plain({33, 19, 300});
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op>) {
      Problem<Op> p = build<Op>(c);
      const Outcome apart = execute(device_, p.op, p.pool);
      const TensorView matrix = p.pool.reserve(DType::f32, {33, 7});
      TokenStatistics& s = p.op.statistics;
      int64_t column = 0;
      for (TensorView* view : {&s.lse, &s.target_logit, &s.entropy, &s.row_reference,
                               &s.row_log_sum, &s.weighted_logit_sum}) {
        *view = vector_view(matrix.as<float>() + column++, DType::f32, 33);
        view->stride[0] = 7;
      }
      const Outcome together = execute(device_, p.op, p.pool);
      ASSERT_TRUE(together.status.ok()) << together.status.message();
      EXPECT_EQ(differing_bits(apart.fields, together.fields), "");
      EXPECT_EQ(together.violations, std::vector<std::string>{});
    }
  });
}

LOGITLESS_CONFORMANCE_SUITE(Edges);

}  // namespace
}  // namespace logitless::conformance
