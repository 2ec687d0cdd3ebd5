// SPDX-License-Identifier: Apache-2.0
// The error bounds of the reference, compared with the formulas of "Accuracy" in docs/semantics.md,
// written out again here for one row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "example.h"
#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

constexpr double u = 0x1p-24, tiny = 0x1p-126;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Outputs = decltype(Result::outputs);

template <class Op>
Outputs bounds_of(const Example& example, const BoundModel& model = {}) {
  return evaluate(make_op<Op>(example), model).outputs;
}

void expect_bound(const Output& output, size_t k, double expected, const char* name) {
  EXPECT_NEAR(output.bound[k] / expected, 1, 1e-9) << name << "[" << k << "]";
}

TEST(ReferenceBounds, OfTwoEqualLogits) {
  Example example = logits_example(1, 2);
  example.logits = {0, 0};
  example.target = {0};
  example.options.reduction = Reduction::none;
  const double h = std::log(2.0);
  const double lse = 4 * u * (h + 1 + 3 + h) + u * h;
  Outputs outputs = bounds_of<CrossEntropyForwardBackward>(example);
  expect_bound(outputs["lse"], 0, lse, "lse");
  expect_bound(outputs["row_log_sum"], 0, lse - u * h, "row_log_sum");
  expect_bound(outputs["loss"], 0, lse + 2 * u * h, "loss");
  expect_bound(outputs["entropy"], 0, 4 * u * (1 + 3 + h), "entropy");
  for (const char* exact : {"row_reference", "target_logit"}) {
    EXPECT_LE(outputs[exact].bound[0], 2 * tiny) << exact;
  }
  // A device may flush each of the two summands to 0 too.
  EXPECT_LE(outputs["weighted_logit_sum"].bound[0], 4 * tiny);
  const double p = 0.5 * (lse + 4 * u * 3) + tiny;
  expect_bound(outputs["grad_logits"], 0, p + 4 * u * 1.5 + u * 0.5 + tiny, "grad_logits");
  expect_bound(outputs["grad_logits"], 1, p + 4 * u * 0.5 + u * 0.5 + tiny, "grad_logits");
  const Softmax op{.logits = view_of(example.logits, 1, 2),
                   .probabilities = matrix_view(nullptr, DType::f16, 1, 2)};
  expect_bound(evaluate(op).outputs["probabilities"], 0, p + 4 * u * 0.5 + 0x1p-11 * 0.5 + 0x1p-25,
               "probabilities");
}

// One token under scale, softcap and temperature, with bounds as docs/semantics.md defines them.
struct Transcript {
  Example e;
  std::vector<double> z, slope, error, p;  // [V]
  double m, log_sum, lse, h = 0, b = 0, h_error = 0;

  explicit Transcript(const Example& example) : e(example) {
    const LossOptions& o = e.options;
    const std::vector<double> raw = logits_of(e);
    const double gamma = u * (4 + std::sqrt(e.hidden));
    for (int64_t j = 0; j < e.columns; ++j) {
      const double t = std::tanh(o.logit_scale * raw[j] / o.softcap);
      z.push_back(o.softcap * t / o.temperature);
      slope.push_back(o.logit_scale * (1 - t * t) / o.temperature);
      double products = 0;
      for (int64_t k = 0; k < e.hidden; ++k) {
        products += std::fabs(e.input[k] * e.weight[j * e.hidden + k]);
      }
      error.push_back(gamma * products * std::fabs(o.logit_scale) / o.temperature +
                      3 * u * std::fabs(z[j]) + (e.hidden + 1) * tiny * (2 / 0.75));
    }
    m = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const double value : z) sum += std::exp(value - m);
    log_sum = std::log(sum);
    lse = m + log_sum;
    double p_error = 0, p_z = 0;
    for (int64_t j = 0; j < e.columns; ++j) {
      p.push_back(std::exp(z[j] - lse));
      h -= p[j] * (z[j] - lse);
      p_error += p[j] * error[j];
      p_z += p[j] * std::fabs(z[j]);
    }
    const double log_v = std::log2(e.columns);
    b = 4 * u * (h + log_v + 3 + std::fabs(log_sum)) + u * std::fabs(lse) + p_error;
    for (int64_t j = 0; j < e.columns; ++j)
      h_error += p[j] * error[j] * (1 + std::fabs(z[j] - lse + h));
    h_error += 4 * u * (log_v + 3 + std::fabs(lse) + p_z);
  }
};

Example all_options_at_once() {
  Example e = linear_example(1, 3, 2);
  e.options.reduction = Reduction::none;
  e.options.label_smoothing = 0.25f;
  e.options.z_loss = 0.125f;
  e.options.logit_scale = -1.5f;
  e.options.softcap = 2;
  e.options.temperature = 0.75f;
  e.vocab_weight = {0.5f, 2, 1.25f};
  e.token_weight = {-1.5f};
  e.target = {1};
  return e;
}

