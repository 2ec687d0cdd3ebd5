// SPDX-License-Identifier: Apache-2.0
// The reference's divergences against their definitions in long double, and its gradients against
// central differences of its loss.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "src/reference/reference.h"

namespace logitless::reference {
namespace {

constexpr int64_t N = 4, D = 3, T = 2, V = 5;
constexpr DivergenceKind kKinds[] = {DivergenceKind::forward_kl, DivergenceKind::reverse_kl,
                                     DivergenceKind::jsd, DivergenceKind::skew_kl,
                                     DivergenceKind::tv};

TensorView view_of(std::vector<float>& x, int64_t rows, int64_t columns) {
  return matrix_view(x.data(), DType::f32, rows, columns);
}
TensorView view_of(std::vector<float>& x) {
  return vector_view(x.data(), DType::f32, static_cast<int64_t>(x.size()));
}

// The numbers lie on a grid of 1/32, so that small steps are exact in f32.
std::vector<float> numbers(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> x(count);
  for (float& v : x) v = static_cast<float>(static_cast<int>(random() % 97) - 48) / 32;
  return x;
}

struct Example {
  std::vector<float> input = numbers(N * D, 1), weight = numbers(V * D, 2), bias = numbers(V, 3);
  std::vector<float> teacher_input = numbers(N * T, 4), teacher_weight = numbers(V * T, 5);
  std::vector<float> teacher_bias = numbers(V, 6), teacher_logits = numbers(N * V, 7);
  std::vector<float> token_weight{1.5f, 0.25f, -2, 0.75f}, temperature{0.5f, 1, 2, 1.5f};
  std::vector<float> grad_loss{0.75f, -1.5f, 2, 0.5f};
  std::vector<int64_t> target{1, 4, -100, 0};
  bool with_target = true, given_logits = false;
  LossOptions options{.reduction = Reduction::none};
  DivergenceOptions divergence{};

