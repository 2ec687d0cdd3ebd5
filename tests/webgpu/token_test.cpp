// SPDX-License-Identifier: Apache-2.0
// WebGPU's promises about tokens beyond the contract's common part: a log-probability has the same
// bits with any other outputs, a token's own temperature gives the bits of options.temperature,
// ranks cover windows of the vocabulary, and nothing is read of a token without a gradient.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/webgpu/native.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

class WebGpuToken : public testing::Test {
 protected:
  WebGpuToken() {
    Status status;
    native_ = webgpu::find_device(0, &status);
    limits_ = native_->limits();
  }
  ~WebGpuToken() override { native_->set_limits(limits_); }

  template <class Op>
  Outcome run(const Problem<Op>& p, Memory memory = Memory::recommended) const {
    Outcome outcome = execute(device_, p.op, p.pool, {.memory = memory});
    EXPECT_TRUE(outcome.violations.empty()) << outcome.violations[0];
    return outcome;
  }
  // Runs the case with its own temperature, or with these temperatures per token.
  template <class Op>
  Outcome run(const Case& c, const std::vector<double>& temperatures,
              Memory memory = Memory::recommended) const {
    Problem<Op> p = build<Op>(c);
    give(&p, temperatures);
    return run(p, memory);
  }
  template <class Op>
  static void give(Problem<Op>* p, const std::vector<double>& temperatures) {
    if (temperatures.empty()) return;
    p->op.options.temperature = 1;
    TensorView& view = p->op.weights.temperature;
    view = p->pool.reserve(DType::f32, {static_cast<int64_t>(temperatures.size())});
    write(view, temperatures);
  }

  const TestDevice& device_ = device("webgpu");
  webgpu::NativeDevice* native_ = nullptr;
  webgpu::Limits limits_;
};

std::string first_difference(const Fields& a, const Fields& b, size_t row) {
  for (const auto& [name, field] : a) {
    const auto size = field.bits.size() / static_cast<size_t>(field.shape[0]);
    if (std::memcmp(&field.bits[row * size], &b.at(name).bits[row * size], size) != 0) return name;
  }
  return "";
}

// The bits of one row's log-probability.
using Bits = std::vector<std::byte>;

TEST_F(WebGpuToken, TheLogProbabilityIsOneWhateverElseIsAsked) {
  for (const int64_t vocab : {300, 4301}) {
    for (const bool linear : {false, true}) {
      Case c{.op = linear ? OpKind::linear_forward : OpKind::forward, .shape = {70, 12, vocab}};
      c.options.reduction = Reduction::none;
      c.logprob = true;
      c.ignored = 0.1;
      Bits first;
      const auto check = [&](const Case& one, const std::vector<double>& temperatures,
                             Memory memory, const char* what) {
        with_op(one.op, [&](auto op) {
          using Op = decltype(op);
          if constexpr (ForwardOp<Op>) {
            const Outcome outcome = run<Op>(one, temperatures, memory);
            ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
            const Bits& bits = outcome.fields.at("logprob").bits;
            if (first.empty()) first = bits;
            EXPECT_TRUE(bits == first) << what << ", V " << vocab << ", linear " << linear;
          }
        });
      };
      const std::vector<double> ones(70, 1.0);
      for (const bool gradients : {false, true}) {
        if (gradients) c.op = linear ? OpKind::linear_forward_backward : OpKind::forward_backward;
        for (const Memory memory : {Memory::recommended, Memory::minimum}) {
          check(c, {}, memory, "alone");
          check(c, ones, memory, "temperatures of 1");
          Case more = c;
          more.statistics = true;
          check(more, {}, memory, "statistics");
          more.rank = more.sum_p_squared = more.mean_logit = more.max_logprob = true;
          more.mass_above = true;
          check(more, ones, memory, "more statistics and temperatures");
          more.options.reduction = Reduction::mean;
          more.token_weight = more.vocab_weight = true;
          more.options.label_smoothing = 0.1f;
          more.in_place = !linear;
          check(more, {}, memory, "a mean with weights and smoothing");
          more.grad_input = DType::bf16;
          more.in_place = false;
          check(more, {}, memory, "gradients of 16 bits");
        }
      }
    }
  }
}