TEST(ReferenceBounds, OfTheLossAndStatisticsAreTheDocumentsFormulas) {
  const Transcript t(all_options_at_once());
  Outputs outputs = bounds_of<LinearCrossEntropyForward>(t.e);
  const double f = 0.75 * 2, k = 0.25 / 3, c_sum = 3.75, lambda = 0.125;
  const double log_v = std::log2(3.0), loss = outputs["loss"].value[0];
  double expected = (f + k * c_sum) * t.b + f * (t.error[1] + 2 * u * std::fabs(t.z[1])) +
                    2 * u * k * c_sum * std::fabs(t.lse) +
                    lambda * (2 * std::fabs(t.lse) * t.b + 3 * u * t.lse * t.lse);
  double weighted = 0, highest = t.m;
  for (int j = 0; j < 3; ++j) {
    const double one = t.e.vocab_weight[j] * (t.error[j] + u * (log_v + 2) * std::fabs(t.z[j]));
    expected += k * one;
    weighted += one;
    highest = std::max(highest, t.z[j] + t.error[j]);
  }
  expect_bound(outputs["loss"], 0, 1.5 * expected + 2 * u * std::fabs(loss), "loss");
  expect_bound(outputs["lse"], 0, t.b, "lse");
  expect_bound(outputs["entropy"], 0, t.h_error, "entropy");
  expect_bound(outputs["target_logit"], 0, t.error[1] + 2 * u * std::fabs(t.z[1]), "target_logit");
  expect_bound(outputs["row_reference"], 0, highest - t.m, "row_reference");
  expect_bound(outputs["row_log_sum"], 0, t.b - u * std::fabs(t.lse) + highest - t.m,
               "row_log_sum");
  expect_bound(outputs["weighted_logit_sum"], 0,
               weighted + u * std::fabs(outputs["weighted_logit_sum"].value[0]),
               "weighted_logit_sum");
}

// The error and magnitude of each dz. Storing a dz in 16 bits may add stored * least.
struct DzBounds {
  std::vector<double> error, magnitude;
  double stored = 0;
};

// Chosen columns: the sum of each column's gradients, and their number.
constexpr double kChosen[] = {0, 3, 1.5}, kTimes[] = {0, 1, 2};

DzBounds dz_bounds(const Transcript& t) {
  const double f = 0.75 * 2, k = 0.25 / 3, w = f + k * 3.75, lambda = 0.125, ga = 2 * 1.5;
  DzBounds bounds;
  for (int j = 0; j < 3; ++j) {
    const double p = t.p[j], information = std::fabs(t.z[j] - t.lse + t.h);
    const double p_error = p * (t.error[j] + t.b + 4 * u * (3 + std::fabs(t.z[j] - t.m))) + tiny;
    const double m = ga * ((w + 2 * lambda * std::fabs(t.lse)) * p + (j == 1 ? f : 0) +
                           k * t.e.vocab_weight[j]) +
                     0.5 * p + (j == 1 ? 3 : 0) + 0.75 * p * information + kChosen[j];
    const double dz = ga * (std::fabs(w + 2 * lambda * t.lse) * p_error + 2 * lambda * p * t.b) +
                      0.5 * p_error + 0.75 * (p_error * (1 + information) + p * t.h_error) +
                      4 * u * m + kTimes[j] * u * kChosen[j];
    const double c = t.z[j] * 0.75 / 2, slope = std::fabs(t.slope[j]);
    bounds.error.push_back(
        slope * dz + (m + dz) * (4 * u * 2 + 2 * std::fabs(c) * slope * 0.75 * t.error[j] / 2));
    bounds.magnitude.push_back(m * slope);
  }
  bounds.stored =
      (4.5 + ga * (w + 2 * lambda * std::fabs(t.lse)) + 0.5 + 3 + 0.75 * (1 + t.h) + 4.5) * 2;
  return bounds;
}

