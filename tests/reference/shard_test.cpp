// SPDX-License-Identifier: Apache-2.0
// Shards of the vocabulary on the reference. Each shard's statistics, rounded to f32 and combined
// by include/logitless/combine.h, equal those of the whole vocabulary, and so do the shards'
// gradients from the combined statistics.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "example.h"

namespace logitless::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
std::vector<T> part(const std::vector<T>& values, int64_t start, int64_t count) {
  if (values.empty()) return {};
  return {values.begin() + start, values.begin() + start + count};
}

Example shard_of(const Example& whole, int64_t start, int64_t count) {
  Example shard = whole;
  shard.columns = count;
  shard.options.vocab_start = start;
  shard.options.vocab_total = whole.columns;
  shard.weight = part(whole.weight, start * whole.hidden, count * whole.hidden);
  shard.bias = part(whole.bias, start, count);
  if (!whole.linear) {
    shard.logits.clear();
    for (int64_t i = 0; i < whole.tokens; ++i) {
      const auto row = part(whole.logits, i * whole.columns + start, count);
      shard.logits.insert(shard.logits.end(), row.begin(), row.end());
    }
  }
  return shard;
}

TokenState state_of(const Values& values, int64_t i) {
  const auto at = [&](const char* name) { return static_cast<float>(values.at(name)[i]); };
  return {.row_reference = at("row_reference"),
          .row_log_sum = at("row_log_sum"),
          .target_logit = at("target_logit"),
          .entropy = at("entropy"),
          .weighted_logit_sum = at("weighted_logit_sum"),
          .argmax = static_cast<int64_t>(values.at("argmax")[i]),
          .sum_p_squared = at("sum_p_squared"),
          .mean_logit = at("mean_logit"),
          .max_logprob = at("max_logprob")};
}

using Split = std::vector<int64_t>;  // columns of each shard

std::vector<TokenState> combined_states(const Example& whole, const Split& split) {
  std::vector<TokenState> states(whole.tokens);
  int64_t start = 0;
  for (const int64_t count : split) {
    const Values values = forward(shard_of(whole, start, count));
    for (int64_t i = 0; i < whole.tokens; ++i) {
      states[i] = start == 0 ? state_of(values, i) : combine(states[i], state_of(values, i));
    }
    start += count;
  }
  EXPECT_EQ(start, whole.columns);
  return states;
}

bool valid(const Example& e, int64_t i) {
  return e.target[i] != e.options.ignore_index && e.target[i] >= 0 && e.target[i] < e.columns;
}

void expect_states(const Example& whole, const std::vector<TokenState>& states,
                   const std::string& what) {
  Example each = whole;
  each.options.reduction = Reduction::none;
  const Values expected = forward(each);
  double class_sum = 0;
  for (const float c : whole.vocab_weight) class_sum += c;
  for (int64_t i = 0; i < whole.tokens; ++i) {
    const TokenState& s = states[i];
    SCOPED_TRACE(what + " token " + std::to_string(i));
    if (!valid(whole, i)) continue;
    const auto near = [&](const char* name, double value) {
      expect_near({value}, {expected.at(name)[i]}, 2e-6, name);
    };
    near("row_reference", s.row_reference);
    near("row_log_sum", s.row_log_sum);
    near("lse", lse(s));
    near("target_logit", s.target_logit);
    near("entropy", s.entropy);
    near("weighted_logit_sum", s.weighted_logit_sum);
    near("logprob", logprob(s));
    near("sum_p_squared", s.sum_p_squared);
    near("mean_logit", s.mean_logit);
    near("max_logprob", s.max_logprob);
    EXPECT_EQ(s.argmax, expected.at("argmax")[i]);
    const bool weighted = !whole.vocab_weight.empty();
    near("loss", token_loss(s, whole.options, whole.columns,
                            weighted ? whole.vocab_weight[whole.target[i]] : 1,
                            weighted ? std::optional<double>(class_sum) : std::nullopt,
                            whole.token_weight.empty() ? 1 : whole.token_weight[i]));
  }
}

void expect_gradients(const Example& whole, const Split& split,
                      const std::vector<TokenState>& states, const std::string& what) {
  const Values expected = backward(whole);
  Values sum;
  int64_t start = 0;
  for (const int64_t count : split) {
    Example shard = shard_of(whole, start, count);
    for (const TokenState& s : states) {
      shard.row_reference.push_back(s.row_reference);
      shard.row_log_sum.push_back(s.row_log_sum);
      shard.entropy.push_back(s.entropy);
    }
    const Values part = backward(shard);
    if (whole.linear) {
      std::vector<double>& input = sum["grad_input"];
      input.resize(whole.input.size());
      for (size_t k = 0; k < input.size(); ++k) input[k] += part.at("grad_input")[k];
      for (const char* name : {"grad_weight", "grad_bias"}) {
        sum[name].insert(sum[name].end(), part.at(name).begin(), part.at(name).end());
      }
    } else {
      std::vector<double>& logits = sum["grad_logits"];
      logits.resize(whole.logits.size());
      for (int64_t i = 0; i < whole.tokens; ++i) {
        for (int64_t j = 0; j < count; ++j) {
          logits[i * whole.columns + start + j] = part.at("grad_logits")[i * count + j];
        }
      }
    }
    start += count;
  }
  for (const auto& [name, values] : expected) {
    expect_near(sum.at(name), values, 3e-6, what + ": " + name);
  }
}

