// SPDX-License-Identifier: Apache-2.0
// Compares the reference with closed forms of the loss, its statistics and its gradients.
#include "src/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "example.h"

namespace logitless::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Example one_row(std::vector<float> logits, int64_t target) {
  Example example;
  example.linear = false;
  example.tokens = 1;
  example.columns = static_cast<int64_t>(logits.size());
  example.logits = std::move(logits);
  example.target = {target};
  return example;
}

double loss_of(const Example& example) { return forward(example).at("loss")[0]; }

TEST(Reference, UniformLogitsCostLogOfTheVocabulary) {
  const Example example = one_row(std::vector<float>(7, 3.25f), 2);
  const Values values = forward(example);
  const double log_v = std::log(7.0);
  expect_near(values.at("loss"), {log_v}, 1e-15, "loss");
  expect_near(values.at("entropy"), {log_v}, 1e-15, "entropy");
  expect_near(values.at("lse"), {3.25 + log_v}, 1e-15, "lse");
  expect_near(values.at("row_log_sum"), {log_v}, 1e-15, "row_log_sum");
  EXPECT_EQ(values.at("row_reference"), (std::vector<double>{3.25}));
  EXPECT_EQ(values.at("target_logit"), (std::vector<double>{3.25}));
  EXPECT_EQ(values.at("weighted_logit_sum"), (std::vector<double>{7 * 3.25}));
  EXPECT_EQ(values.at("argmax"), (std::vector<double>{0}));
  expect_near(values.at("logprob"), {-log_v}, 1e-15, "logprob");
  EXPECT_EQ(values.at("rank"), (std::vector<double>{0}));
  expect_near(values.at("sum_p_squared"), {1.0 / 7}, 1e-15, "sum_p_squared");
  EXPECT_EQ(values.at("mean_logit"), (std::vector<double>{3.25}));
  expect_near(values.at("max_logprob"), {-log_v}, 1e-15, "max_logprob");
  EXPECT_EQ(values.at("mass_above"), (std::vector<double>{0}));
  std::vector<double> gradient(7, 1.0 / 7);
  gradient[2] -= 1;
  expect_near(backward(example).at("grad_logits"), gradient, 1e-15, "grad_logits");
}

TEST(Reference, OneClassCostsNothing) {
  Example example = one_row({-2.5f}, 0);
  example.vocab_weight = {0.3f};
  for (const float smoothing : {0.0f, 0.1f, 1.0f}) {
    example.options.label_smoothing = smoothing;
    EXPECT_EQ(loss_of(example), 0);
    EXPECT_EQ(backward(example).at("grad_logits")[0], 0);
  }
  example.options.z_loss = 0.5f;
  example.options.reduction = Reduction::sum;
  EXPECT_EQ(loss_of(example), 0.5 * 2.5 * 2.5);
  EXPECT_EQ(backward(example).at("grad_logits")[0], 2 * 0.5 * -2.5);
}

TEST(Reference, TwoClassesAreTheLogisticLoss) {
  for (const double d : {-30.0, -1.5, 0.0, 0.25, 20.0}) {
    const Example example = one_row({static_cast<float>(d), 0}, 0);
    expect_near({loss_of(example)}, {std::log1p(std::exp(-d))}, 1e-15, "loss");
    const double sigmoid = 1 / (1 + std::exp(-d));
    expect_near(backward(example).at("grad_logits"), {sigmoid - 1, 1 - sigmoid}, 1e-15, "gradient");
    const double other = 1 - sigmoid;
    expect_near(forward(example).at("entropy"),
                {-sigmoid * std::log(sigmoid) - (other > 0 ? other * std::log(other) : 0)}, 1e-13,
                "entropy");
  }
}

TEST(Reference, AnOutlierTakesAllTheProbability) {
  const Example example = one_row({0, 0, 500, 0}, 1);
  EXPECT_EQ(loss_of(example), 500);
  expect_near(backward(example).at("grad_logits"), {0, -1, 1, 0}, 1e-200, "grad_logits");
  EXPECT_EQ(loss_of(one_row({0, 0, 500, 0}, 2)), 0);
  EXPECT_EQ(loss_of(one_row({0, 1e30f, -1e30f}, 2)), 2.0 * 1e30f);
}

