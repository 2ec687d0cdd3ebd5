// SPDX-License-Identifier: Apache-2.0
// Combined shards match the whole vocabulary within its bound: statistics, loss and gradients.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "src/row/shards.h"
#include "tests/support/data.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/shards.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class Shards : public ConformanceTest {
 protected:
  Case everything() const {
    Case c{.op = op_, .shape = {19, 33, 131}, .dtype = dtype_};
    apply_everything(c);
    c.options.reduction = Reduction::none;
    c.logprob = c.sum_p_squared = c.mean_logit = c.max_logprob = true;
    return c;
  }
};

// One shard, two halves, three uneven shards, a single column on either side, five shards.
const Sizes kPartitions[] = {{131}, {66, 65}, {7, 100, 24}, {1, 129, 1}, {16, 16, 64, 32, 3}};

TokenState state_of(const Fields& fields, size_t token) {
  const auto at = [&](const char* name) {
    return static_cast<float>(fields.at(name).value[token]);
  };
  return {.row_reference = at("row_reference"),
          .row_log_sum = at("row_log_sum"),
          .target_logit = at("target_logit"),
          .entropy = at("entropy"),
          .weighted_logit_sum = at("weighted_logit_sum"),
          .argmax = static_cast<int64_t>(fields.at("argmax").value[token]),
          .sum_p_squared = at("sum_p_squared"),
          .mean_logit = at("mean_logit"),
          .max_logprob = at("max_logprob")};
}

// Combines the shards' fields into those that Forward writes for the whole vocabulary.
template <class Op>
Fields combined(const Op& whole, const std::vector<Fields>& shards) {
  const std::vector<double> target = read(whole.target);
  const std::vector<double> class_weight = read(whole.weights.vocab),
                            token_weight = read(whole.weights.token);
  const double sum = std::accumulate(class_weight.begin(), class_weight.end(), 0.0);
  const auto vocab = static_cast<int64_t>(class_weight.size());
  Fields fields = shards[0];
  Field& loss = fields["loss"];
  loss = shards[0].at("lse");
  for (size_t i = 0; i < target.size(); ++i) {
    if (target[i] < 0 || target[i] >= static_cast<double>(vocab)) {
      loss.value[i] = 0;
      continue;
    }
    TokenState state = state_of(shards[0], i);
    for (size_t s = 1; s < shards.size(); ++s) state = combine(state, state_of(shards[s], i));
    fields["lse"].value[i] = lse(state);
    fields["target_logit"].value[i] = state.target_logit;
    fields["entropy"].value[i] = state.entropy;
    fields["argmax"].value[i] = static_cast<double>(state.argmax);
    fields["row_reference"].value[i] = state.row_reference;
    fields["row_log_sum"].value[i] = state.row_log_sum;
    fields["weighted_logit_sum"].value[i] = state.weighted_logit_sum;
    fields["logprob"].value[i] = logprob(state);
    fields["sum_p_squared"].value[i] = state.sum_p_squared;
    fields["mean_logit"].value[i] = state.mean_logit;
    fields["max_logprob"].value[i] = state.max_logprob;
    const auto t = static_cast<size_t>(target[i]);
    loss.value[i] = token_loss(state, whole.options, vocab, static_cast<float>(class_weight[t]),
                               sum, static_cast<float>(token_weight[i]));
  }
  return fields;
}

template <class Op>
void expect_forward(const TestDevice& device, const Problem<Op>& p, const Sizes& sizes) {
  const reference::Result want = expected(device, p.op, p.model);
  std::vector<Fields> shards;
  int64_t first = 0;
  for (const int64_t count : sizes) {
    const Op op = shard_of(p.op, first, count);
    const Outcome outcome = execute(device, op, p.pool);
    const Comparison alone = compare(expected(device, op, p.model), outcome);
    EXPECT_TRUE(alone.ok()) << "shard at " << first << "\n" << alone.report;
    shards.push_back(outcome.fields);
    first += count;
  }
  const Comparison result = compare(want, combined(p.op, shards));
  EXPECT_TRUE(result.ok()) << sizes.size() << " shards\n" << result.report;
}

