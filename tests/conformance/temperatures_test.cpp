// SPDX-License-Identifier: Apache-2.0
// A temperature per token. Equal values give the bits of options.temperature. An invalid value
// makes its own row NaN and sets the fault word. Values of tokens that do not count are not read.
#include <algorithm>
#include <cmath>

#include "tests/support/nonfinite.h"

namespace logitless::conformance {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class Temperatures : public ConformanceTest {
 protected:
  // Options applied to the logits before the temperature.
  struct Map {
    float logit_scale, softcap;
    bool smoothing;
  };
  static constexpr int64_t kMany = 19;
  static constexpr Map kMaps[] = {
      {1, 0, false}, {1, 0, true}, {-0.5f, 0, false}, {1, 20, false}, {0.7f, 5, true}};

  Case plain(const Map& map = kMaps[0]) const {
    Case c{.op = op_, .shape = {kTokens, kHidden, kVocab}, .dtype = dtype_, .statistics = true};
    c.options.reduction = Reduction::none;
    c.options.logit_scale = map.logit_scale;
    c.options.softcap = map.softcap;
    c.options.label_smoothing = map.smoothing ? 0.1f : 0;
    c.logprob = c.rank = c.sum_p_squared = c.mean_logit = true;
    c.max_logprob = c.mass_above = true;
    c.bias = c.fault = c.grad_loss = true;
    c.bias_dtype = dtype_;
    return c;
  }
  template <class Op>
  Outcome judged(const Problem<Op>& p, const std::string& what) {
    const Outcome outcome = execute(device_, p.op, p.pool);
    const Comparison result = compare(expected(device_, p.op, p.model), outcome);
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
    return outcome;
  }
  template <class F>
  void with_loss_op(F&& f) {
    with_op(op_, [&](auto op) {
      if constexpr (LossOp<decltype(op)>) f(op);
    });
  }
};

// Gives the op temperatures per token in place of options.temperature.
template <class Op>
void give(Problem<Op>* p, const std::vector<double>& values, Layout layout = {}) {
  p->op.options.temperature = 1;
  p->op.weights.temperature =
      p->pool.add(DType::f32, {static_cast<int64_t>(values.size())}, values, layout);
}

// Equal temperatures per token, even 1, give the bits of options.temperature in the same workspace.
TEST_P(Temperatures, EqualOnesAreTheNumber) {
  for (const Map& map : kMaps) {
    for (const float temperature : {1.0f, 0.7f, 3.0f}) {
      with_loss_op([&](auto op) {
        using Op = decltype(op);
        Case c = plain(map);
        c.shape = {kMany, 24, 131};
        c.options.temperature = temperature;
        c.options.out_of_range = OutOfRange::ignore;
        c.ignored = c.outside = 0.1;
        c.token_weight = c.vocab_weight = true;
        c.grad_lse = c.grad_target_logit = c.grad_entropy = c.saved_state = map.smoothing;
        Problem<Op> p = build<Op>(c);
        Problem<Op> each = build<Op>(c);
        give(&each, std::vector<double>(kMany, temperature));
        const RunPlan plan{
            .memory = Memory::exact,
            .bytes = std::max(execute(device_, p.op, p.pool).size.recommended,
                              execute(device_, each.op, each.pool).size.recommended)};
        const Outcome number = execute(device_, p.op, p.pool, plan);
        ASSERT_TRUE(number.status.ok()) << number.status.message();
        for (const Layout& layout : {Layout{}, Layout{.broadcast = true}, Layout{.offset = 3}}) {
          give(&each, std::vector<double>(kMany, temperature), layout);
          const Outcome tensor = execute(device_, each.op, each.pool, plan);
          ASSERT_TRUE(tensor.status.ok()) << tensor.status.message();
          EXPECT_EQ(differing_bits(number.fields, tensor.fields), "")
              << describe(c) << ", stride " << each.op.weights.temperature.stride[0];
          EXPECT_EQ(tensor.fault, 0);
        }
      });
    }
  }
}

// In the minimum workspace too, loss and statistics have the same bits.
TEST_P(Temperatures, EqualOnesAreTheNumberInTheLeastMemory) {
  with_loss_op([&](auto op) {
    using Op = decltype(op);
    Case c = plain();
    c.shape = {130, 24, 300};
    c.options.temperature = 0.7f;
    Problem<Op> p = build<Op>(c);
    const Outcome number = execute(device_, p.op, p.pool, {.memory = Memory::minimum});
    give(&p, std::vector<double>(130, 0.7f));
    const Outcome tensor = execute(device_, p.op, p.pool, {.memory = Memory::minimum});
    ASSERT_TRUE(number.status.ok() && tensor.status.ok()) << tensor.status.message();
    for (const auto& [name, field] : tensor.fields) {
      if (name.starts_with("grad_") && number.given != tensor.given) continue;
      EXPECT_EQ(field.bits, number.fields.at(name).bits) << name;
    }
  });
}

// Invalid temperatures, some only invalid with this scale and softcap.
struct Bad {
  const char* name;
  double temperature;
  float logit_scale = 1, softcap = 0;
};
const Bad kBad[] = {
    {"0", 0},
    {"-0", -0.0},
    {"negative", -1},
    {"NaN", kNan},
    {"infinity", kInf},
    {"-infinity", -kInf},
    {"subnormal", 1e-39},
    {"a slope beyond f32", 1e-10, 1e30f},
    {"a slope below f32", 1e38, 0.1f},
    {"a cap beyond f32", 2e-38, 0.01f, 1e3f},
    {"a cap below f32", 1e37, 1e3f, 0.01f},
};

// An invalid temperature makes its row NaN in every output but argmax and rank. Other rows keep
// their bits, and the fault word its other bits.
TEST_P(Temperatures, ABadOneIsNaNInItsRow) {
  for (const Bad& bad : kBad) {
    with_loss_op([&](auto op) {
      using Op = decltype(op);
      Case c = plain({bad.logit_scale, bad.softcap, false});
      c.saved_state = std::isnan(bad.temperature);
      Problem<Op> p = build<Op>(c);
      write(p.op.fault, {8});
      // Every logit is finite at this temperature.
      std::vector<double> values(kTokens, std::max<double>(1, std::ldexp(bad.logit_scale, -4)));
      give(&p, values);
      const Outcome before = judged(p, bad.name);
      EXPECT_EQ(before.fault, 8) << bad.name;
      values[kRow] = bad.temperature;
      give(&p, values);
      const Outcome after = judged(p, bad.name);
      EXPECT_EQ(after.fault, 8 | 4) << bad.name;
      expect_other_rows(before.fields, after.fields, kRow, bad.name);
      for (const auto& [name, field] : after.fields) {
        if (name == "argmax" || name == "rank") {
          EXPECT_TRUE(field.value[kRow] >= 0 && field.value[kRow] < kVocab) << bad.name << name;
        } else if (name != "grad_weight" && name != "grad_bias") {
          const size_t columns = field.value.size() / kTokens;
          for (size_t k = 0; k < columns; ++k) {
            ASSERT_TRUE(std::isnan(field.value[kRow * columns + k])) << bad.name << ": " << name;
          }
        }
      }
    });
  }
}

// Without a fault word, and with the row in a reduction: the sum or mean is NaN, as with a row of
// NaN logits.
TEST_P(Temperatures, ABadOneIsNaNInTheMean) {
  for (const Reduction reduction : {Reduction::sum, Reduction::mean}) {
    with_loss_op([&](auto op) {
      using Op = decltype(op);
      Case c = plain(kMaps[1]);
      c.options.reduction = reduction;
      c.fault = false;
      Problem<Op> p = build<Op>(c);
      std::vector<double> values(kTokens, 1.5);
      values[kRow] = 0;
      give(&p, values);
      judged(p, "a temperature of 0");
    });
  }
}

// Valid temperatures near both ends of the range.
TEST_P(Temperatures, ExtremesThatAreGood) {
  const Bad good[] = {{"steep", 1e-20},
                      {"the flattest", 1e37},
                      {"the flattest of all", 3e38, 1e3f},
                      {"scale 0", 3e38, 0},
                      {"the flattest beside a cap", 3e38, 1e3f, 20}};
  for (const Bad& one : good) {
    with_loss_op([&](auto op) {
      using Op = decltype(op);
      Case c = plain({one.logit_scale, one.softcap, false});
      Problem<Op> p = build<Op>(c);
      std::vector<double> values(kTokens, 1);
      values[kRow] = one.temperature;
      give(&p, values);
      EXPECT_EQ(judged(p, one.name).fault, 0) << one.name;
    });
  }
}

// Not read: temperatures of ignored tokens, of tokens out of range where these are ignored, and, in
// Backward, of tokens without an upstream gradient.
TEST_P(Temperatures, OfOtherTokensIsNotRead) {
  for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
    with_loss_op([&](auto op) {
      using Op = decltype(op);
      Case c = plain(kMaps[4]);
      c.options.reduction = reduction;
      c.options.out_of_range = OutOfRange::ignore;
      c.token_weight = true;
      Problem<Op> p = build<Op>(c);
      set(p.op.target, 1, static_cast<double>(c.options.ignore_index));
      set(p.op.target, 4, kVocab + 3);
      std::vector<double> values(kTokens, 1.5);
      if (BackwardOnlyOp<Op>) set(p.op.weights.token, 3, 0);
      give(&p, values);
      const Outcome before = judged(p, "good ones");
      for (const double bad : {0.0, kNan, -1.0, kInf}) {
        for (const int64_t token : {1, 4, 3}) {
          if (token == 3 && !BackwardOnlyOp<Op>) continue;
          values[token] = bad;
        }
        give(&p, values);
        const Outcome after = judged(p, "bad ones");
        EXPECT_EQ(differing_bits(before.fields, after.fields), "") << bad;
        EXPECT_EQ(after.fault, 0) << bad;
      }
    });
  }
}