TEST_F(WebGpuToken, EqualTemperaturesHaveTheBitsOfTheNumber) {
  for (const float temperature : {1.0f, 0.7f}) {
    for (const float softcap : {0.0f, 20.0f}) {
      for (const int64_t vocab : {37, 1030, 4301}) {
        for (const OpKind op : kOps) {
          Case c{.op = op, .shape = {20, 12, vocab}};
          c.options.softcap = softcap;
          c.options.logit_scale = vocab == 37 ? 1 : -0.3f;
          c.options.temperature = temperature;
          for (const bool all : {false, true}) {
            c.statistics = c.rank = all;
            c.ignored = 0.2;
            with_op(op, [&](auto typed) {
              using Op = decltype(typed);
              if constexpr (LossOp<Op>) {
                const Outcome number = run<Op>(c, {});
                const Outcome each = run<Op>(c, std::vector<double>(20, temperature));
                ASSERT_TRUE(number.status.ok() && each.status.ok());
                EXPECT_EQ(differing_bits(number.fields, each.fields), "")
                    << describe(c) << " " << temperature << " " << softcap;
              }
            });
          }
        }
      }
    }
  }
}

// Temperatures at the limits of the valid range, with each set of options: valid exactly where
// options.temperature is.
TEST_F(WebGpuToken, TemperaturesAreJudgedAsTheNumberIs) {
  const double least = FLT_MIN, most = FLT_MAX;
  for (const auto& [scale, softcap] : std::vector<std::pair<float, float>>{{1.0f, 0.0f},
                                                                           {-3.1f, 0.0f},
                                                                           {0.0f, 0.0f},

                                                                           {1.0f, 30.0f},
                                                                           {0.7f, 1.1e-20f},
                                                                           {1.0e-3f, 9.0e30f}}) {
    std::vector<double> temperatures{0.0,       -0.0, -1.0, 1.0e-40, kNone, INFINITY,
                                     -INFINITY, 0.3,  1.7,  least,   most,  -least};
    for (const double factor :
         {std::fabs(static_cast<double>(scale)), static_cast<double>(softcap)}) {
      for (const double border : {factor / least, factor / most, factor * least, factor * most}) {
        float t = static_cast<float>(std::clamp(border, least, most));
        for (int k = 0; k < 3; ++k) t = std::nextafter(t, 0.0f);
        for (int k = 0; k < 7; ++k) {
          temperatures.push_back(t);
          t = std::nextafter(t, INFINITY);
        }
      }
    }
    Case c{.op = OpKind::forward, .fault = true};
    c.shape = {static_cast<int64_t>(temperatures.size()), 1, 5};
    c.options.reduction = Reduction::none;
    c.options.logit_scale = scale;
    c.options.softcap = softcap;
    c.statistics = c.logprob = true;
    Problem<CrossEntropyForward> p = build<CrossEntropyForward>(c);
    std::vector<double> logits = read(p.op.logits);
    for (double& x : logits) x *= 0.01;  // so that no quotient is infinite
    write(p.op.logits, logits);
    give(&p, temperatures);
    const Outcome each = run(p);
    ASSERT_TRUE(each.status.ok()) << each.status.message();
    EXPECT_EQ(each.fault, 4);
    Fields fields = each.fields;
    fields.erase("fault");
    size_t bad = 0;
    for (size_t i = 0; i < temperatures.size(); ++i) {
      p.op.weights.temperature = {};
      p.op.options.temperature = static_cast<float>(temperatures[i]);
      const Outcome number = run(p);
      const bool is_bad = !number.status.ok();
      bad += is_bad ? 1 : 0;
      EXPECT_EQ(std::isnan(fields.at("lse").value[i]), is_bad) << temperatures[i];
      EXPECT_EQ(std::isnan(fields.at("loss").value[i]), is_bad) << temperatures[i];
      if (is_bad) continue;
      EXPECT_EQ(first_difference(fields, number.fields, i), "") << temperatures[i];
    }
    EXPECT_GT(bad, 5u);
    EXPECT_LT(bad, temperatures.size());
  }
}