const std::vector<Split>& splits() {
  static const std::vector<Split> all = {{9}, {4, 5}, {3, 3, 3}, {1, 7, 1}, {8, 1}, {2, 1, 1, 5}};
  return all;
}

std::vector<Example> examples(bool linear) {
  const Example plain = linear ? linear_example(6, 9, 4) : logits_example(6, 9);
  std::vector<Example> all(5, plain);
  all[1].options.label_smoothing = 0.2f;
  all[1].vocab_weight = {0.5f, 1, 0, 2, 1.5f, 0.25f, 1, 3, 0.75f};
  all[2].options.z_loss = 0.1f;
  all[2].options.softcap = 2;
  all[2].options.temperature = 0.8f;
  all[2].options.logit_scale = 1.5f;
  all[2].target[3] = -100;
  all[3].options.reduction = Reduction::none;
  all[3].grad_loss = {1, -0.5f, 2, 0.25f, 1.5f, -1};
  all[3].token_weight = {0.5f, 1, 2, 0, 1, 1.5f};
  all[3].grad_lse = {1, 0.5f, -1, 0.25f, 2, 0};
  all[3].grad_target_logit = {0.5f, -1, 0, 1, -2, 0.75f};
  all[3].grad_entropy = {1, -1, 0.5f, 2, 0.25f, -0.5f};
  all[4].options.label_smoothing = 1;
  all[4].vocab_weight.assign(9, 0.0f);
  // All targets are in the first shard.
  all[4].target.assign(6, 0);
  return all;
}

class ReferenceShards : public testing::TestWithParam<bool> {};

TEST_P(ReferenceShards, CombinedEqualTheWhole) {
  const std::vector<Example> all = examples(GetParam());
  for (size_t k = 0; k < all.size(); ++k) {
    for (const Split& split : splits()) {
      const std::string what =
          "example " + std::to_string(k) + " shards " + std::to_string(split.size());
      const std::vector<TokenState> states = combined_states(all[k], split);
      expect_states(all[k], states, what);
      expect_gradients(all[k], split, states, what);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, ReferenceShards, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "Linear" : "GivenLogits";
                         });

TEST(ReferenceShards, TargetOfAnotherShardIsMinusInfinityAndArgmaxIsGlobal) {
  Example whole = logits_example(2, 6);
  whole.logits = {0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0};
  whole.target = {1, 4};
  const Values second = forward(shard_of(whole, 3, 3));
  EXPECT_EQ(second.at("target_logit"), (std::vector<double>{-kInfinity, 1}));
  EXPECT_EQ(second.at("argmax"), (std::vector<double>{5, 3}));
  EXPECT_EQ(second.at("row_reference"), (std::vector<double>{5, 2}));
  EXPECT_EQ(second.count("loss"), 0u);
}

TEST(ReferenceShards, TargetsAreCheckedAgainstTheWholeVocabulary) {
  Example shard = shard_of(logits_example(4, 6), 2, 2);
  shard.target = {0, 5, 2, 3};
  EXPECT_TRUE(evaluate(make_op<CrossEntropyForward>(shard)).status.ok());
  shard.target[1] = 6;
  EXPECT_EQ(evaluate(make_op<CrossEntropyForward>(shard)).status.code(),
            StatusCode::target_out_of_range);
}

TEST(ReferenceShards, MaskedShardCombinesAsNoProbability) {
  Example whole = logits_example(3, 6);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 4; ++j) whole.logits[i * 6 + j] = -kInfinity;
  }
  whole.target = {4, 5, 4};
  for (const Split& split : {Split{2, 4}, Split{2, 2, 2}, Split{4, 2}}) {
    const std::vector<TokenState> states = combined_states(whole, split);
    const Values expected = forward(whole);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(lse(states[i]), expected.at("lse")[i], 1e-6);
      EXPECT_NEAR(states[i].entropy, expected.at("entropy")[i], 1e-6);
      EXPECT_EQ(states[i].argmax, expected.at("argmax")[i]);
    }
    Example none = whole;
    none.options.reduction = Reduction::none;
    expect_gradients(none, split, states, "masked shard");
  }
}

TEST(ReferenceShards, AMaskedTargetOfWeightZeroCostsNothing) {
  const TokenState state{.row_reference = 1, .row_log_sum = 0.5f};
  EXPECT_EQ(token_loss(state, {}, 4), kInfinity);
  EXPECT_EQ(token_loss(state, {}, 4, 0), 0);
}

TEST(ReferenceShards, NanOnOneShardIsNanInTheWholeRow) {
  Example whole = logits_example(2, 4);
  whole.logits[1] = NAN;
  for (const Split& split : {Split{2, 2}, Split{1, 3}, Split{3, 1}}) {
    const std::vector<TokenState> states = combined_states(whole, split);
    EXPECT_TRUE(std::isnan(states[0].row_reference));
    EXPECT_TRUE(std::isnan(lse(states[0])));
    EXPECT_TRUE(std::isnan(states[0].entropy));
    EXPECT_TRUE(std::isnan(token_loss(states[0], whole.options, 4)));
    EXPECT_FALSE(std::isnan(token_loss(states[1], whole.options, 4)));
  }
}

}  // namespace
}  // namespace logitless::reference