TEST_P(Shards, ForwardCombines) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op> && !GradientOp<Op>) {
      const Problem<Op> p = build<Op>(everything());
      for (const Sizes& sizes : kPartitions) expect_forward(device_, p, sizes);
    }
  });
}

// All targets are in the first shard; the others have none.
TEST_P(Shards, TargetFree) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op> && !GradientOp<Op>) {
      const Problem<Op> p = build<Op>(everything());
      std::vector<double> target = read(p.op.target);
      for (double& t : target) t = t < 0 || t >= 131 ? t : std::fmod(t, 20);
      write(p.op.target, target);
      for (const Sizes& sizes : {Sizes{20, 111}, Sizes{20, 50, 61}})
        expect_forward(device_, p, sizes);
    }
  });
}

// If the target is in another shard, its log-probability here is -inf, even if the row has NaN.
TEST_P(Shards, LogprobOfATargetElsewhere) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op> && !GradientOp<Op> && !LinearOp<Op>) {
      for (const bool every : {false, true}) {
        Case c{.op = op_, .shape = {4, 8, 20}, .dtype = dtype_};
        c.row_statistics = c.logprob = true;
        c.statistics = every;
        c.options.reduction = Reduction::none;
        Problem<Op> p = build<Op>(c);
        write(p.op.target, {15, 15, 15, 3});
        std::vector<double> logits = read(p.op.logits);
        logits[2] = NAN;
        for (int j = 0; j < 10; ++j) logits[20 + j] = -INFINITY;
        logits[2 * 20 + 2] = INFINITY;
        write(p.op.logits, logits);
        Op shard = shard_of(p.op, 0, 10);
        shard.loss = {};
        const Outcome outcome = execute(device_, shard, p.pool);
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
        const Comparison result = compare(expected(device_, shard, p.model), outcome);
        EXPECT_TRUE(result.ok()) << result.report;
      }
    }
  });
}

// A shard whose logits are all -inf holds no probability.
TEST_P(Shards, MaskedShard) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (ForwardOp<Op> && !GradientOp<Op>) {
      Case c = everything();
      c.options.label_smoothing = 0;
      c.options.softcap = 0;
      Problem<Op> p = build<Op>(c);
      const TensorView& view = [&]() -> const TensorView& {
        if constexpr (LinearOp<Op>) {
          return p.op.bias;
        } else {
          return p.op.logits;
        }
      }();
      std::vector<double> values = read(view), target = read(p.op.target);
      for (size_t k = 0; k < values.size(); ++k) {
        if (k % 131 < 66) values[k] = -INFINITY;
      }
      write(view, values);
      for (double& t : target) t = t < 0 || t >= 131 ? t : 66 + std::fmod(t, 65);
      write(p.op.target, target);
      p.op.statistics.weighted_logit_sum = {};
      const reference::Result want = expected(device_, p.op, p.model);
      std::vector<Fields> shards;
      for (const int64_t first : {0, 66}) {
        Op shard = shard_of(p.op, first, first == 0 ? 66 : 65);
        Outcome outcome = execute(device_, shard, p.pool);
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
        outcome.fields["weighted_logit_sum"] = outcome.fields.at("lse");
        for (const double x : outcome.fields.at("max_logprob").value) EXPECT_FALSE(std::isinf(x));
        shards.push_back(outcome.fields);
      }
      Fields fields = combined(p.op, shards);
      fields.erase("weighted_logit_sum");
      const Comparison result = compare(want, fields);
      EXPECT_TRUE(result.ok()) << result.report;
    }
  });
}

