// SPDX-License-Identifier: Apache-2.0
// The edge table of docs/semantics.md on the reference: tokens that do not count, infinite and NaN
// logits, and what run() writes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "example.h"
#include "src/backend.h"
#include "src/reference/numbers.h"

namespace logitless::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
using Doubles = std::vector<double>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
constexpr bool kSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool kSanitized = false;
#endif

template <class Op>
Status run_reference(const Op& op) {
  return reference_backend().run(op, {}, {});
}

bool all_nan(const Doubles& values, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    if (!std::isnan(values[k])) return false;
  }
  return true;
}
bool all_finite(const Doubles& values, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k) {
    if (!std::isfinite(values[k])) return false;
  }
  return true;
}

Example with_statistics_gradients(Example example) {
  example.grad_lse.assign(example.tokens, 0.5f);
  example.grad_target_logit.assign(example.tokens, -1.0f);
  example.grad_entropy.assign(example.tokens, 0.25f);
  return example;
}

// A NaN in an ignored row, in its weight or in its upstream gradients changes nothing.
TEST(ReferenceEdges, IgnoredRowsAreNeverRead) {
  for (const bool linear : {true, false}) {
    for (const bool out_of_range : {true, false}) {
      Example clean =
          with_statistics_gradients(linear ? linear_example(4, 5, 3) : logits_example(4, 5));
      clean.options.reduction = Reduction::none;
      clean.options.label_smoothing = 0.1f;
      clean.options.out_of_range = OutOfRange::ignore;
      clean.target[1] = out_of_range ? 5 : -100;
      clean.token_weight.assign(4, 2.0f);
      clean.grad_loss.assign(4, 1.0f);
      Example dirty = clean;
      const int64_t width = linear ? 3 : 5;
      std::vector<float>& rows = linear ? dirty.input : dirty.logits;
      for (int64_t k = width; k < 2 * width; ++k) rows[k] = k % 2 == 0 ? kNan : -kInfinity;
      for (auto* values : {&dirty.token_weight, &dirty.grad_loss, &dirty.grad_lse,
                           &dirty.grad_target_logit, &dirty.grad_entropy}) {
        (*values)[1] = kNan;
      }
      EXPECT_EQ(forward(clean), forward(dirty));
      const Values gradients = backward(dirty);
      EXPECT_EQ(backward(clean), gradients);
      dirty.grad_loss[1] = 1e30f;
      if (linear) {
        const auto bounds = [](const Example& e) {
          return evaluate(make_op<LinearCrossEntropyBackward>(e)).outputs.at("grad_weight").bound;
        };
        EXPECT_EQ(bounds(clean), bounds(dirty));
      }
      const Values statistics = forward(dirty);
      for (const auto& [name, values] : statistics)
        EXPECT_EQ(values[1], name == "argmax" || name == "rank" ? -1 : 0) << name;
      const Doubles& own = gradients.at(linear ? "grad_input" : "grad_logits");
      for (int64_t k = width; k < 2 * width; ++k) EXPECT_EQ(own[k], 0);
    }
  }
}

TEST(ReferenceEdges, IgnoredRowsDoNotCountInTheMean) {
  Example example = logits_example(4, 5), three = logits_example(3, 5);
  example.options.ignore_index = example.target[3];
  EXPECT_EQ(forward(example).at("loss"), forward(three).at("loss"));
}

