// SPDX-License-Identifier: Apache-2.0
// Tokens: which count, what the mean divides by, the common factor of the gradients, and what is
// written of them.
#include "src/cpu/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace logitless::cpu {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TensorView view(const std::vector<float>& v) { return vector_view(v.data(), DType::f32, v.size()); }
TensorView view(const std::vector<int32_t>& v) {
  return vector_view(v.data(), DType::i32, v.size());
}
TensorView view(const std::vector<int64_t>& v) {
  return vector_view(v.data(), DType::i64, v.size());
}

// Memory of exactly the promised size between two guards.
class Memory {
 public:
  explicit Memory(int64_t tokens) : bytes_(tokens_bytes(tokens)), all_(bytes_ + 128, 0x5a) {}
  void* data() { return all_.data() + 64; }
  bool intact() const {
    for (size_t i = 0; i < 64; ++i) {
      if (all_[i] != 0x5a || all_[all_.size() - 1 - i] != 0x5a) return false;
    }
    return true;
  }

 private:
  uint64_t bytes_;
  std::vector<uint8_t> all_;
};

// prepare_tokens, with the arrays copied out.
struct Prepared {
  Status status;
  Tokens tokens;
  std::vector<int64_t> row, target;
  std::vector<float> target_weight, token_weight, upstream;
};
template <class Op>
Prepared prepare(const Op& op, int64_t vocab) {
  Prepared p;
  Memory memory(op.target.shape[0]);
  p.status = prepare_tokens(op, vocab, memory.data(), &p.tokens);
  EXPECT_TRUE(memory.intact());
  if (!p.status.ok()) return p;
  const Tokens& t = p.tokens;
  p.row.assign(t.row, t.row + t.valid);
  p.target.assign(t.target, t.target + t.valid);
  p.target_weight.assign(t.target_weight, t.target_weight + t.valid);
  p.token_weight.assign(t.token_weight, t.token_weight + t.valid);
  if constexpr (GradientOp<Op>) p.upstream.assign(t.upstream, t.upstream + t.valid);
  p.tokens.row = p.row.data();  // `memory` ends here
  return p;
}

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
  // The low 32 bits are not the index.
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
  op.target.stride[0] = 2;  // 2, -100, 0
  op.weights.vocab = view(classes);
  op.weights.vocab.shape[0] = 3;
  op.weights.vocab.stride[0] = 2;  // .5, 2, 3
  op.weights.token = view(token_weights);
  op.weights.token.shape[0] = 3;
  op.weights.token.stride[0] = 0;
  op.options.label_smoothing = .25f;
  const Prepared p = prepare(op, 3);
  EXPECT_THAT(p.target_weight, ElementsAre(3, .5f));
  EXPECT_THAT(p.token_weight, ElementsAre(7, 7));
  EXPECT_EQ(p.tokens.normalizer, 3.5);  // token weights never enter
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
  // sum and none divide by nothing.
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
  ASSERT_EQ(p.upstream.size(), 4u);
  const float scale = p.tokens.gradient_scale;
  int exponent;
  EXPECT_EQ(std::frexp(scale, &exponent), .5f);
  EXPECT_GE(scale, 3e-7f);  // the ignored token's gradient has no say
  EXPECT_LT(scale, 6e-7f);
  EXPECT_EQ(p.tokens.inv_gradient_scale, 1 / scale);
  EXPECT_EQ(p.upstream[0] * scale, upstream[0]);
  EXPECT_EQ(p.upstream[1] * scale, upstream[1]);
  EXPECT_EQ(p.upstream[2], 0);
  EXPECT_EQ(p.upstream[3] * scale, upstream[4]);
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
  CrossEntropyBackward op{.target = view(target)};  // mean of two
  op.grad_lse = view(grad_lse);
  op.grad_entropy = view(grad_entropy);
  Prepared p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 8);
  EXPECT_THAT(p.upstream, ElementsAre(1. / 16, 1. / 16));
  // No gradient of the loss: the scale is theirs alone.
  const float none = 0;
  op.grad_loss = scalar_view(&none, DType::f32);
  p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 8);
  EXPECT_THAT(p.upstream, ElementsAre(0, 0));
  op.grad_lse = op.grad_entropy = view(zero);
  p = prepare(op, 2);
  EXPECT_EQ(p.tokens.gradient_scale, 0);
  EXPECT_EQ(p.tokens.inv_gradient_scale, 0);
  EXPECT_THAT(p.upstream, ElementsAre(0, 0));
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
  EXPECT_LT(p.upstream[0] * weight[0], 10000);  // fits f16 with room for the z-loss
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