// ForwardBackward computes the rows of all tokens that count, even of one whose gradient is 0.
TEST_P(Temperatures, OfATokenWithoutGradientIsReadByForwardBackward) {
  with_loss_op([&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op>) {
      Case c = plain();
      c.token_weight = true;
      Problem<Op> p = build<Op>(c);
      set(p.op.weights.token, kRow, 0);
      std::vector<double> values(kTokens, 1.5);
      values[kRow] = kNan;
      give(&p, values);
      EXPECT_EQ(judged(p, "weight 0").fault, 4);
    }
  });
}

// Every token's temperature is far from the others'; changing one changes only its own row.
TEST_P(Temperatures, EachIsItsOwnRows) {
  with_loss_op([&](auto op) {
    using Op = decltype(op);
    Case c = plain(kMaps[4]);
    Problem<Op> p = build<Op>(c);
    std::vector<double> values{0.01, 100, 1, 0.3, 7, 1e4};
    give(&p, values);
    const Outcome before = judged(p, "far apart");
    values[kRow] = 40;
    give(&p, values);
    expect_other_rows(before.fields, judged(p, "another").fields, kRow, "another");
  });
}

LOGITLESS_CONFORMANCE_SUITE_OF(Temperatures, kLossOps, inputs());

}  // namespace
}  // namespace logitless::conformance
