// SPDX-License-Identifier: Apache-2.0
// The common factor of the gradients, and a row's coefficients relative to it.
#include "prepared_tokens.h"

#include <gmock/gmock.h>

#include <cmath>

namespace logitless::cpu {
namespace {

using testing::ElementsAre;

TEST(Tokens, SumAndMeanLeaveTheirFactorOut) {
  const std::vector<int64_t> target{0, -100, 1, 1};
  const float upstream = 3;
  CrossEntropyForwardBackward op{.target = view(target)};
  op.grad_loss = scalar_view(&upstream, DType::f32);
  Prepared p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 1);
  EXPECT_THAT(p.upstream, ElementsAre(1, 1, 1));
  op.options.reduction = Reduction::sum;
  EXPECT_EQ(prepare(op, 2).tokens.gradient_scale, 3);
  op.options.reduction = Reduction::mean;
  op.options.normalizer = 4.5;
  EXPECT_EQ(prepare(op, 2).tokens.gradient_scale, static_cast<float>(3 / 4.5));
  op.grad_loss = {};
  EXPECT_EQ(prepare(op, 2).tokens.gradient_scale, static_cast<float>(1 / 4.5));
}

TEST(Tokens, NoneScalesByAPowerOfTwoThatLosesNothing) {
  const std::vector<int64_t> target{0, 1, -100, 1, 1};
  const std::vector<float> upstream{3e-7f, -1e-7f, 1000, 0, 1e-12f};
  CrossEntropyBackward op{.target = view(target), .options = {.reduction = Reduction::none}};
  op.grad_loss = view(upstream);
  const Prepared p = prepare(op, 2);
  ASSERT_THAT(p.row, ElementsAre(0, 1, 4));  // the token whose gradient is 0 is left out
  const float scale = p.tokens.gradient_scale;
  int exponent;
  EXPECT_EQ(std::frexp(scale, &exponent), .5f);
  EXPECT_GE(scale, 3e-7f);  // the ignored token's gradient does not count
  EXPECT_LT(scale, 6e-7f);
  EXPECT_EQ(p.tokens.inv_gradient_scale, 1 / scale);
  EXPECT_EQ(p.upstream[0] * scale, upstream[0]);
  EXPECT_EQ(p.upstream[1] * scale, upstream[1]);
  EXPECT_EQ(p.upstream[2] * scale, upstream[4]);
}

TEST(Tokens, NoneScalesByTheEndsOfF32) {
  const std::vector<int64_t> target{0, 1};
  for (const float size : {3e-37f, 0x1p-126f, 0x1p126f, 5e37f}) {
    const std::vector<float> upstream{size, -size / 2};
    CrossEntropyBackward op{.target = view(target), .options = {.reduction = Reduction::none}};
    op.grad_loss = view(upstream);
    const Prepared p = prepare(op, 2);
    EXPECT_GT(p.upstream[0], .5f) << size;
    EXPECT_LE(p.upstream[0], 1) << size;
    EXPECT_EQ(p.upstream[1] * p.tokens.gradient_scale, upstream[1]);
    EXPECT_EQ(p.tokens.inv_gradient_scale * p.tokens.gradient_scale, 1);
  }
}

TEST(Tokens, ANanUpstreamStaysInItsRow) {
  const std::vector<int64_t> target{0, 1, 1};
  const std::vector<float> upstream{kNan, 2, kInf};
  CrossEntropyBackward op{.target = view(target), .options = {.reduction = Reduction::none}};
  op.grad_loss = view(upstream);
  const Prepared p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 2);
  EXPECT_TRUE(std::isnan(p.upstream[0]));
  EXPECT_EQ(p.upstream[1], 1);
  EXPECT_EQ(p.upstream[2], kInf);
}

TEST(Tokens, GradientsOfStatisticsJoinTheScale) {
  const std::vector<int64_t> target{0, -100, 1};
  const std::vector<float> grad_lse{0, 1e6f, -5}, grad_entropy{3, 0, 0}, zero{0, 0, 0};
  CrossEntropyBackward op{.target = view(target)};  // the mean is over two tokens
  op.grad_lse = view(grad_lse);
  op.grad_entropy = view(grad_entropy);
  Prepared p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 8);
  EXPECT_THAT(p.upstream, ElementsAre(1. / 16, 1. / 16));
  // Only the statistics have gradients, so they alone determine the scale.
  const float none = 0;
  op.grad_loss = scalar_view(&none, DType::f32);
  p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 8);
  EXPECT_THAT(p.upstream, ElementsAre(0, 0));
  op.grad_lse = op.grad_entropy = view(zero);
  p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 0);
  EXPECT_EQ(p.tokens.inv_gradient_scale, 0);
  EXPECT_EQ(p.tokens.valid, 0);
}

