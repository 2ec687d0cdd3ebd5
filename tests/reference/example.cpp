// SPDX-License-Identifier: Apache-2.0
// Small loss problems for the tests of the reference.
#include "example.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace logitless::reference {
namespace {

// Returns multiples of 1/32 in [-2, 2).
std::vector<float> grid(int64_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(seed >> 25) - 64) / 32;
  }
  return values;
}

TensorView scalar_or_vector(const std::vector<float>& values, Reduction reduction) {
  if (values.empty()) return {};
  return reduction == Reduction::none ? view_of(values) : scalar_view(values.data(), DType::f32);
}

TensorView output_vector(int64_t size, DType dtype = DType::f32) {
  return vector_view(nullptr, dtype, size);
}

template <class Op>
void ask_for_statistics(const Example& example, Op* op) {
  if (example.of_probabilities()) return;
  const TensorView each = output_vector(example.tokens);
  op->statistics = {.lse = each,
                    .target_logit = each,
                    .entropy = each,
                    .argmax = output_vector(example.tokens, DType::i64),
                    .row_reference = each,
                    .row_log_sum = each,
                    .weighted_logit_sum = each,
                    .logprob = each,
                    .sum_p_squared = each,
                    .mean_logit = each,
                    .max_logprob = each};
  if (example.options.vocab_total > example.columns) return;
  op->statistics.rank = output_vector(example.tokens, DType::i32);
  op->statistics.mass_above = each;
}

template <class Op>
Values evaluate_values(const Example& example) {
  const Result result = evaluate(make_op<Op>(example), {}, false);
  EXPECT_TRUE(result.status.ok()) << result.status.message();
  Values values;
  for (const auto& [name, output] : result.outputs) values[name] = output.value;
  return values;
}