// An invalid temperature makes a row of NaN in gradients too; for a token that does not count it
// has no effect.
TEST_F(WebGpuToken, ABadTemperatureIsARowOfNaN) {
  for (const OpKind op : {OpKind::backward, OpKind::forward_backward, OpKind::linear_backward,
                          OpKind::linear_forward_backward}) {
    for (const bool given_state : {false, true}) {
      for (const bool fault : {false, true}) {
        Case c{.op = op, .shape = {40, 12, 37}, .ignored = 0.3, .fault = fault};
        c.saved_state = given_state;
        std::vector<double> temperatures(40, 0.9);
        with_op(op, [&](auto typed) {
          using Op = decltype(typed);
          if constexpr (GradientOp<Op> && LossOp<Op>) {
            const std::vector<double> target = read(build<Op>(c).op.target);
            const auto first = [&](bool counts) {
              return std::find_if(target.begin(), target.end(),
                                  [&](double t) { return (t >= 0) == counts; }) -
                     target.begin();
            };
            temperatures[static_cast<size_t>(first(false))] = -1;
            Outcome outcome = run<Op>(c, temperatures);
            ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
            EXPECT_EQ(outcome.fault, 0);
            const char* name = LinearOp<Op> ? "grad_input" : "grad_logits";
            const size_t columns = LinearOp<Op> ? 12 : 37;
            const auto row = static_cast<size_t>(first(true));
            EXPECT_FALSE(std::isnan(outcome.fields.at(name).value[row * columns]));
            temperatures[row] = 0;
            outcome = run<Op>(c, temperatures);
            EXPECT_EQ(outcome.fault, fault ? 4 : 0);
            const std::vector<double>& gradient = outcome.fields.at(name).value;
            for (size_t i = 0; i < gradient.size(); ++i) {
              EXPECT_EQ(std::isnan(gradient[i]), i / columns == row) << name << " " << i;
            }
          }
        });
      }
    }
  }
}

// The vocabulary has one window or many; the minimum workspace holds one.
TEST_F(WebGpuToken, RanksOfManyWindows) {
  for (const uint64_t binding : {limits_.storage_binding_bytes, uint64_t{1} << 17}) {
    webgpu::Limits small = limits_;
    small.storage_binding_bytes = binding;
    native_->set_limits(small);
    for (const OpKind op : {OpKind::forward, OpKind::forward_backward, OpKind::linear_forward,
                            OpKind::linear_forward_backward}) {
      for (const Data data : {Data::normal, Data::constant}) {
        Case c{.op = op, .shape = {70, 20, 5000}, .argmax = DType::i32, .data = data};
        c.rank = c.sum_p_squared = c.mean_logit = c.max_logprob = c.mass_above = true;
        c.logprob = c.vocab_weight = true;
        c.ignored = 0.2;
        for (const Memory memory : {Memory::minimum, Memory::recommended}) {
          const Comparison result = judge(device_, c, {.memory = memory});
          EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
        }
      }
    }
  }
}

// Short rows of given logits are read once if no log-probability is requested.
TEST_F(WebGpuToken, RanksOfRowsThatAreReadOnce) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const int64_t vocab : {37, 300, 4000}) {
    Case c{.op = OpKind::forward_backward, .shape = {9, 1, vocab}, .rank = true};
    c.mass_above = true;
    c.options.reduction = Reduction::none;
    Problem<CrossEntropyForwardBackward> p = build<CrossEntropyForwardBackward>(c);
    std::vector<double> logits = read(p.op.logits);
    const auto row = [&](int64_t i) { return logits.begin() + i * vocab; };
    std::fill_n(row(1), vocab, 2.0);  // ties
    std::fill_n(row(2), vocab, -infinity);
    row(3)[vocab / 2] = kNone;
    row(4)[vocab - 1] = infinity;
    write(p.op.logits, logits);
    const Outcome outcome = run(p);
    const Comparison result = compare(expected(device_, p.op, p.model), outcome);
    EXPECT_TRUE(result.ok()) << result.report;
    const std::vector<double>& mass = outcome.fields.at("mass_above").value;
    EXPECT_EQ(mass[1], 0);
    for (const size_t i : {2, 3, 4}) EXPECT_TRUE(std::isnan(mass[i])) << i;
  }
}

// All logits are equal, so no column is above the target, not even the target itself.
TEST_F(WebGpuToken, EqualLogitsAreNotAbove) {
  for (const int64_t vocab : {37, 5000}) {
    Case c{.op = OpKind::linear_forward_backward, .shape = {9, 20, vocab}, .rank = true};
    c.mass_above = true;
    Problem<LinearCrossEntropyForwardBackward> p = build<LinearCrossEntropyForwardBackward>(c);
    write(p.op.weight, std::vector<double>(static_cast<size_t>(20 * vocab), 0.37));
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome outcome = run(p, memory);
      for (const double rank : outcome.fields.at("rank").value) EXPECT_EQ(rank, 0);
      for (const double mass : outcome.fields.at("mass_above").value) EXPECT_EQ(mass, 0);
    }
  }
}