TEST(Reference, ACommonOffsetChangesNothing) {
  Example example = logits_example(3, 6);
  Example shifted = example;
  for (float& z : shifted.logits) z += 65536;
  EXPECT_EQ(forward(example).at("loss"), forward(shifted).at("loss"));
  EXPECT_EQ(backward(example).at("grad_logits"), backward(shifted).at("grad_logits"));
  EXPECT_EQ(forward(example).at("entropy"), forward(shifted).at("entropy"));
}

TEST(Reference, TemperatureDividesAndScaleMultiplies) {
  Example example = logits_example(3, 6), by_scale = example, by_hand = example;
  example.options.temperature = 4;
  by_scale.options.logit_scale = 0.25f;
  for (float& z : by_hand.logits) z /= 4;
  EXPECT_EQ(forward(example), forward(by_hand));
  EXPECT_EQ(forward(by_scale), forward(by_hand));
  std::vector<double> gradient = backward(by_hand).at("grad_logits");
  for (double& g : gradient) g /= 4;
  EXPECT_EQ(backward(example).at("grad_logits"), gradient);
  EXPECT_EQ(backward(by_scale).at("grad_logits"), gradient);
}

// p is [1/8, 1/2, 1/4, 1/8]: column 2 has one column above it, column 1 none.
TEST(Reference, StatisticsOfARowByHand) {
  const auto two = static_cast<float>(std::log(2.0));
  const std::vector<float> logits{-two, two, 0, -two};
  const double ranks[] = {2, 0, 1, 2}, p[] = {0.125, 0.5, 0.25, 0.125};
  const double above[] = {0.75, 0, 0.5, 0.75};
  for (int64_t t = 0; t < 4; ++t) {
    const Values values = forward(one_row(logits, t));
    EXPECT_EQ(values.at("rank")[0], ranks[t]);
    expect_near(values.at("logprob"), {std::log(p[t])}, 1e-7, "logprob");
    expect_near(values.at("sum_p_squared"), {22.0 / 64}, 1e-7, "sum_p_squared");
    expect_near(values.at("mean_logit"), {-double{two} / 4}, 1e-15, "mean_logit");
    expect_near(values.at("max_logprob"), {std::log(0.5)}, 1e-7, "max_logprob");
    expect_near(values.at("mass_above"), {above[t]}, 1e-7, "mass_above");
  }
  Example ignored = one_row(logits, -100);
  const Values values = forward(ignored);
  EXPECT_EQ(values.at("rank")[0], -1);
  for (const char* name : {"logprob", "sum_p_squared", "mean_logit", "max_logprob", "mass_above"})
    EXPECT_EQ(values.at(name)[0], 0);
}

// Each token's row has the loss, statistics and gradients of a call with its temperature for all.
TEST(Reference, ATemperatureOfEachTokenIsTheNumberInItsRow) {
  Example example = logits_example(3, 6);
  example.options.reduction = Reduction::none;
  example.options.softcap = 1.5f;
  example.options.logit_scale = 2;
  example.temperature = {0.5f, 1, 3};
  const Values each = forward_backward(example);
  for (int64_t i = 0; i < 3; ++i) {
    Example number = example;
    number.options.temperature = example.temperature[i];
    number.temperature.clear();
    for (const auto& [name, values] : forward_backward(number)) {
      const size_t columns = values.size() / 3;
      for (size_t k = i * columns; k < (i + 1) * columns; ++k) {
        EXPECT_EQ(each.at(name)[k], values[k]) << name << " " << k;
      }
    }
  }
}

// A row with an invalid temperature is NaN and sets the fault word; other rows are unaffected.
TEST(Reference, ATemperatureThatIsNoneIsNaN) {
  Example example = logits_example(3, 4);
  example.options.reduction = Reduction::none;
  example.options.logit_scale = 1e30f;
  for (const float bad : {0.0f, -1.0f, kInfinity, 1e-40f, 1e-10f, static_cast<float>(kNan)}) {
    example.temperature = {1e30f, bad, 1e30f};
    const Result result = evaluate(make_op<CrossEntropyForwardBackward>(example));
    EXPECT_EQ(result.fault, 4) << bad;
    const std::vector<double>& gradient = result.outputs.at("grad_logits").value;
    for (int k = 0; k < 12; ++k) EXPECT_EQ(std::isnan(gradient[k]), k / 4 == 1) << bad;
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(std::isnan(result.outputs.at("logprob").value[i]), i == 1) << bad;
    example.target[1] = -100;
    EXPECT_EQ(evaluate(make_op<CrossEntropyForwardBackward>(example)).fault, 0) << bad;
    example.target[1] = 1;
  }
}