// What write_tokens makes of tokens and states.
struct Written {
  std::vector<float> loss, lse, target_logit, entropy, reference, log_sum, weighted;
  std::vector<int64_t> argmax;
  std::vector<int32_t> argmax32;
};
Written write(CrossEntropyForward op, int64_t vocab, const std::vector<RowState>& states) {
  const int64_t n = op.target.shape[0];
  Written w;
  w.loss.assign(op.options.reduction == Reduction::none ? n : 1, 99);
  for (auto* v : {&w.lse, &w.target_logit, &w.entropy, &w.reference, &w.log_sum, &w.weighted}) {
    v->assign(n, 99);
  }
  w.argmax.assign(n, 99);
  w.argmax32.assign(n, 99);
  Memory memory(n);
  Tokens tokens;
  EXPECT_TRUE(prepare_tokens(op, vocab, memory.data(), &tokens).ok());
  const TensorView loss = op.options.reduction == Reduction::none
                              ? view(w.loss)
                              : scalar_view(w.loss.data(), DType::f32);
  TokenStatistics s{view(w.lse),       view(w.target_logit), view(w.entropy), view(w.argmax),
                    view(w.reference), view(w.log_sum),      view(w.weighted)};
  write_tokens(tokens, states.data(), {loss, s, op.options});
  s = {.argmax = view(w.argmax32)};
  write_tokens(tokens, states.data(), {{}, s, op.options});
  return w;
}

const std::vector<RowState> kStates{{.reference = 2,
                                     .log_sum = 1,
                                     .target_logit = .5f,
                                     .weighted_logit_sum = 4,
                                     .entropy = .25f,
                                     .argmax = 1},
                                    {.reference = 5,
                                     .log_sum = .5f,
                                     .target_logit = 5,
                                     .weighted_logit_sum = 6,
                                     .entropy = .75f,
                                     .argmax = 0}};

TEST(WriteTokens, StatisticsLandAtTheirTokenAndIgnoredOnesAreZero) {
  const std::vector<int64_t> target{-100, 1, 0, -100};
  CrossEntropyForward op{.target = view(target), .options = {.reduction = Reduction::none}};
  const Written w = write(op, 2, kStates);
  EXPECT_THAT(w.loss, ElementsAre(0, 2.5f, .5f, 0));
  EXPECT_THAT(w.lse, ElementsAre(0, 3, 5.5f, 0));
  EXPECT_THAT(w.target_logit, ElementsAre(0, .5f, 5, 0));
  EXPECT_THAT(w.entropy, ElementsAre(0, .25f, .75f, 0));
  EXPECT_THAT(w.reference, ElementsAre(0, 2, 5, 0));
  EXPECT_THAT(w.log_sum, ElementsAre(0, 1, .5f, 0));
  EXPECT_THAT(w.weighted, ElementsAre(0, 4, 6, 0));
  EXPECT_THAT(w.argmax, ElementsAre(-1, 1, 0, -1));
  EXPECT_THAT(w.argmax32, ElementsAre(-1, 1, 0, -1));
}

TEST(WriteTokens, EveryOptionOfTheLoss) {
  const std::vector<int64_t> target{1, 0};
  const std::vector<float> classes{2, 3}, token_weights{10, 100};
  CrossEntropyForward op{.target = view(target)};
  op.options = {.reduction = Reduction::none, .label_smoothing = .5f, .z_loss = .125f};
  op.weights = {.token = view(token_weights), .vocab = view(classes)};
  const Written w = write(op, 2, kStates);
  // a ((1 - eps) c_t (lse - z_t) + eps/V (sum c lse - sum c z) + lambda lse^2)
  EXPECT_FLOAT_EQ(w.loss[0], 10 * (.5f * 3 * 2.5f + .25f * (5 * 3 - 4) + .125f * 9));
  EXPECT_FLOAT_EQ(w.loss[1], 100 * (.5f * 2 * .5f + .25f * (5 * 5.5f - 6) + .125f * 30.25f));
}