// Fills what Backward reads of these tokens' rows, except upstream gradients, with NaN.
template <class Op>
void put_nan(Problem<Op>* p, const std::vector<int64_t>& tokens) {
  logitless_op unused{};
  for_each_tensor(p->op, unused, [&](const char* field, Access, TensorView& view, auto&&) {
    const std::string_view name = field;
    if (!view || (name != "logits" && name != "input" && name != "row_reference" &&
                  name != "row_log_sum" && name != "entropy" && name != "temperature")) {
      return;
    }
    std::vector<double> values = read(view);
    const auto columns = static_cast<int64_t>(values.size()) / view.shape[0];
    for (const int64_t i : tokens) {
      std::fill_n(values.begin() + i * columns, columns, kNone);
    }
    write(view, values);
  });
}

TEST_F(WebGpuToken, NothingIsReadOfATokenWithoutAGradient) {
  for (const OpKind op : {OpKind::backward, OpKind::linear_backward}) {
    for (const int64_t vocab : {37, 1030, 4301}) {
      for (const int kind : {0, 1, 2, 3}) {  // each kind is a call with other tensors
        Case c{.op = op, .shape = {70, 12, vocab}, .ignored = 0.1};
        c.inactive = 0.4;
        c.fault = c.temperatures = kind != 3;
        c.saved_state = kind == 1;
        c.grad_loss = kind > 0;
        c.grad_lse = c.grad_entropy = kind == 2;
        c.options.reduction = kind == 0 ? Reduction::mean : Reduction::none;
        if (kind == 3) {
          if (is_linear(op)) continue;
          c.options.input_kind = InputKind::probabilities;
        }
        with_op(op, [&](auto typed) {
          using Op = decltype(typed);
          if constexpr (LossOp<Op> && GradientOp<Op> && !ForwardOp<Op>) {
            Problem<Op> p = build<Op>(c);
            const Outcome before = run(p);
            ASSERT_TRUE(before.status.ok()) << before.status.message();
            const std::vector<double> weight = read(p.op.weights.token);
            std::vector<int64_t> inactive;
            for (int64_t i = 0; i < 70; ++i) {
              if (weight[static_cast<size_t>(i)] == 0) inactive.push_back(i);
            }
            ASSERT_GT(inactive.size(), 10u);
            put_nan(&p, inactive);
            const Outcome after = run(p);
            EXPECT_EQ(differing_bits(before.fields, after.fields), "") << describe(c);
            EXPECT_EQ(after.fault, 0);
            const char* name = LinearOp<Op> ? "grad_input" : "grad_logits";
            const Field& gradient = after.fields.at(name);
            const auto columns = static_cast<size_t>(gradient.shape[1]);
            for (const int64_t i : inactive) {
              EXPECT_EQ(gradient.value[static_cast<size_t>(i) * columns], 0);
            }
            EXPECT_FALSE(std::isnan(gradient.value[static_cast<size_t>(gradient.shape[1]) - 1]));
          }
        });
      }
    }
  }
}

// A single upstream gradient for all tokens: 0 makes them inactive; a subnormal, or 0 times
// infinity, does not.
TEST_F(WebGpuToken, OneUpstreamGradientOfAll) {
  for (const bool weighted : {false, true}) {  // plain.wgsl does not serve token weights
    for (const int64_t vocab : {37, 4301}) {
      Case c{.op = OpKind::backward, .shape = {20, 1, vocab}, .ignored = 0.2};
      c.options.reduction = Reduction::sum;
      c.grad_loss = true;
      c.token_weight = weighted;
      Problem<CrossEntropyBackward> p = build<CrossEntropyBackward>(c);
      write(p.op.logits, std::vector<double>(static_cast<size_t>(20 * vocab), kNone));
      const std::vector<double> target = read(p.op.target);
      for (const double upstream : {0.0, -0.0, 1.0e-42}) {
        write(p.op.grad_loss, {upstream});
        const std::vector<double> gradient = run(p).fields.at("grad_logits").value;
        for (size_t i = 0; i < gradient.size(); ++i) {
          const bool is_nan = upstream != 0 && target[i / static_cast<size_t>(vocab)] >= 0;
          ASSERT_EQ(std::isnan(gradient[i]), is_nan) << i << " " << upstream;
          ASSERT_TRUE(is_nan || gradient[i] == 0) << i;
        }
      }
      if (!weighted) continue;
      write(p.op.grad_loss, {0.0});
      std::vector<double> weight(20, 1.0);
      weight[3] = INFINITY;
      write(p.op.weights.token, weight);
      write(p.op.target, std::vector<double>(20, 1.0));
      const std::vector<double> gradient = run(p).fields.at("grad_logits").value;
      for (size_t i = 0; i < gradient.size(); ++i) {
        ASSERT_EQ(std::isnan(gradient[i]), i / static_cast<size_t>(vocab) == 3) << i;
      }
    }
  }
}

}  // namespace
}  // namespace logitless::conformance