  template <class Op>
  Op op() {
    Op op;
    op.input = view_of(input, N, D), op.weight = view_of(weight, V, D), op.bias = view_of(bias);
    if (given_logits) {
      op.teacher.logits = view_of(teacher_logits, N, V);
    } else {
      op.teacher.input = view_of(teacher_input, N, T);
      op.teacher.weight = view_of(teacher_weight, V, T);
      op.teacher.bias = view_of(teacher_bias);
    }
    if (options.temperature == 1) op.weights.temperature = view_of(temperature);
    if (with_target) op.target = vector_view(target.data(), DType::i64, N);
    op.weights.token = view_of(token_weight);
    op.options = options, op.divergence = divergence;
    return op;
  }
  std::vector<double> losses() {
    auto op = this->op<LinearDivergenceForward>();
    std::vector<float> loss(N);
    op.loss = view_of(loss);
    return evaluate(op, {}, false).outputs.at("loss").value;
  }
  double objective() {
    const std::vector<double> loss = losses();
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += grad_loss[i] * loss[i];
    return sum;
  }
};

std::vector<Example> examples() {
  std::vector<Example> all;
  for (const DivergenceKind kind : kKinds) {
    for (const float beta : {0.0f, 0.3f, 0.5f, 1.0f}) {
      for (const int options : {0, 1, 2, 3}) {
        Example& e = all.emplace_back();
        e.divergence.kind = kind, e.divergence.beta = beta;
        e.with_target = options != 1, e.given_logits = options == 2;
        if (options != 0) {
          e.divergence.teacher_logit_scale = -0.7f, e.divergence.teacher_softcap = 1.5f;
          e.divergence.teacher_temperature = 1.25f;
        }
        if (options == 3) {
          e.options.logit_scale = 0.8f, e.options.softcap = 2, e.options.temperature = 0.75f;
          e.divergence.label_weight = 0.6f;
        }
      }
    }
  }
  return all;
}

using Row = std::vector<long double>;
Row softmax(const std::vector<float>& x, const std::vector<float>& w, const std::vector<float>& b,
            int64_t i, double scale, double softcap, double temperature) {
  const size_t hidden = w.size() / V;
  Row z(V);
  long double sum = 0;
  for (int64_t j = 0; j < V; ++j) {
    long double raw = b.empty() ? x[i * V + j] : b[j];
    for (size_t k = 0; !b.empty() && k < hidden; ++k) {
      raw += static_cast<long double>(x[i * hidden + k]) * w[j * hidden + k];
    }
    raw *= scale;
    if (softcap > 0) raw = softcap * std::tanh(raw / softcap);
    sum += z[j] = std::exp(raw / temperature);
  }
  for (long double& p : z) p /= sum;
  return z;
}

long double kl(const Row& a, const Row& b) {
  long double sum = 0;
  for (size_t j = 0; j < a.size(); ++j) sum += a[j] * std::log(a[j] / b[j]);
  return sum;
}

long double definition(const DivergenceOptions& o, const Row& p, const Row& q) {
  const long double beta = o.beta;
  Row m(V);
  long double apart = 0;
  for (int64_t j = 0; j < V; ++j) {
    m[j] = (1 - beta) * p[j] + beta * q[j];
    apart += std::fabs(p[j] - q[j]);
  }
  switch (o.kind) {
    case DivergenceKind::forward_kl:
      return kl(q, p);
    case DivergenceKind::reverse_kl:
      return kl(p, q);
    case DivergenceKind::jsd:  // at the ends of beta as in TRL
      if (beta == 0) return kl(q, p);
      if (beta == 1) return kl(p, q);
      return beta * kl(q, m) + (1 - beta) * kl(p, m);
    case DivergenceKind::skew_kl:
      return kl(q, m);
    case DivergenceKind::tv:
      break;
  }
  return apart / 2;
}

TEST(ReferenceDivergence, ItIsItsDefinition) {
  for (Example& e : examples()) {
    const std::vector<double> loss = e.losses();
    const DivergenceOptions& d = e.divergence;
    for (int64_t i = 0; i < N; ++i) {
      if (e.with_target && e.target[i] < 0) {
        EXPECT_EQ(loss[i], 0);
        continue;
      }
      const double own = e.options.temperature == 1 ? e.temperature[i] : e.options.temperature;
      const Row p =
          softmax(e.input, e.weight, e.bias, i, e.options.logit_scale, e.options.softcap, own);
      const std::vector<float> none;
      const Row q = softmax(e.given_logits ? e.teacher_logits : e.teacher_input, e.teacher_weight,
                            e.given_logits ? none : e.teacher_bias, i, d.teacher_logit_scale,
                            d.teacher_softcap, d.teacher_temperature);
      long double want = definition(d, p, q);
      if (d.label_weight != 0) want -= d.label_weight * std::log(p[e.target[i]]);
      EXPECT_NEAR(loss[i], static_cast<double>(e.token_weight[i] * want), 1e-12)
          << static_cast<int>(d.kind) << " beta " << d.beta << " token " << i;
    }
  }
}

TEST(ReferenceDivergence, GradientsAreThoseOfTheLoss) {
  int compared = 0;
  for (Example& e : examples()) {
    auto op = e.op<LinearDivergenceBackward>();
    std::vector<float> gx(N * D), gw(V * D), gb(V);
    op.grad_loss = view_of(e.grad_loss);
    op.grad_input = view_of(gx, N, D), op.grad_weight = view_of(gw, V, D);
    op.grad_bias = view_of(gb);
    const Result result = evaluate(op, {}, false);
    ASSERT_TRUE(result.status.ok()) << result.status.message();
    const std::pair<const char*, std::vector<float>*> all[] = {
        {"grad_input", &e.input}, {"grad_weight", &e.weight}, {"grad_bias", &e.bias}};
    for (const auto& [name, parameters] : all) {
      const std::vector<double>& got = result.outputs.at(name).value;
      for (size_t k = 0; k < parameters->size(); ++k) {
        float& x = (*parameters)[k];
        const float at = x;
        double quotient[3];
        float h = 0x1p-6f;
        for (double& q : quotient) {
          x = at + h;
          const double above = e.objective();
          x = at - h;
          q = (above - e.objective()) / (2.0 * h);
          h /= 2;
        }
        x = at;
        const double first = (4 * quotient[1] - quotient[0]) / 3;
        const double second = (4 * quotient[2] - quotient[1]) / 3;
        // A step across one of tv's kinks makes the two quotients disagree.
        const bool smooth = std::fabs(second - first) < 1e-6;
        if (e.divergence.kind == DivergenceKind::tv && !smooth) continue;
        ++compared;
        EXPECT_NEAR(got[k], (16 * second - first) / 15, 1e-8)
            << static_cast<int>(e.divergence.kind) << " beta " << e.divergence.beta << " " << name
            << "[" << k << "]";
      }
    }
  }
  EXPECT_GT(compared, 80 * (N * D + V * D + V) * 9 / 10);
}

}  // namespace
}  // namespace logitless::reference