// Runs over b, since a reduced loss has a single element.
double dot(const std::vector<float>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < b.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

Example linear_example(int64_t tokens, int64_t columns, int64_t hidden) {
  Example example;
  example.tokens = tokens;
  example.columns = columns;
  example.hidden = hidden;
  example.input = grid(tokens * hidden, 1);
  example.weight = grid(columns * hidden, 2);
  example.bias = grid(columns, 3);
  for (int64_t i = 0; i < tokens; ++i) example.target.push_back((7 * i + 3) % columns);
  return example;
}

Example logits_example(int64_t tokens, int64_t columns) {
  Example example = linear_example(tokens, columns, 1);
  example.linear = false;
  example.logits = grid(tokens * columns, 4);
  return example;
}

std::vector<double> logits_of(const Example& example) {
  std::vector<double> logits(example.tokens * example.columns);
  for (int64_t i = 0; i < example.tokens; ++i) {
    for (int64_t j = 0; j < example.columns; ++j) {
      double sum = example.bias.empty() ? 0 : example.bias[j];
      for (int64_t k = 0; k < example.hidden; ++k) {
        sum +=
            double{example.input[i * example.hidden + k]} * example.weight[j * example.hidden + k];
      }
      logits[i * example.columns + j] =
          example.linear ? sum : example.logits[i * example.columns + j];
    }
  }
  return logits;
}

TensorView view_of(const std::vector<float>& values, int64_t rows, int64_t columns) {
  return matrix_view(values.data(), DType::f32, rows, columns);
}
TensorView view_of(const std::vector<float>& values) {
  return values.empty() ? TensorView{} : vector_view(values.data(), DType::f32, values.size());
}
TensorView view_of(const std::vector<int64_t>& values) {
  return vector_view(values.data(), DType::i64, values.size());
}

template <class Op>
Op make_op(const Example& example) {
  Op op{};
  const int64_t n = example.tokens, v = example.columns, d = example.hidden;
  op.target = view_of(example.target);
  op.options = example.options;
  op.weights.token = view_of(example.token_weight);
  op.weights.vocab = view_of(example.vocab_weight);
  op.weights.temperature = view_of(example.temperature);
  if (!example.normalizer.empty()) {
    op.weights.normalizer = scalar_view(example.normalizer.data(), DType::f32);
  }
  if constexpr (LinearOp<Op>) {
    op.input = view_of(example.input, n, d);
    op.weight = view_of(example.weight, v, d);
    op.bias = view_of(example.bias);
  } else {
    op.logits = view_of(example.logits, n, v);
  }
  if constexpr (ForwardOp<Op>) {
    if (example.options.vocab_total <= v) {
      op.loss = example.options.reduction == Reduction::none ? output_vector(n)
                                                             : scalar_view(nullptr, DType::f32);
    }
    ask_for_statistics(example, &op);
  }
  if constexpr (BackwardOnlyOp<Op>) {
    op.row_reference = view_of(example.row_reference);
    op.row_log_sum = view_of(example.row_log_sum);
    op.entropy = view_of(example.entropy);
    op.grad_lse = view_of(example.grad_lse);
    op.grad_target_logit = view_of(example.grad_target_logit);
    op.grad_entropy = view_of(example.grad_entropy);
  }
  if constexpr (ChoosingOp<Op>) {
    const int64_t k = example.chosen();
    if (k > 0) op.ids = matrix_view(example.ids.data(), DType::i64, n, k);
    if constexpr (ForwardOp<Op>) {
      if (k > 0) op.logits_at = matrix_view(nullptr, DType::f32, n, k);
    } else if (k > 0) {
      op.grad_logits_at = view_of(example.grad_logits_at, n, k);
    }
  }
  if constexpr (GradientOp<Op>) {
    op.grad_loss = scalar_or_vector(example.grad_loss, example.options.reduction);
    if constexpr (LinearOp<Op>) {
      op.grad_input = matrix_view(nullptr, DType::f32, n, d);
      op.grad_weight = matrix_view(nullptr, DType::f32, v, d);
      if (!example.bias.empty()) op.grad_bias = output_vector(v);
      op.accumulate_grad_weight = example.accumulate;
      if (example.accumulate) {
        op.grad_weight = view_of(example.old_weight, v, d);
        if (!example.bias.empty()) op.grad_bias = view_of(example.old_bias);
      }
    } else {
      op.grad_logits = matrix_view(nullptr, DType::f32, n, v);
    }
  }
  return op;
}
template CrossEntropyForward make_op(const Example&);
template CrossEntropyBackward make_op(const Example&);
template CrossEntropyForwardBackward make_op(const Example&);
template LinearCrossEntropyForward make_op(const Example&);
template LinearCrossEntropyBackward make_op(const Example&);
template LinearCrossEntropyForwardBackward make_op(const Example&);

Values forward(const Example& example) {
  return example.linear ? evaluate_values<LinearCrossEntropyForward>(example)
                        : evaluate_values<CrossEntropyForward>(example);
}
Values backward(const Example& example) {
  return example.linear ? evaluate_values<LinearCrossEntropyBackward>(example)
                        : evaluate_values<CrossEntropyBackward>(example);
}
Values forward_backward(const Example& example) {
  return example.linear ? evaluate_values<LinearCrossEntropyForwardBackward>(example)
                        : evaluate_values<CrossEntropyForwardBackward>(example);
}

double objective(const Example& example) {
  const Values values = forward(example);
  const std::vector<double>& loss = values.at("loss");
  double sum = dot(
      example.grad_loss.empty() ? std::vector<float>(loss.size(), 1.0f) : example.grad_loss, loss);
  if (!example.grad_lse.empty()) sum += dot(example.grad_lse, values.at("lse"));
  if (!example.grad_target_logit.empty()) {
    sum += dot(example.grad_target_logit, values.at("target_logit"));
  }
  if (!example.grad_entropy.empty()) sum += dot(example.grad_entropy, values.at("entropy"));
  for (size_t k = 0; k < example.ids.size(); ++k) {
    const double z = values.at("logits_at")[k];
    if (std::isfinite(z)) sum += example.grad_logits_at[k] * z;  // others are not differentiable
  }
  return sum;
}

void expect_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (a[i] == b[i]) continue;
    ASSERT_TRUE(std::fabs(a[i] - b[i]) <= tolerance * std::max(1.0, std::fabs(b[i])))
        << what << "[" << i << "]: " << a[i] << " and " << b[i];
  }
}

}  // namespace logitless::reference
