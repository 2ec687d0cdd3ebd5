// SPDX-License-Identifier: Apache-2.0
// Compares the reference's gradients of cross-entropies with central differences of its own Forward
// in double, for the options below alone and in pairs, on given logits and on linear ops. Steps are
// exact in f32; three step sizes and Richardson extrapolation leave an error of order h^6.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "example.h"

namespace logitless::reference {
namespace {

constexpr double kTolerance = 1e-9;

enum class On { everything, logits, linear_ops, given_logits };

struct Option {
  const char* name;
  const char* slot;  // options of one slot exclude each other, except in ""
  On on;             // `logits`: excludes probabilities as input
  void (*apply)(Example*);
};

const std::vector<Option>& all_options() {
  static const std::vector<Option> options = {
      {"reduction_none", "reduction", On::everything,
       [](Example* e) { e->options.reduction = Reduction::none; }},
      {"reduction_sum", "reduction", On::everything,
       [](Example* e) { e->options.reduction = Reduction::sum; }},
      {"normalizer_view", "reduction", On::everything, [](Example* e) { e->normalizer = {2.5f}; }},
      {"normalizer_of_host", "reduction", On::everything,
       [](Example* e) { e->options.normalizer = 7.3; }},
      {"ignore_index", "target", On::everything, [](Example* e) { e->target[1] = -100; }},
      {"ignore_index_of_a_class", "target", On::everything,
       [](Example* e) { e->options.ignore_index = e->target[1]; }},
      {"out_of_range_ignored", "target", On::everything,
       [](Example* e) {
         e->options.out_of_range = OutOfRange::ignore;
         e->target[2] = e->columns;
       }},
      {"label_smoothing", "smoothing", On::everything,
       [](Example* e) { e->options.label_smoothing = 0.1f; }},
      {"label_smoothing_of_one", "smoothing", On::everything,
       [](Example* e) { e->options.label_smoothing = 1; }},
      {"class_weights", "", On::everything,
       [](Example* e) { e->vocab_weight = {0.5f, 2, 0, 1.25f, 0.3f}; }},
      {"token_weights", "", On::everything,
       [](Example* e) { e->token_weight = {1.5f, 0.25f, 0, 0.7f}; }},
      {"empty_mean_nan", "", On::everything,
       [](Example* e) { e->options.empty_mean = EmptyMean::nan; }},
      {"grad_loss", "", On::everything, [](Example* e) { e->grad_loss = {0.75f, -1.5f, 2, 0.5f}; }},
      {"z_loss", "", On::logits, [](Example* e) { e->options.z_loss = 0.05f; }},
      {"logit_scale", "", On::logits, [](Example* e) { e->options.logit_scale = -0.7f; }},
      {"softcap", "", On::logits, [](Example* e) { e->options.softcap = 1.7f; }},
      {"temperature", "", On::logits, [](Example* e) { e->options.temperature = 1.3f; }},
      {"grad_lse", "", On::logits, [](Example* e) { e->grad_lse = {0.5f, -1, 0.75f, 2}; }},
      {"grad_target_logit", "", On::logits,
       [](Example* e) { e->grad_target_logit = {-0.5f, 1, 1.5f, 0.25f}; }},
      {"grad_entropy", "", On::logits, [](Example* e) { e->grad_entropy = {1, -0.5f, 0.8f, 3}; }},
      {"chosen_columns", "", On::linear_ops,
       [](Example* e) {
         e->ids = {4, 0, 4, -1, 2, 2, e->target[2], 1, -1, 3, 4, 0};
         e->grad_logits_at = {0.5f, -1, 0.25f, 9, 2, -0.5f, 1, 0.75f, 9, -2, 0.5f, 1.5f};
       }},
      {"no_bias", "", On::linear_ops, [](Example* e) { e->bias.clear(); }},
      {"accumulate", "", On::linear_ops,
       [](Example* e) {
         e->accumulate = true;
         e->old_weight.assign(e->weight.size(), 0.375f);
         e->old_bias.assign(e->columns, -1.25f);
       }},
      {"probabilities", "", On::given_logits,
       [](Example* e) {
         e->options.input_kind = InputKind::probabilities;
         e->options.probability_floor = 0.01f;
         for (float& p : e->logits) p = std::fabs(p) / 4 + 0.25f;
       }},
  };
  return options;
}

bool applies(const Option& option, bool linear) {
  return option.on != (linear ? On::given_logits : On::linear_ops);
}

bool combine(const Option& a, const Option& b) {
  if (a.slot[0] != 0 && std::string(a.slot) == b.slot) return false;
  return !(a.on == On::given_logits && b.on == On::logits) &&
         !(b.on == On::given_logits && a.on == On::logits);
}

// Returns d objective / d *parameter.
double difference_quotient(const Example& example, float* parameter) {
  const float at = *parameter;
  double estimate[3];
  float h = 0x1p-6f;
  for (double& quotient : estimate) {
    *parameter = at + h;
    const double above = objective(example);
    *parameter = at - h;
    const double below = objective(example);
    EXPECT_EQ((at + h) - at, h);
    quotient = (above - below) / (2.0 * h);
    h /= 2;
  }
  *parameter = at;
  const double first = (4 * estimate[1] - estimate[0]) / 3;
  const double second = (4 * estimate[2] - estimate[1]) / 3;
  return (16 * second - first) / 15;
}

std::vector<double> differences(Example* example, std::vector<float>* parameters) {
  std::vector<double> quotients;
  for (float& parameter : *parameters) {
    quotients.push_back(difference_quotient(*example, &parameter));
  }
  return quotients;
}

void add(std::vector<double>* values, const std::vector<float>& old) {
  for (size_t i = 0; i < values->size(); ++i) (*values)[i] += old[i];
}

void check_gradients(Example example, const std::string& what) {
  Values expected;
  if (example.linear) {
    expected["grad_input"] = differences(&example, &example.input);
    expected["grad_weight"] = differences(&example, &example.weight);
    if (!example.bias.empty()) expected["grad_bias"] = differences(&example, &example.bias);
    if (example.accumulate) {
      add(&expected["grad_weight"], example.old_weight);
      if (!example.bias.empty()) add(&expected["grad_bias"], example.old_bias);
    }
  } else {
    expected["grad_logits"] = differences(&example, &example.logits);
  }
  const Values two_passes = backward(example);
  ASSERT_EQ(two_passes.size(), expected.size()) << what;
  for (const auto& [name, values] : expected) {
    expect_near(two_passes.at(name), values, kTolerance, what + ": " + name);
  }
  // ForwardBackward has no gradients of statistics or chosen columns. Without these it must equal
  // Forward and Backward.
  if (!example.grad_lse.empty() || !example.grad_target_logit.empty() ||
      !example.grad_entropy.empty() || !example.ids.empty()) {
    return;
  }
  const Values one_pass = forward_backward(example);
  for (const auto& [name, values] : two_passes) {
    EXPECT_EQ(one_pass.at(name), values) << what << ": " << name;
  }
  for (const auto& [name, values] : forward(example)) {
    EXPECT_EQ(one_pass.at(name), values) << what << ": " << name;
  }
}

class ReferenceGradient : public testing::TestWithParam<bool> {
 protected:
  Example example() const { return GetParam() ? linear_example(4, 5, 3) : logits_example(4, 5); }
};

TEST_P(ReferenceGradient, IsTheDifferenceQuotientWithDefaultOptions) {
  check_gradients(example(), "default");
}

TEST_P(ReferenceGradient, IsTheDifferenceQuotientForEveryOption) {
  for (const Option& option : all_options()) {
    if (!applies(option, GetParam())) continue;
    Example one = example();
    option.apply(&one);
    check_gradients(one, option.name);
  }
}

TEST_P(ReferenceGradient, IsTheDifferenceQuotientForEveryPairOfOptions) {
  const std::vector<Option>& options = all_options();
  int pairs = 0;
  for (size_t a = 0; a < options.size(); ++a) {
    for (size_t b = a + 1; b < options.size(); ++b) {
      if (!applies(options[a], GetParam()) || !applies(options[b], GetParam())) continue;
      if (!combine(options[a], options[b])) continue;
      Example pair = example();
      options[a].apply(&pair);
      options[b].apply(&pair);
      check_gradients(pair, std::string(options[a].name) + " and " + options[b].name);
      ++pairs;
    }
  }
  EXPECT_GT(pairs, 190);
}

TEST_P(ReferenceGradient, IsTheDifferenceQuotientWithAllOptionsTogether) {
  Example all = example();
  for (const Option& option : all_options()) {
    const std::string name = option.name;
    if (!applies(option, GetParam()) || option.on == On::given_logits || name == "no_bias")
      continue;
    if (name == "normalizer_of_host" || name == "label_smoothing_of_one") continue;
    if (name == "ignore_index_of_a_class" || name == "reduction_sum") continue;
    option.apply(&all);
  }
  all.options.reduction = Reduction::mean;
  check_gradients(all, "all options");
}

INSTANTIATE_TEST_SUITE_P(Ops, ReferenceGradient, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& parameter) {
                           return parameter.param ? "Linear" : "GivenLogits";
                         });

}  // namespace
}  // namespace logitless::reference