// Only row states are requested, and the target is in another shard for most tokens. All logits lie
// near -30, so a sum that started from 0 would be inaccurate.
TEST_P(Shards, RowsAloneCombine) {
  if (!is_linear(op_)) return;
  constexpr int64_t tokens = 19, hidden = 33, vocab = 131;
  for (const Setting& setting : kAlone) {
    Case c{.op = op_, .shape = {tokens, hidden, vocab}, .dtype = dtype_};
    setting.apply(c);
    c.options.reduction = Reduction::none;
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (LinearOp<Op> && ForwardOp<Op> && !GradientOp<Op>) {
        Problem<Op> p = build<Op>(c);
        std::vector<double> input = read(p.op.input), weight = read(p.op.weight);
        for (int64_t i = 0; i < tokens; ++i) input[i * hidden] = 1;
        for (int64_t j = 0; j < vocab; ++j) weight[j * hidden] = -30;
        write(p.op.input, input);
        write(p.op.weight, weight);
        std::vector<TokenState> states(tokens);
        for (const int64_t first : {0, 66}) {
          const Op shard = shard_of(p.op, first, first == 0 ? 66 : 65);
          const Outcome outcome = execute(device_, shard, p.pool);
          const Comparison alone = compare(expected(device_, shard, p.model), outcome);
          EXPECT_TRUE(alone.ok()) << setting.name << ", shard at " << first << "\n" << alone.report;
          ASSERT_TRUE(outcome.status.ok());
          for (int64_t i = 0; i < tokens; ++i) {
            const auto at = [&](const char* name) {
              return static_cast<float>(outcome.fields.at(name).value[i]);
            };
            const TokenState own{.row_reference = at("row_reference"),
                                 .row_log_sum = at("row_log_sum"),
                                 .target_logit = at("target_logit")};
            states[i] = first == 0 ? own : combine(states[i], own);
          }
        }
        p.op.statistics.logprob = p.pool.reserve(DType::f32, {tokens});
        const reference::Result whole = expected(device_, p.op, p.model);
        reference::Result want;
        Fields all;
        for (const char* name : {"lse", "logprob"}) {
          want.outputs[name] = whole.outputs.at(name);
          all[name].dtype = DType::f32, all[name].shape = {tokens};
        }
        for (const TokenState& state : states) {
          all["lse"].value.push_back(lse(state));
          all["logprob"].value.push_back(logprob(state));
        }
        const Comparison result = compare(want, all);
        EXPECT_TRUE(result.ok()) << setting.name << "\n" << result.report;
      }
    });
  }
}

// grad_weight's rows and grad_logits' columns belong to one shard each; the shards' grad_input add
// up.
TEST_P(Shards, BackwardAddsUp) {
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (BackwardOnlyOp<Op>) {
      Problem<Op> p = build<Op>(everything());
      const reference::Result want = expected(device_, p.op, p.model);
      for (const Sizes& sizes : kPartitions) {
        std::vector<double> sum;
        int64_t first = 0;
        for (const int64_t count : sizes) {
          const Op shard = shard_of(p.op, first, count);
          const Outcome outcome = execute(device_, shard, p.pool);
          const Comparison alone = compare(expected(device_, shard, p.model), outcome);
          EXPECT_TRUE(alone.ok()) << "shard at " << first << " of " << sizes.size() << "\n"
                                  << alone.report;
          const Comparison result = compare_columns(want, outcome.fields, 131, first, count);
          EXPECT_TRUE(result.ok()) << "shard at " << first << " of " << sizes.size() << "\n"
                                   << result.report;
          if (outcome.fields.contains("grad_input")) {
            const std::vector<double>& part = outcome.fields.at("grad_input").value;
            sum.resize(part.size());
            for (size_t k = 0; k < sum.size(); ++k) sum[k] += part[k];
          }
          first += count;
        }
        for (size_t k = 0; k < sum.size(); ++k) {
          const reference::Output& all = want.outputs.at("grad_input");
          EXPECT_LE(std::fabs(sum[k] - all.value[k]), all.bound[k]) << "grad_input " << k;
        }
      }
    }
  });
}

// Among equal logits of two shards the lowest index wins, in either order of the shards.
TEST(Combine, TheFirstOfEqualLogitsIsTheArgmax) {
  const TokenState first{.row_reference = 2, .argmax = 3}, second{.row_reference = 2, .argmax = 70};
  const TokenState third{.row_reference = 1, .argmax = 90};
  EXPECT_EQ(combine(first, second).argmax, 3);
  EXPECT_EQ(combine(combine(first, third), second).argmax, 3);
  EXPECT_EQ(combine(third, second).argmax, 70);
  EXPECT_EQ(combine(TokenState{}, second).argmax, 70);
}