// Rows without an upstream gradient are not read, but count in the mean.
TEST(Reference, BackwardSkipsTokensWithoutAGradient) {
  Example example = linear_example(4, 5, 3), given = example;
  example.token_weight = {1, 0, 2, 0};
  const Values values = backward(example);
  given.target[1] = given.target[3] = -100;
  given.token_weight = {1, 0, 2, 0};
  given.normalizer = {4};
  EXPECT_EQ(values, backward(given));
  for (int k = 3; k < 6; ++k) example.input[k] = kInfinity;
  EXPECT_EQ(values, backward(example));
  EXPECT_TRUE(std::isnan(forward_backward(example).at("grad_weight")[0]));
  example.grad_lse = {0, 1, 0, 0};
  EXPECT_TRUE(std::isnan(backward(example).at("grad_weight")[0]));
}

// Scale, then softcap, then temperature: any other order gives another result.
TEST(Reference, SoftcapIsAfterTheScaleAndBeforeTheTemperature) {
  Example example = one_row({3, -1}, 0);
  example.options.logit_scale = 2;
  example.options.softcap = 5;
  example.options.temperature = 0.5f;
  const double high = 5 * std::tanh(6.0 / 5) / 0.5, low = 5 * std::tanh(-2.0 / 5) / 0.5;
  const Values values = forward(example);
  expect_near(values.at("row_reference"), {high}, 1e-15, "row_reference");
  expect_near(values.at("loss"), {std::log1p(std::exp(low - high))}, 1e-15, "loss");
  // The slope is 1 - tanh^2 of each logit, times the scale and divided by the temperature.
  const double p = 1 / (1 + std::exp(high - low));
  const double slope_high = 2 * (1 - std::pow(std::tanh(6.0 / 5), 2)) / 0.5;
  const double slope_low = 2 * (1 - std::pow(std::tanh(-2.0 / 5), 2)) / 0.5;
  expect_near(backward(example).at("grad_logits"), {-p * slope_high, p * slope_low}, 1e-14,
              "gradient");
}

TEST(Reference, FullSmoothingIsTheMeanOverTheClasses) {
  Example example = one_row({1, 2, 3, 4}, 3);
  example.options.label_smoothing = 1;
  const double lse = std::log(std::exp(1) + std::exp(2) + std::exp(3) + std::exp(4));
  expect_near({loss_of(example)}, {lse - 2.5}, 1e-15, "loss");
  Example other = example;
  other.target = {0};
  EXPECT_EQ(loss_of(example), loss_of(other));
  EXPECT_EQ(backward(example).at("grad_logits"), backward(other).at("grad_logits"));
}

TEST(Reference, TheMeanDividesByTheClassWeightsOfTheTargets) {
  Example example = logits_example(4, 5);
  example.target = {0, 2, -100, 2};
  example.vocab_weight = {0.5f, 9, 3, 9, 9};
  example.token_weight = {2, 1, 1, 0.25f};
  Example none = example;
  none.options.reduction = Reduction::none;
  const std::vector<double> losses = forward(none).at("loss");
  expect_near({loss_of(example)}, {(losses[0] + losses[1] + losses[3]) / 6.5}, 1e-15, "mean");
  std::vector<double> gradient = backward(none).at("grad_logits");
  for (double& g : gradient) g /= 6.5;
  expect_near(backward(example).at("grad_logits"), gradient, 1e-15, "gradient");
  example.normalizer = {4};
  expect_near({loss_of(example)}, {(losses[0] + losses[1] + losses[3]) / 4}, 1e-15, "given");
}

TEST(Reference, TheNormalizerMayBeAnInteger) {
  const Example example = logits_example(4, 5);
  const int64_t count = 3;
  CrossEntropyForward op = make_op<CrossEntropyForward>(example);
  op.weights.normalizer = scalar_view(&count, DType::i64);
  expect_near(evaluate(op).outputs.at("loss").value, {loss_of(example) * 4 / 3}, 1e-15, "mean");
}

