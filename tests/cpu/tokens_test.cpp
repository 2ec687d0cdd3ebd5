// SPDX-License-Identifier: Apache-2.0
// Which tokens count, and what the mean divides by.
#include "prepared_tokens.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <string>

namespace logitless::cpu {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Tokens, IgnoredOnesAreLeftOut) {
  const std::vector<int64_t> target{3, -100, 0, 4, -100};
  const Prepared p = prepare(CrossEntropyForward{.target = view(target)}, 5);
  ASSERT_TRUE(p.status.ok());
  EXPECT_EQ(p.tokens.total, 5);
  EXPECT_THAT(p.row, ElementsAre(0, 2, 3));
  EXPECT_THAT(p.target, ElementsAre(3, 0, 4));
  EXPECT_THAT(p.target_weight, ElementsAre(1, 1, 1));
  EXPECT_THAT(p.token_weight, ElementsAre(1, 1, 1));
  EXPECT_EQ(p.tokens.normalizer, 3);
  EXPECT_EQ(first_at_or_after(p.tokens, 0), 0);
}

TEST(Tokens, AnyInt64IgnoresEvenOneInRange) {
  const std::vector<int32_t> target{3, 2, 3};
  CrossEntropyForward op{.target = view(target), .options = {.ignore_index = 3}};
  EXPECT_THAT(prepare(op, 5).row, ElementsAre(1));
  const std::vector<int64_t> wide{int64_t{1} << 40, 1};
  op.target = view(wide);
  op.options.ignore_index = int64_t{1} << 40;
  EXPECT_THAT(prepare(op, 5).row, ElementsAre(1));
  // Comparing only the low 32 bits would ignore token 1 here.
  op.options.ignore_index = 1;
  EXPECT_EQ(prepare(op, 5).status.code(), StatusCode::target_out_of_range);
}