TEST(ReferenceEdges, ATargetOutOfRangeIsAnErrorAndNothingIsWritten) {
  for (const int64_t target : {int64_t{5}, int64_t{-1}, int64_t{1} << 40}) {
    Example example = linear_example(4, 5, 3);
    example.target[2] = target;
    std::vector<float> memory(64, 7.0f);
    int32_t fault = 4;
    auto op = make_op<LinearCrossEntropyForwardBackward>(example);
    op.statistics = {};
    op.statistics.lse = vector_view(memory.data(), DType::f32, 4);
    op.loss = scalar_view(memory.data() + 4, DType::f32);
    op.grad_input = matrix_view(memory.data() + 8, DType::f32, 4, 3);
    op.grad_weight = matrix_view(memory.data() + 20, DType::f32, 5, 3);
    op.grad_bias = vector_view(memory.data() + 40, DType::f32, 5);
    op.fault = vector_view(&fault, DType::i32, 1);
    const Status status = run_reference(op);
    EXPECT_EQ(status.code(), StatusCode::target_out_of_range);
    EXPECT_NE(std::string(status.message()).find("target[2] is " + std::to_string(target)),
              std::string::npos);
    EXPECT_EQ(memory, std::vector<float>(64, 7.0f));
    EXPECT_TRUE(evaluate(op).outputs.empty());
    op.options.out_of_range = OutOfRange::ignore;
    EXPECT_TRUE(run_reference(op).ok());
    EXPECT_EQ(fault, 4);
    EXPECT_EQ(memory[2], 0);
    EXPECT_NE(memory[3], 7);
  }
}

TEST(ReferenceEdges, AMinusInfiniteLogitHasNoProbability) {
  Example example = logits_example(1, 4), without = logits_example(1, 3);
  example.logits = {1, -kInfinity, 2, 0.5f};
  without.logits = {1, 2, 0.5f};
  example.target = {2};
  without.target = {1};
  const Example masked = with_statistics_gradients(example);
  for (const char* name :
       {"loss", "lse", "entropy", "row_reference", "row_log_sum", "target_logit"}) {
    EXPECT_EQ(forward(example).at(name), forward(without).at(name)) << name;
  }
  const Doubles rest = backward(with_statistics_gradients(without)).at("grad_logits");
  EXPECT_EQ(backward(masked).at("grad_logits"), (Doubles{rest[0], 0, rest[1], rest[2]}));

  example.options.label_smoothing = 0.1f;
  EXPECT_EQ(forward(example).at("loss")[0], kInfinity);
  EXPECT_EQ(forward(example).at("weighted_logit_sum")[0], -kInfinity);
  EXPECT_TRUE(all_finite(backward(example).at("grad_logits"), 0, 4));
  // A class of weight 0 adds nothing to the smoothing.
  example.vocab_weight = {1, 0, 1, 1};
  EXPECT_TRUE(std::isfinite(forward(example).at("loss")[0]));
  EXPECT_EQ(forward(example).at("weighted_logit_sum")[0], 3.5);
  EXPECT_EQ(backward(example).at("grad_logits")[1], 0);
}

TEST(ReferenceEdges, AMinusInfiniteTarget) {
  Example example = logits_example(1, 3);
  example.options.reduction = Reduction::sum;
  example.logits = {1, -kInfinity, 2};
  example.target = {1};
  EXPECT_EQ(forward(example).at("loss")[0], kInfinity);
  EXPECT_EQ(forward(example).at("target_logit")[0], -kInfinity);
  EXPECT_EQ(backward(example).at("grad_logits")[1], -1);
  // A term with the factor 0 adds nothing, but a NaN in the row makes the row's loss NaN.
  example.vocab_weight = {1, 0, 1};
  EXPECT_EQ(forward(example).at("loss")[0], 0);
  example.logits[0] = kNan;
  EXPECT_TRUE(std::isnan(forward(example).at("loss")[0]));
  example.logits[0] = 1;
  example.options.label_smoothing = 1;
  EXPECT_TRUE(std::isfinite(forward(example).at("loss")[0]));
}

TEST(ReferenceEdges, ARowWithoutAnyProbabilityIsNanAlone) {
  for (const float bad : {-kInfinity, kInfinity, kNan}) {
    Example example = logits_example(3, 4);
    example.options.reduction = Reduction::none;
    const Values clean = forward(example);
    for (int64_t j = 4; j < 8; ++j) {
      if (bad == -kInfinity || j == 6) example.logits[j] = bad;
    }
    const Values values = forward(example);
    for (const char* name : {"loss", "lse", "entropy", "row_log_sum"}) {
      EXPECT_TRUE(std::isnan(values.at(name)[1])) << name;
      EXPECT_EQ(values.at(name)[0], clean.at(name)[0]);
      EXPECT_EQ(values.at(name)[2], clean.at(name)[2]);
    }
    const Doubles gradient = backward(example).at("grad_logits");
    EXPECT_TRUE(all_nan(gradient, 4, 8));
    EXPECT_TRUE(all_finite(gradient, 0, 4) && all_finite(gradient, 8, 12));
    example.options.reduction = Reduction::mean;
    EXPECT_TRUE(std::isnan(forward(example).at("loss")[0]));
  }
}