// The mean is empty if no token counts, or if all class weights are 0.
TEST(Reference, AnEmptyMeanIsZeroOrNan) {
  Example ignored = logits_example(3, 5), weightless = ignored;
  ignored.target.assign(3, -100);
  weightless.vocab_weight.assign(5, 0.0f);
  weightless.target[1] = -100;
  for (Example example : {ignored, weightless}) {
    EXPECT_EQ(loss_of(example), 0);
    EXPECT_EQ(backward(example).at("grad_logits"), std::vector<double>(15, 0.0));
    example.options.empty_mean = EmptyMean::nan;
    EXPECT_TRUE(std::isnan(loss_of(example)));
  }
  ignored.options.empty_mean = weightless.options.empty_mean = EmptyMean::nan;
  EXPECT_EQ(backward(ignored).at("grad_logits"), std::vector<double>(15, 0.0));
  std::vector<double> expected(15, kNan);
  for (int64_t j = 5; j < 10; ++j) expected[j] = 0;
  expect_near(backward(weightless).at("grad_logits"), expected, 0, "gradient");
}

TEST(Reference, ANormalizerOfZeroIsAnEmptyMean) {
  Example example = logits_example(2, 3);
  example.normalizer = {0};
  EXPECT_EQ(loss_of(example), 0);
  EXPECT_EQ(backward(example).at("grad_logits"), std::vector<double>(6, 0.0));
  example.options.empty_mean = EmptyMean::nan;
  EXPECT_TRUE(std::isnan(loss_of(example)));
  expect_near(backward(example).at("grad_logits"), std::vector<double>(6, kNan), 0, "gradient");
}

TEST(Reference, GradientsOfStatisticsSurviveAnEmptyMean) {
  Example example = logits_example(2, 5);
  example.vocab_weight.assign(5, 0.0f);
  example.grad_lse = {1, 2};
  Example alone = example;
  alone.vocab_weight.clear();
  alone.options.reduction = Reduction::none;
  alone.grad_loss = {0, 0};
  EXPECT_EQ(backward(example).at("grad_logits"), backward(alone).at("grad_logits"));
  EXPECT_NE(backward(example).at("grad_logits")[0], 0);
}

TEST(Reference, NoTokenAtAll) {
  for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
    Example example = linear_example(0, 5, 3);
    example.options.reduction = reduction;
    const Values values = forward_backward(example);
    const size_t size = reduction == Reduction::none ? 0 : 1;
    EXPECT_EQ(values.at("loss"), std::vector<double>(size, 0.0));
    EXPECT_TRUE(values.at("lse").empty());
    EXPECT_TRUE(values.at("grad_input").empty());
    EXPECT_EQ(values.at("grad_weight"), std::vector<double>(15, 0.0));
    EXPECT_EQ(values.at("grad_bias"), std::vector<double>(5, 0.0));
    example.accumulate = true;
    example.old_weight.assign(15, 2.5f);
    example.old_bias.assign(5, -1.0f);
    EXPECT_EQ(backward(example).at("grad_weight"), std::vector<double>(15, 2.5));
    EXPECT_EQ(backward(example).at("grad_bias"), std::vector<double>(5, -1.0));
    example.options.empty_mean = EmptyMean::nan;
    EXPECT_EQ(std::isnan(forward(example).at("loss").empty() ? 0 : loss_of(example)),
              reduction == Reduction::mean);
  }
}

TEST(Reference, ProbabilitiesAsInput) {
  Example example = one_row({0.25f, 0.5f, 0.125f, 0}, 1);
  example.options.input_kind = InputKind::probabilities;
  example.options.probability_floor = 0.0625f;
  EXPECT_EQ(loss_of(example), -std::log(0.5625));
  EXPECT_EQ(backward(example).at("grad_logits"), (std::vector<double>{0, -1 / 0.5625, 0, 0}));
  // Without a floor, a class of weight 0 has no share, even at p = 0.
  example.options.probability_floor = 0;
  example.options.label_smoothing = 0.5f;
  example.options.reduction = Reduction::sum;
  example.vocab_weight = {1, 2, 1, 0};
  const double q[] = {0.125, 1.25, 0.125};
  expect_near({loss_of(example)},
              {-(q[0] * std::log(0.25) + q[1] * std::log(0.5) + q[2] * std::log(0.125))}, 1e-15,
              "loss");
  expect_near(backward(example).at("grad_logits"), {-q[0] / 0.25, -q[1] / 0.5, -q[2] / 0.125, 0},
              1e-15, "gradient");
}