TEST(Tokens, OutOfRangeNamesTheTokenAndItsValue) {
  for (const int64_t bad : {int64_t{5}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    const std::vector<int64_t> target{1, bad, 2};
    CrossEntropyForward op{.target = view(target)};
    Prepared p = prepare(op, 5);
    EXPECT_EQ(p.status.code(), StatusCode::target_out_of_range);
    EXPECT_THAT(p.status.message(), HasSubstr("target[1] is " + std::to_string(bad)));
    EXPECT_THAT(p.status.message(), HasSubstr("0 to 4"));
    op.options.out_of_range = OutOfRange::ignore;
    p = prepare(op, 5);
    EXPECT_TRUE(p.status.ok());
    EXPECT_THAT(p.row, ElementsAre(0, 2));
    EXPECT_EQ(p.tokens.normalizer, 2);
  }
}

TEST(Tokens, WeightsOfAnyStrideFollowTheirToken) {
  const std::vector<int32_t> target{2, 9, -100, 9, 0, 9};
  const std::vector<float> classes{.5f, 9, 2, 9, 3, 9};
  const std::vector<float> token_weights{7, 8};
  CrossEntropyForward op{.target = view(target)};
  op.target.shape[0] = 3;
  op.target.stride[0] = 2;  // the view then reads 2, -100, 0
  op.weights.vocab = view(classes);
  op.weights.vocab.shape[0] = 3;
  op.weights.vocab.stride[0] = 2;  // the view then reads .5, 2, 3
  op.weights.token = view(token_weights);
  op.weights.token.shape[0] = 3;
  op.weights.token.stride[0] = 0;
  op.options.label_smoothing = .25f;
  const Prepared p = prepare(op, 3);
  EXPECT_THAT(p.target_weight, ElementsAre(3, .5f));
  EXPECT_THAT(p.token_weight, ElementsAre(7, 7));
  EXPECT_EQ(p.tokens.normalizer, 3.5);  // token weights never enter the normalizer
  EXPECT_EQ(p.tokens.constants.class_weight_sum, 5.5f);
  EXPECT_EQ(p.tokens.constants.smoothing_per_class, .25f / 3);
  EXPECT_EQ(p.tokens.constants.smoothing, .25f);
}

TEST(Tokens, AShardKeepsTokensWhoseTargetIsElsewhere) {
  const std::vector<int64_t> target{0, 3, 5, 9, -100};
  const std::vector<float> classes{1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  CrossEntropyForward op{.target = view(target)};
  op.options.vocab_start = 3;
  op.options.vocab_total = 10;
  op.options.label_smoothing = .5f;
  op.weights.vocab = view(classes);
  Prepared p = prepare(op, 4);
  ASSERT_TRUE(p.status.ok());
  EXPECT_THAT(p.target, ElementsAre(-1, 0, 2, -1));
  EXPECT_THAT(p.target_weight, ElementsAre(1, 4, 6, 10));
  EXPECT_EQ(p.tokens.normalizer, 21);
  EXPECT_EQ(p.tokens.constants.class_weight_sum, 55);
  EXPECT_EQ(p.tokens.constants.smoothing_per_class, .05f);
  const std::vector<int64_t> outside{10};
  op.target = view(outside);
  EXPECT_EQ(prepare(op, 4).status.code(), StatusCode::target_out_of_range);
}

TEST(Tokens, TheCallersNormalizerReplacesTheCount) {
  const std::vector<int64_t> target{0, 1};
  CrossEntropyForward op{.target = view(target), .options = {.normalizer = 2.5}};
  EXPECT_EQ(prepare(op, 2).tokens.normalizer, 2.5);
  op.options.normalizer = 0;
  const float single = 7.5f;
  op.weights.normalizer = scalar_view(&single, DType::f32);
  EXPECT_EQ(prepare(op, 2).tokens.normalizer, 7.5);
  const int64_t whole = (int64_t{1} << 40) + 1;
  op.weights.normalizer = scalar_view(&whole, DType::i64);
  EXPECT_EQ(prepare(op, 2).tokens.normalizer, double(whole));
  const int64_t zero = 0;
  op.weights.normalizer = scalar_view(&zero, DType::i64);
  EXPECT_TRUE(prepare(op, 2).tokens.empty_mean);
  // The reductions sum and none divide by 1.
  op.weights.normalizer = {};
  op.options.reduction = Reduction::sum;
  EXPECT_EQ(prepare(op, 2).tokens.normalizer, 1);
}

TEST(Tokens, TheNormalizerOfManyWeightsIsExactToRounding) {
  const int64_t n = 300001;
  const std::vector<int32_t> target(n, 0);
  const std::vector<float> classes{.1f};
  CrossEntropyForward op{.target = view(target)};
  op.weights.vocab = view(classes);
  const double exact = double(.1f) * n;
  EXPECT_NEAR(prepare(op, 1).tokens.normalizer, exact, 1e-14 * exact);
}

TEST(Tokens, BackwardLeavesOutThoseWithoutAGradient) {
  const std::vector<int64_t> target{0, -100, 1, 2, 0, 1, 2};
  const std::vector<float> upstream{1, 1, 0, -0.f, 0, 0, 2}, weights{1, 1, kNan, 3, 1, 0, 0};
  const std::vector<float> grad_lse{0, 0, 0, 0, 0, .5f, 0}, kept(64);
  LinearCrossEntropyBackward op{.target = view(target), .options = {.reduction = Reduction::none}};
  op.grad_loss = view(upstream);
  op.weights.token = view(weights);
  op.grad_lse = view(grad_lse);
  op.kept = view(kept);
  Prepared p = prepare(op, 3);
  EXPECT_THAT(p.row, ElementsAre(0, 2, 5));  // 0 times NaN is not 0
  EXPECT_THAT(p.target, ElementsAre(0, 1, 1));
  EXPECT_THAT(p.place, ElementsAre(0, 1, 4));
  EXPECT_EQ(p.token_weight[2], 0);
  EXPECT_EQ(p.tokens.total, 7);
  const std::vector<float> grad_entropy(7, kNan);
  op.grad_entropy = view(grad_entropy);
  EXPECT_THAT(prepare(op, 3).place, ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST(Tokens, ThoseWithoutAGradientEnterTheNormalizer) {
  const std::vector<int64_t> target{0, 1, -100, 1};
  const std::vector<float> weights{0, 1, 1, 0}, classes{2, 3};
  CrossEntropyBackward op{.target = view(target)};
  op.weights.token = view(weights);
  Prepared p = prepare(op, 2);
  EXPECT_THAT(p.row, ElementsAre(1));
  EXPECT_EQ(p.tokens.normalizer, 3);
  op.weights.vocab = view(classes);
  p = prepare(op, 2);
  EXPECT_EQ(p.tokens.normalizer, 8);
  EXPECT_THAT(p.target_weight, ElementsAre(3));
  // ForwardBackward leaves out no token that counts.
  CrossEntropyForwardBackward both{.target = view(target)};
  both.weights.token = view(weights);
  EXPECT_THAT(prepare(both, 2).row, ElementsAre(0, 1, 3));
}

TEST(Tokens, ABadTemperatureIsNanAndAFault) {
  const std::vector<int64_t> target{0, -100, 1, 1};
  std::vector<float> temperatures{2, kNan, .75f, .5f};
  int32_t fault = 8;
  CrossEntropyForward op{.target = view(target)};
  op.weights.temperature = view(temperatures);
  op.fault = vector_view(&fault, DType::i32, 1);
  Prepared p = prepare(op, 2);
  EXPECT_EQ(fault, 8);  // an ignored token's temperature is not read
  const LogitMap number = logit_map(op.options);
  EXPECT_EQ(map_of(number, p.tokens, 0).temperature, 2);
  EXPECT_EQ(map_of(number, p.tokens, 2).temperature, .5f);
  for (const float bad : {0.f, -0.f, -1.f, kInf, kNan, 1e-39f}) {
    temperatures[2] = bad;
    fault = 8;
    p = prepare(op, 2);
    EXPECT_EQ(fault, 12) << bad;
    EXPECT_TRUE(std::isnan(map_of(number, p.tokens, 1).temperature)) << bad;
    EXPECT_EQ(map_of(number, p.tokens, 2).temperature, .5f);
  }
}

TEST(Tokens, EqualTemperaturesScaleGradientsAsTheNumberDoes) {
  const std::vector<int64_t> target{0, 1, -100};
  const std::vector<float> temperatures{.01f, .01f, 1e-9f};
  CrossEntropyForwardBackward op{.target = view(target)};
  op.options = {.reduction = Reduction::none, .logit_scale = 1e3f, .temperature = .01f};
  const float scale = prepare(op, 2).tokens.gradient_scale;
  EXPECT_NE(scale, 1);
  op.options.temperature = 1;
  op.weights.temperature = view(temperatures);
  EXPECT_EQ(prepare(op, 2).tokens.gradient_scale, scale);
}

TEST(Tokens, NoTokensAtAll) {
  CrossEntropyForwardBackward op{.target = vector_view(nullptr, DType::i64, 0)};
  const Prepared p = prepare(op, 3);
  EXPECT_TRUE(p.status.ok());
  EXPECT_EQ(p.tokens.valid, 0);
  EXPECT_EQ(p.tokens.gradient_scale, 0);
  EXPECT_EQ(tokens_bytes(0), 0u);
  EXPECT_EQ(tokens_bytes(1000) % 64, 0u);
}

}  // namespace
}  // namespace logitless::cpu