TEST(Tokens, CoefficientsAreRelativeToTheScale) {
  const std::vector<int64_t> target{1, 0};
  const std::vector<float> upstream{4, 6}, lse{1, -3}, logit{2, .5f}, entropy{-1, 7};
  CrossEntropyBackward op{.target = view(target), .options = {.reduction = Reduction::none}};
  op.grad_loss = view(upstream);
  op.grad_lse = view(lse);
  op.grad_target_logit = view(logit);
  op.grad_entropy = view(entropy);
  Memory memory(2);
  Tokens tokens;
  ASSERT_TRUE(prepare_tokens(op, 2, memory.data(), &tokens).ok());
  EXPECT_EQ(tokens.gradient_scale, 8);
  const RowGradient g =
      token_gradient(op, tokens, 1, {.reference = 1, .log_sum = 2, .entropy = .25f});
  EXPECT_EQ(g.probability * 8, 6 - 3);
  EXPECT_EQ(g.onehot * 8, 6 - .5f);
  EXPECT_EQ(g.entropy * 8, 7);
  EXPECT_EQ(g.entropy_value, .25f);
  EXPECT_EQ(g.reference, 1);
  EXPECT_EQ(g.log_sum, 2);
}

TEST(Tokens, HugeAndTinyWeightsMoveTheScale) {
  const std::vector<int64_t> target{0, 1};
  std::vector<float> weight{1e7f, 1};
  CrossEntropyForwardBackward op{.target = view(target), .options = {.normalizer = 3}};
  op.weights.token = view(weight);
  Prepared p = prepare(op, 2);
  EXPECT_LT(p.upstream[0] * weight[0], 10000);  // fits f16, with room for z-loss
  EXPECT_EQ(p.upstream[0] * p.tokens.gradient_scale, 1.f / 3);
  weight = {1e-6f, 1e-7f};
  p = prepare(op, 2);
  EXPECT_GT(p.upstream[0] * weight[0], .4f);
  EXPECT_EQ(p.upstream[0] * p.tokens.gradient_scale, 1.f / 3);
  weight = {1, 0};
  EXPECT_EQ(prepare(op, 2).tokens.gradient_scale, 1.f / 3);
}

TEST(Tokens, OneClassAloneHasNoGradientWithoutZLoss) {
  const std::vector<int64_t> target{0};
  CrossEntropyForwardBackward op{.target = view(target)};
  EXPECT_THAT(prepare(op, 1).upstream, ElementsAre(0));
  op.options.z_loss = .1f;
  EXPECT_THAT(prepare(op, 1).upstream, ElementsAre(1));
  op.options.z_loss = 0;
  op.options.vocab_total = 2;
  EXPECT_THAT(prepare(op, 1).upstream, ElementsAre(1));
}

TEST(Tokens, AnEmptyMeanHasNoGradientOrNan) {
  const std::vector<int64_t> none{-100}, weightless{0, -100};
  const std::vector<float> classes{0, 1};
  CrossEntropyForwardBackward op{.target = view(none)};
  for (const EmptyMean mode : {EmptyMean::zero, EmptyMean::nan}) {
    op.options.empty_mean = mode;
    op.target = view(none);
    Prepared p = prepare(op, 2);
    EXPECT_TRUE(p.tokens.empty_mean);
    EXPECT_EQ(p.tokens.gradient_scale, 0);  // no token: zeros in both modes
    op.target = view(weightless);
    op.weights.vocab = view(classes);
    p = prepare(op, 2);
    EXPECT_TRUE(p.tokens.empty_mean);
    EXPECT_EQ(p.tokens.valid, 1);
    if (mode == EmptyMean::zero) {
      EXPECT_EQ(p.tokens.gradient_scale, 0);
    } else {
      EXPECT_TRUE(std::isnan(p.tokens.gradient_scale));
    }
    op.weights.vocab = {};
  }
}

}  // namespace
}  // namespace logitless::cpu