TEST(ReferenceBounds, OfTheGradientsAreTheDocumentsFormulas) {
  Example e = all_options_at_once();
  e.grad_loss = {2};
  e.grad_lse = {0.5f};
  e.grad_target_logit = {-3};
  e.grad_entropy = {-0.75f};
  e.ids = {2, 1, 2, -1};
  e.grad_logits_at = {0.5f, -3, 1, 9};
  const Transcript t(e);
  const auto [error, magnitude, stored] = dz_bounds(t);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    auto op = make_op<LinearCrossEntropyBackward>(e);
    std::vector<uint16_t> input(2), weight(6);
    if (dtype != DType::f32) {
      const std::vector<double> h = read(op.input), rows = read(op.weight);
      op.input = matrix_view(input.data(), dtype, 1, 2);
      op.weight = matrix_view(weight.data(), dtype, 3, 2);
      write(h, op.input);
      write(rows, op.weight);
    }
    op.grad_input.dtype = op.grad_weight.dtype = op.grad_bias.dtype = dtype;
    const double unit = dtype == DType::f32 ? u : dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
    const double least = dtype == DType::f16 ? 0x1p-25 : tiny;
    const double r = dtype == DType::f32 ? 0 : 2 * unit;
    Outputs outputs = evaluate(op).outputs;
    const auto total = [&](double sum, int terms, double value) {
      return sum + terms * tiny + unit * std::fabs(value) + least;
    };
    for (int d = 0; d < 2; ++d) {
      double sum = 0;
      for (int j = 0; j < 3; ++j) {
        sum += (error[j] + stored * least + (u * (4 + std::sqrt(3)) + r) * magnitude[j]) *
               std::fabs(e.weight[j * 2 + d]);
      }
      expect_bound(outputs["grad_input"], d, total(sum, 3, outputs["grad_input"].value[d]),
                   "grad_input");
    }
    for (int j = 0; j < 3; ++j) {
      const double one = error[j] + stored * least + (u * 5 + r) * magnitude[j];
      expect_bound(outputs["grad_bias"], j, total(one, 1, outputs["grad_bias"].value[j]),
                   "grad_bias");
      for (int d = 0; d < 2; ++d) {
        expect_bound(outputs["grad_weight"], j * 2 + d,
                     total(one * std::fabs(e.input[d]), 1, outputs["grad_weight"].value[j * 2 + d]),
                     "grad_weight");
      }
    }
  }
}

TEST(ReferenceBounds, OfReducedLosses) {
  Example e = logits_example(4, 5);
  e.target[2] = -100;
  e.vocab_weight = {0.5f, 2, 1, 1.5f, 0.75f};
  e.options.reduction = Reduction::none;
  const Output none = bounds_of<CrossEntropyForward>(e)["loss"];
  double error = 0, magnitude = 0, classes = 0;
  for (const int i : {0, 1, 3}) {
    error += none.bound[i];
    magnitude += std::fabs(none.value[i]);
    classes += e.vocab_weight[e.target[i]];
  }
  EXPECT_EQ(none.bound[2], 0);
  const double growth = u * (std::log2(3.0) + 2);
  error += growth * magnitude;
  e.options.reduction = Reduction::sum;
  expect_bound(bounds_of<CrossEntropyForward>(e)["loss"], 0, error, "sum");
  e.options.reduction = Reduction::mean;
  const double mean = magnitude / classes;
  expect_bound(bounds_of<CrossEntropyForward>(e)["loss"], 0,
               error / classes + (2 * u + growth) * mean, "mean");
  // Gradients of the loss inherit the normalizer's error.
  const Output gradient = bounds_of<CrossEntropyBackward>(e)["grad_logits"];
  e.options.normalizer = classes;
  const Output given = bounds_of<CrossEntropyBackward>(e)["grad_logits"];
  const double w = e.vocab_weight[e.target[0]], p = given.value[1] * classes / w;
  EXPECT_NE(e.target[0], 1);
  EXPECT_NEAR((gradient.bound[1] - given.bound[1]) / (growth * w / classes * p), 1, 1e-6);
  expect_bound(bounds_of<CrossEntropyForward>(e)["loss"], 0, error / classes + 2 * u * mean,
               "given");
}

TEST(ReferenceBounds, OfProbabilitiesAsInput) {
  Example e = logits_example(1, 2);
  e.options.input_kind = InputKind::probabilities;
  e.options.reduction = Reduction::none;
  e.options.probability_floor = 0.25f;
  e.logits = {0.25f, 0.5f};
  e.target = {1};
  const double log_p = std::log(0.75), log_q = std::log(0.5);
  expect_bound(bounds_of<CrossEntropyForward>(e)["loss"], 0, u * (2 + 5 * -log_p) + 2 * u * -log_p,
               "loss");
  e.options.label_smoothing = 0.5f;
  expect_bound(bounds_of<CrossEntropyForward>(e)["loss"], 0,
               0.75 * u * (2 + 6 * -log_p) + 0.25 * u * (2 + 6 * -log_q) +
                   2 * u * (-0.75 * log_p - 0.25 * log_q),
               "smoothed loss");
  expect_bound(bounds_of<CrossEntropyBackward>(e)["grad_logits"], 1, 9 * u + 2 * tiny,
               "grad_logits");
}