TEST(WriteTokens, ReducesSumAndMean) {
  const std::vector<int64_t> target{-100, 1, 0, -100};
  const std::vector<float> classes{2, 3};
  CrossEntropyForward op{.target = view(target), .options = {.reduction = Reduction::sum}};
  EXPECT_EQ(write(op, 2, kStates).loss[0], 3);
  op.options.reduction = Reduction::mean;
  EXPECT_EQ(write(op, 2, kStates).loss[0], 1.5f);
  op.weights.vocab = view(classes);
  EXPECT_FLOAT_EQ(write(op, 2, kStates).loss[0], (3 * 2.5f + 2 * .5f) / 5);
  op.weights.vocab = {};
  op.options.normalizer = 8;
  EXPECT_EQ(write(op, 2, kStates).loss[0], 3.f / 8);
}

TEST(WriteTokens, AnEmptyMeanIsZeroOrNan) {
  const std::vector<int64_t> target{-100};
  CrossEntropyForward op{.target = view(target)};
  EXPECT_EQ(write(op, 2, {}).loss[0], 0);
  op.options.empty_mean = EmptyMean::nan;
  EXPECT_TRUE(std::isnan(write(op, 2, {}).loss[0]));
  op.options.reduction = Reduction::sum;
  EXPECT_EQ(write(op, 2, {}).loss[0], 0);
}

TEST(WriteTokens, AShardNamesGlobalIndices) {
  const std::vector<int64_t> target{0, 6};
  CrossEntropyForward op{.target = view(target), .options = {.reduction = Reduction::none}};
  op.options.vocab_start = 5;
  op.options.vocab_total = 9;
  const Written w = write(op, 2, kStates);
  EXPECT_THAT(w.target_logit, ElementsAre(-kInf, 5));
  EXPECT_THAT(w.argmax, ElementsAre(6, 5));
  EXPECT_EQ(w.loss[0], 0);  // no target term here
}

TEST(WriteTokens, ALongSumIsExactToRounding) {
  const int64_t n = 200001;
  const std::vector<int32_t> target(n, 0);
  const std::vector<RowState> states(n, {.reference = .1f, .target_logit = 0});
  CrossEntropyForward op{.target = view(target), .options = {.reduction = Reduction::sum}};
  const double exact = double(.1f) * n;
  EXPECT_NEAR(write(op, 1, states).loss[0], exact, 0x1p-24 * exact);
}

TEST(WriteTokens, ANanStaysInItsOwnToken) {
  const std::vector<int64_t> target{1, 0};
  std::vector<RowState> states = kStates;
  states[0].reference = kNan;
  CrossEntropyForward op{.target = view(target), .options = {.reduction = Reduction::none}};
  const Written w = write(op, 2, states);
  EXPECT_TRUE(std::isnan(w.loss[0]));
  EXPECT_TRUE(std::isnan(w.lse[0]));
  EXPECT_EQ(w.loss[1], .5f);
}

TEST(WriteTokens, LossesGivenAreReducedAlike) {
  const std::vector<int64_t> target{1, -100, 0};
  CrossEntropyForward op{.target = view(target)};
  Memory memory(3);
  Tokens tokens;
  ASSERT_TRUE(prepare_tokens(op, 2, memory.data(), &tokens).ok());
  const float losses[] = {1, 4};
  float mean = 0;
  write_losses(tokens, losses, scalar_view(&mean, DType::f32), op.options);
  EXPECT_EQ(mean, 2.5f);
  std::vector<float> each(3, 9);
  op.options.reduction = Reduction::none;
  write_losses(tokens, losses, view(each), op.options);
  EXPECT_THAT(each, ElementsAre(1, 0, 4));
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