TEST(ReferenceEdges, ANanInARowOfInputStaysInItsRow) {
  Example example = linear_example(3, 4, 2);
  example.options.reduction = Reduction::none;
  example.input[2] = kNan;
  const Values values = forward_backward(example);
  EXPECT_TRUE(std::isnan(values.at("loss")[1]));
  EXPECT_TRUE(all_finite(values.at("loss"), 0, 1) && all_finite(values.at("loss"), 2, 3));
  EXPECT_TRUE(all_nan(values.at("grad_input"), 2, 4));
  EXPECT_TRUE(all_finite(values.at("grad_input"), 0, 2));
  EXPECT_TRUE(all_finite(values.at("grad_input"), 4, 6));
  EXPECT_TRUE(all_nan(values.at("grad_weight"), 0, 8));
}

TEST(ReferenceEdges, ASoftcapUndoesAMinusInfiniteBias) {
  Example example = linear_example(1, 3, 2);
  example.bias[1] = -kInfinity;
  example.target = {1};
  EXPECT_EQ(forward(example).at("target_logit")[0], -kInfinity);
  example.options.softcap = 2;
  EXPECT_EQ(forward(example).at("target_logit")[0], -2);
  EXPECT_TRUE(std::isfinite(forward(example).at("loss")[0]));
  EXPECT_EQ(backward(example).at("grad_bias")[1], 0);
}

TEST(ReferenceEdges, RunRoundsEveryValueOnceIntoAnyView) {
  Example example = linear_example(3, 4, 2);
  example.options.label_smoothing = 0.1f;
  auto op = make_op<LinearCrossEntropyForwardBackward>(example);
  const Values values = forward_backward(example);
  std::vector<uint16_t> input(3 * 4, 0x1234), weight(4 * 2), bias(4);
  std::vector<float> loss(1), numbers(3 * 11);
  std::vector<int32_t> argmax(3), rank(3);
  op.loss = vector_view(loss.data(), DType::f32, 1);  // [1] is accepted for []
  op.grad_input = matrix_view(input.data(), DType::bf16, 3, 2);
  op.grad_input.stride = {4, 2};
  op.grad_weight = matrix_view(weight.data(), DType::f16, 4, 2);
  op.grad_bias = vector_view(bias.data(), DType::bf16, 4);
  float* next = numbers.data();
  for (TensorView* view :
       {&op.statistics.lse, &op.statistics.target_logit, &op.statistics.entropy,
        &op.statistics.row_reference, &op.statistics.row_log_sum, &op.statistics.weighted_logit_sum,
        &op.statistics.logprob, &op.statistics.sum_p_squared, &op.statistics.mean_logit,
        &op.statistics.max_logprob, &op.statistics.mass_above}) {
    view->data = next;
    next += 3;
  }
  op.statistics.argmax = vector_view(argmax.data(), DType::i32, 3);
  op.statistics.rank = vector_view(rank.data(), DType::i32, 3);
  ASSERT_TRUE(run_reference(op).ok());
  EXPECT_EQ(loss[0], static_cast<float>(values.at("loss")[0]));
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(numbers[i], static_cast<float>(values.at("lse")[i]));
    EXPECT_EQ(numbers[15 + i], static_cast<float>(values.at("weighted_logit_sum")[i]));
    EXPECT_EQ(numbers[24 + i], static_cast<float>(values.at("mean_logit")[i]));
    EXPECT_EQ(numbers[27 + i], static_cast<float>(values.at("max_logprob")[i]));
    EXPECT_EQ(numbers[30 + i], static_cast<float>(values.at("mass_above")[i]));
    EXPECT_EQ(argmax[i], values.at("argmax")[i]);
    EXPECT_EQ(rank[i], values.at("rank")[i]);
    for (int64_t k = 0; k < 2; ++k) {
      EXPECT_EQ(input[i * 4 + k * 2], round_to_bf16(values.at("grad_input")[i * 2 + k]));
      EXPECT_EQ(input[i * 4 + k * 2 + 1], 0x1234);
    }
  }
  for (int64_t k = 0; k < 8; ++k) EXPECT_EQ(weight[k], round_to_f16(values.at("grad_weight")[k]));
  for (int64_t k = 0; k < 4; ++k) EXPECT_EQ(bias[k], round_to_bf16(values.at("grad_bias")[k]));
}