TEST(ReferenceBounds, AccumulatingAddsOneMoreSummand) {
  Example e = linear_example(4, 5, 3);
  const Output fresh = bounds_of<LinearCrossEntropyBackward>(e)["grad_weight"];
  e.accumulate = true;
  e.old_weight.assign(15, -100.0f);
  e.old_bias.assign(5, 1.0f);
  const Output sum = bounds_of<LinearCrossEntropyBackward>(e)["grad_weight"];
  for (int k = 0; k < 15; ++k) {
    const double rounding = u * (std::fabs(sum.value[k]) - std::fabs(fresh.value[k]));
    EXPECT_NEAR(sum.bound[k], fresh.bound[k] + u * (4 + 2) * 100 + rounding, 1e-15);
  }
}

TEST(ReferenceBounds, NoTokenLeavesTheOldValuesToTheBit) {
  Example e = linear_example(3, 5, 2);
  e.target.assign(3, -100);
  e.accumulate = true;
  e.old_weight.assign(10, 3.0f);
  e.old_bias.assign(5, 3.0f);
  Outputs outputs = bounds_of<LinearCrossEntropyBackward>(e);
  EXPECT_EQ(outputs["grad_weight"].bound, std::vector<double>(10, 0.0));
  EXPECT_EQ(outputs["grad_bias"].bound, std::vector<double>(5, 0.0));
}

TEST(ReferenceBounds, GammaDependsOnHowTheBackendAdds) {
  Example e = linear_example(1, 2, 64);
  const auto target_logit = [&](const BoundModel& model) {
    return bounds_of<LinearCrossEntropyForward>(e, model)["target_logit"].bound[0];
  };
  double products = 0;
  for (int k = 0; k < 64; ++k) products += std::fabs(e.input[k] * e.weight[64 + k]);
  e.target = {1};
  const double plain = target_logit({});
  EXPECT_NEAR(target_logit({.tensor_cores = true}) - plain, u * (64.0 / 16 - 8) * products, 1e-12);
  EXPECT_NEAR(target_logit({.structured = true}) - plain, u * (64.0 / 4 - 8) * products, 1e-12);
  EXPECT_EQ(target_logit({.tensor_cores = true, .structured = true}),
            target_logit({.structured = true}));
}

TEST(ReferenceBounds, AreZeroWhereTheResultIsExactOrNotANumber) {
  Example e = logits_example(4, 5);
  e.options.reduction = Reduction::none;
  e.target[0] = -100;
  e.logits[7] = NAN;
  e.logits[12] = -kInfinity;
  e.target[2] = 2;
  int exact = 0;
  for (const auto& [name, output] : bounds_of<CrossEntropyForwardBackward>(e)) {
    const size_t width = output.value.size() / 4;
    for (size_t k = 0; k < output.value.size(); ++k) {
      EXPECT_TRUE(std::isfinite(output.bound[k])) << name;
      const bool ignored = k / width == 0;
      if (ignored || !std::isfinite(output.value[k])) {
        EXPECT_EQ(output.bound[k], 0) << name << k;
        ++exact;
      } else if (name == "lse" || name == "grad_logits") {
        EXPECT_GT(output.bound[k], 0) << name << k;
      }
    }
  }
  // The values of ignored rows and NaN rows are exact, and a loss or target logit of -inf.
  EXPECT_GT(exact, 20);
}

TEST(ReferenceBounds, ArgmaxAcceptsWhatRoundingCannotTellApart) {
  Example e = logits_example(3, 4);
  e.logits = {1,    std::nextafter(1.0f, 2.0f),
              0.5f, -kInfinity,  //
              NAN,  0,
              1,    2,  //
              0,    1,
              0,    0};
  e.target = {0, 0, -100};
  const Output argmax = bounds_of<CrossEntropyForward>(e)["argmax"];
  EXPECT_EQ(argmax.value[0], 1);
  EXPECT_EQ(argmax.accepted[0], (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(argmax.accepted[1], (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(argmax.accepted[2], (std::vector<int64_t>{-1}));
}

// A column within rounding of the target may or may not be above it. Equal infinities are a tie.
TEST(ReferenceBounds, RankAcceptsWhatRoundingCannotTellApart) {
  Example e = logits_example(4, 4);
  e.logits = {1,          std::nextafter(1.0f, 2.0f),
              0.5f,       2,  //
              NAN,        0,
              1,          2,  //
              -kInfinity, -kInfinity,
              0,          1,  //
              0,          1,
              2,          3};
  e.target = {0, 1, 0, -100};
  const Output rank = bounds_of<CrossEntropyForward>(e)["rank"];
  EXPECT_EQ(rank.value, (std::vector<double>{2, rank.value[1], 2, -1}));
  EXPECT_EQ(rank.accepted[0], (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(rank.accepted[1], (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(rank.accepted[2], (std::vector<int64_t>{2}));
  EXPECT_EQ(rank.accepted[3], (std::vector<int64_t>{-1}));
}

}  // namespace
}  // namespace logitless::reference
