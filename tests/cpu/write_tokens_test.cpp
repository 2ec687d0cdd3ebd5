// SPDX-License-Identifier: Apache-2.0
// What is written for tokens: losses, their reduction, statistics.
#include "prepared_tokens.h"

#include <gmock/gmock.h>

#include <cmath>

namespace logitless::cpu {
namespace {

using testing::ElementsAre;

// The outputs of write_tokens for these tokens and states.
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
  op.loss = op.options.reduction == Reduction::none ? view(w.loss)
                                                    : scalar_view(w.loss.data(), DType::f32);
  op.statistics = {view(w.lse),       view(w.target_logit), view(w.entropy), view(w.argmax),
                   view(w.reference), view(w.log_sum),      view(w.weighted)};
  write_tokens(op, tokens, states.data(), nullptr);
  op.loss = {};
  op.statistics = {.argmax = view(w.argmax32)};
  write_tokens(op, tokens, states.data(), nullptr);
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

TEST(WriteTokens, LogprobIsNeverAboveZeroAndKeepsNan) {
  const std::vector<int64_t> target{1, 0, -100, 0, 1, 6};
  const std::vector<RowState> states{
      {.reference = 2, .log_sum = 1, .target_logit = .5f},
      {.reference = 5, .log_sum = -1e-7f, .target_logit = 5},
      {.reference = 5, .log_sum = kNan, .target_logit = 5},
      {.reference = 5, .log_sum = 1, .target_logit = -kInf},
      {.reference = -kInf, .log_sum = kNan, .target_logit = 1},  // the target is in another shard
  };
  CrossEntropyForward op{.target = view(target)};
  op.options.vocab_total = 9;
  std::vector<float> logprob(6, 9);
  Memory memory(6);
  Tokens tokens;
  ASSERT_TRUE(prepare_tokens(op, 2, memory.data(), &tokens).ok());
  op.statistics.logprob = view(logprob);
  write_tokens(op, tokens, states.data(), nullptr);
  EXPECT_THAT(logprob, ElementsAre(-2.5f, 0, 0, testing::NanSensitiveFloatEq(kNan), -kInf, -kInf));
}

TEST(WriteTokens, FurtherStatisticsLandAtTheirToken) {
  const std::vector<int64_t> target{-100, 1, 0};
  const std::vector<RareStatistics> rare{
      {.sum_p_squared = .5f, .mean_logit = 2, .rank = 1, .mass_above = .25f},
      {.sum_p_squared = .75f, .mean_logit = 3, .rank = 0, .mass_above = 1.0000001f}};
  CrossEntropyForward op{.target = view(target)};
  std::vector<float> mean(3, 9), squares(3, 9);
  std::vector<int64_t> rank(3, 9);
  Memory memory(3);
  Tokens tokens;
  ASSERT_TRUE(prepare_tokens(op, 2, memory.data(), &tokens).ok());
  std::vector<float> highest(3, 9), mass(3, 9);
  op.statistics = {.rank = view(rank),
                   .sum_p_squared = view(squares),
                   .mean_logit = view(mean),
                   .max_logprob = view(highest),
                   .mass_above = view(mass)};
  write_tokens(op, tokens, kStates.data(), rare.data());
  EXPECT_THAT(mean, ElementsAre(0, 2, 3));
  EXPECT_THAT(squares, ElementsAre(0, .5f, .75f));
  EXPECT_THAT(rank, ElementsAre(-1, 1, 0));
  EXPECT_THAT(mass, ElementsAre(0, .25f, 1));
  EXPECT_THAT(highest, ElementsAre(0, -kStates[0].log_sum, -kStates[1].log_sum));
}

TEST(WriteTokens, EveryOptionOfTheLoss) {
  const std::vector<int64_t> target{1, 0};
  const std::vector<float> classes{2, 3}, token_weights{10, 100};
  CrossEntropyForward op{.target = view(target)};
  op.options = {.reduction = Reduction::none, .label_smoothing = .5f, .z_loss = .125f};
  op.weights = {.token = view(token_weights), .vocab = view(classes)};
  const Written w = write(op, 2, kStates);
  // loss = a ((1 - eps) c_t (lse - z_t) + eps/V (sum c lse - sum c z) + lambda lse^2)
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
  EXPECT_EQ(w.loss[0], 0);  // the target is in another shard: no target term
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

}  // namespace
}  // namespace logitless::cpu