TEST(ReferenceEdges, GradientsAndProbabilitiesMayOverwriteTheLogits) {
  Example example = logits_example(3, 4);
  auto op = make_op<CrossEntropyForwardBackward>(example);
  op.statistics = {};
  float loss[2];
  std::vector<float> apart(12), logits = example.logits;
  op.loss = scalar_view(&loss[0], DType::f32);
  op.grad_logits = view_of(apart, 3, 4);
  ASSERT_TRUE(run_reference(op).ok());
  op.loss = scalar_view(&loss[1], DType::f32);
  op.grad_logits = op.logits = view_of(logits, 3, 4);
  ASSERT_TRUE(run_reference(op).ok());
  EXPECT_EQ(logits, apart);
  EXPECT_EQ(loss[0], loss[1]);

  logits = example.logits;
  ASSERT_TRUE(run_reference(Softmax{view_of(logits, 3, 4), view_of(apart, 3, 4)}).ok());
  ASSERT_TRUE(run_reference(Softmax{view_of(logits, 3, 4), view_of(logits, 3, 4)}).ok());
  EXPECT_EQ(logits, apart);
}

TEST(ReferenceEdges, StridedAndBroadcastInputsAreTheDenseOnes) {
  Example dense = linear_example(3, 4, 2);
  dense.target = {2, 2, 2};
  dense.token_weight = {0.5f, 0.5f, 0.5f};
  dense.options.reduction = Reduction::none;
  dense.grad_loss = {3, 3, 3};
  for (int64_t k = 2; k < 6; ++k) dense.input[k] = dense.input[k % 2];
  std::vector<float> transposed(8);
  for (int64_t j = 0; j < 4; ++j) {
    for (int64_t k = 0; k < 2; ++k) transposed[k * 4 + j] = dense.weight[j * 2 + k];
  }
  auto op = make_op<LinearCrossEntropyBackward>(dense);
  op.weight = view_of(transposed, 4, 2);
  op.weight.stride = {1, 4};
  op.input.stride = {0, 1};
  for (TensorView* view : {&op.target, &op.weights.token, &op.grad_loss}) view->stride = {0, 0};
  const Result result = evaluate(op);
  for (const auto& [name, values] : backward(dense))
    EXPECT_EQ(result.outputs.at(name).value, values);
}

TEST(ReferenceEdges, NeedsNoWorkspace) {
  WorkspaceSize size{1, 1, 1};
  EXPECT_TRUE(reference_backend().workspace(Softmax{}, 0, &size).ok());
  EXPECT_EQ(size.minimum, 0u);
  EXPECT_EQ(size.recommended, 0u);
  EXPECT_EQ(size.alignment, 64u);
  EXPECT_STREQ(reference_backend().name(), "reference");
}

// A problem that does not fit in memory is a status, not an exception.
TEST(ReferenceEdges, OutOfMemoryIsAStatus) {
  const float element = 0;
  std::vector<int64_t> sizes = {int64_t{1} << 61};  // more than a vector allows
  // More memory than any machine has. Sanitizers would end the program.
  if (!kSanitized) sizes.push_back(int64_t{1} << 50);
  for (const int64_t size : sizes) {
    TensorView huge = matrix_view(&element, DType::f32, 1, size);
    huge.stride = {0, 0};
    const Status status = run_reference(Softmax{huge, huge});
    EXPECT_EQ(status.code(), StatusCode::internal);
    EXPECT_STREQ(status.message(), "out of memory");
  }
}

}  // namespace
}  // namespace logitless::reference