TEST(Reference, LinearOpsAreTheOpsOnTheirLogits) {
  Example linear = linear_example(5, 7, 3);
  linear.options.label_smoothing = 0.1f;
  linear.options.softcap = 3;
  Example given = linear;
  given.linear = false;
  for (const double z : logits_of(linear)) given.logits.push_back(static_cast<float>(z));
  EXPECT_EQ(forward(linear), forward(given));
  const std::vector<double> draw = backward(given).at("grad_logits");
  std::vector<double> input(15), weight(21), bias(7);
  for (int i = 0; i < 5; ++i) {
    for (int j = 0; j < 7; ++j) {
      bias[j] += draw[i * 7 + j];
      for (int k = 0; k < 3; ++k) {
        input[i * 3 + k] += draw[i * 7 + j] * linear.weight[j * 3 + k];
        weight[j * 3 + k] += draw[i * 7 + j] * linear.input[i * 3 + k];
      }
    }
  }
  const Values gradients = backward(linear);
  expect_near(gradients.at("grad_input"), input, 1e-14, "grad_input");
  expect_near(gradients.at("grad_weight"), weight, 1e-14, "grad_weight");
  expect_near(gradients.at("grad_bias"), bias, 1e-14, "grad_bias");
}

TEST(Reference, SoftmaxOverAnyStride) {
  const float logits[] = {0, 1, 2, 3, 4, 5};
  TensorView columns = matrix_view(logits, DType::f32, 2, 3);
  columns.stride = {1, 2};  // the rows are 0 2 4 and 1 3 5
  const Softmax op{.logits = columns, .probabilities = matrix_view(nullptr, DType::f32, 2, 3)};
  const double sum = 1 + std::exp(-2) + std::exp(-4);
  const std::vector<double> row = {std::exp(-4) / sum, std::exp(-2) / sum, 1 / sum};
  const std::vector<double> p = evaluate(op).outputs.at("probabilities").value;
  expect_near(p, {row[0], row[1], row[2], row[0], row[1], row[2]}, 1e-15, "probabilities");
}

// Backward takes p and lse from the row state that it is given.
TEST(Reference, BackwardUsesTheGivenStatistics) {
  Example example = logits_example(2, 4);
  example.options.reduction = Reduction::none;
  example.grad_loss = {0, 0};
  example.grad_lse = {1, 1};
  const std::vector<double> p = backward(example).at("grad_logits");
  const Values row = forward(example);
  Example given = example;
  for (int i = 0; i < 2; ++i) {
    given.row_reference.push_back(static_cast<float>(row.at("row_reference")[i]) + 1);
    given.row_log_sum.push_back(static_cast<float>(row.at("row_log_sum")[i]));
  }
  std::vector<double> expected = p;
  for (double& value : expected) value *= std::exp(-1);
  expect_near(backward(given).at("grad_logits"), expected, 1e-7, "from row_reference + 1");
  // The gradient is -p (log p + entropy), with the given entropy.
  given = example;
  given.grad_lse.clear();
  given.grad_entropy = {1, 1};
  given.entropy = {5, 6};
  for (int k = 0; k < 8; ++k) expected[k] = -p[k] * (std::log(p[k]) + given.entropy[k / 4]);
  expect_near(backward(given).at("grad_logits"), expected, 1e-14, "from entropy");
  // The gradient contains 2 lambda lse p with the given lse.
  given = example;
  given.grad_lse.clear();
  given.grad_loss = {1, 1};
  given.options.z_loss = 1;
  given.row_reference = {1, 2};
  given.row_log_sum = {0.5f, 0.25f};
  const std::vector<double> values = backward(given).at("grad_logits");
  for (int k = 0; k < 8; ++k) {
    const int i = k / 4;
    const double lse = given.row_reference[i] + given.row_log_sum[i];
    const double q = std::exp(given.logits[k] - lse);
    EXPECT_NEAR(values[k], q * (1 + 2 * lse) - (given.target[i] == k % 4), 1e-14);
  }
}

TEST(Reference, EqualLogitsAreWonByTheLowestIndex) {
  EXPECT_EQ(forward(one_row({1, 3, 2, 3, 3}, 0)).at("argmax")[0], 1);
  EXPECT_EQ(forward(one_row({-kInfinity, -kInfinity}, 0)).at("argmax")[0], 0);
}

}  // namespace
}  // namespace logitless::reference