// The host's function combines two states as the op Combine does.
TEST(Combine, TwoStatesAreFoldedAsTheOpFoldsThem) {
  const std::vector<double> some = normals(4000, 77);
  size_t next = 0;
  const auto any = [&] { return static_cast<float>(some[next++ % some.size()]); };
  const auto state = [&](int i) {
    TokenState s{any() * 9, any(), any(), any(), any() * 30, i, any(), any(), any()};
    if (i % 7 == 3) s.row_log_sum = -INFINITY;
    if (i % 11 == 5) s.row_reference = -INFINITY;
    return s;
  };
  const auto folded = [](const TokenState& s) {
    return ShardState{s.row_reference, s.target_logit,  s.row_log_sum,
                      s.entropy,       s.sum_p_squared, s.weighted_logit_sum,
                      s.mean_logit,    s.max_logprob,   s.argmax};
  };
  const auto near = [](double got, double want) {
    return std::isnan(want) ? std::isnan(got)
                            : got == want || std::fabs(got - want) <= 0x1p-24 * std::fabs(want);
  };
  for (int i = 0; i < 400; i += 2) {
    const TokenState a = state(i), b = state(i + 1), got = combine(a, b);
    const ShardState want = fold(folded(a), folded(b));
    EXPECT_TRUE(near(got.row_reference, want.reference)) << i;
    EXPECT_TRUE(near(got.target_logit, want.target_logit)) << i;
    EXPECT_TRUE(near(got.row_log_sum, want.log_sum)) << got.row_log_sum << " " << want.log_sum;
    EXPECT_TRUE(near(got.entropy, want.entropy)) << got.entropy << " " << want.entropy;
    EXPECT_TRUE(near(got.sum_p_squared, want.sum_p_squared)) << i;
    EXPECT_TRUE(near(got.weighted_logit_sum, want.weighted_logit_sum)) << i;
    EXPECT_TRUE(near(got.mean_logit, want.mean_logit)) << i;
    EXPECT_TRUE(near(got.max_logprob, want.max_logprob)) << i;
    EXPECT_EQ(got.argmax, want.argmax) << i;
  }
}

// Rounding may put a target's logit above lse; the log-probability is then 0. NaN stays NaN.
TEST(Combine, LogprobIsNeverAboveZero) {
  EXPECT_EQ(logprob({.row_reference = 1, .row_log_sum = -1e-8f, .target_logit = 1}), 0);
  EXPECT_EQ(logprob({.row_reference = 1, .row_log_sum = 0, .target_logit = -2}), -3);
  EXPECT_TRUE(std::isnan(logprob({.row_reference = NAN, .row_log_sum = 0, .target_logit = 1})));
  EXPECT_EQ(logprob({.row_reference = 1, .row_log_sum = 0}), -INFINITY);
}

// One shard has no probability, another three quarters, the third one quarter.
TEST(Combine, SquaresAndTheLargestAreOfTheWholeProbability) {
  const TokenState empty{
      .row_log_sum = NAN, .sum_p_squared = NAN, .mean_logit = -1, .max_logprob = NAN};
  const TokenState three{.row_reference = 0,
                         .row_log_sum = std::log(3.0f),
                         .sum_p_squared = 0.5f,
                         .mean_logit = 0.25f,
                         .max_logprob = std::log(0.5f)};
  const TokenState one{.row_reference = 0, .row_log_sum = 0, .sum_p_squared = 1, .mean_logit = 2};
  const TokenState all = combine(combine(empty, three), one);
  EXPECT_NEAR(all.sum_p_squared, 9.0 / 16 * 0.5 + 1.0 / 16, 1e-7);
  EXPECT_EQ(all.mean_logit, 1.25f);
  EXPECT_NEAR(all.max_logprob, std::log(3.0 / 8), 1e-7);
}

constexpr OpKind kShardOps[] = {OpKind::forward, OpKind::backward, OpKind::linear_forward,
                                OpKind::linear_backward};
LOGITLESS_CONFORMANCE_SUITE_OF(Shards, kShardOps, inputs());

}  // namespace
}  // namespace logitless::conformance
