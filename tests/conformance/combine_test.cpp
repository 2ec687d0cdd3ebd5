// SPDX-License-Identifier: Apache-2.0
// Combine matches the contract for any states of shards. Of what Forward wrote for every shard, it
// makes what Forward writes for the whole vocabulary.
#include <algorithm>
#include <cmath>

#include "tests/support/executors.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/shards.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

constexpr OpKind kForwards[] = {OpKind::forward, OpKind::linear_forward};

class Combines : public ConformanceTest {
 protected:
  // Tests with invented states do not depend on the parameters and run once per backend.
  bool once() const { return op_ == OpKind::forward && dtype_ == DType::f32; }
};

// Random states of shards, each [P, N].
struct States {
  int64_t shards = 0, tokens = 0;
  std::vector<double> target{};  // [N]
  std::vector<double> row_reference{}, row_log_sum{}, target_logit{}, entropy{}, argmax{};
  std::vector<double> weighted_logit_sum{}, sum_p_squared{}, mean_logit{}, max_logprob{};
};
constexpr int64_t kColumns = 50;  // columns of a shard

States states_of(int64_t shards, int64_t tokens, uint64_t seed) {
  States s{.shards = shards, .tokens = tokens};
  const int64_t count = shards * tokens;
  s.row_reference = normals(count, seed, 3);
  s.row_log_sum = normals(count, seed + 1, 1, 1.5);
  s.weighted_logit_sum = normals(count, seed + 2, 30);
  s.mean_logit = normals(count, seed + 3);
  s.max_logprob = normals(count, seed + 7);
  s.entropy = normals(count, seed + 4);
  s.sum_p_squared = normals(count, seed + 5);
  s.target_logit.assign(count, -INFINITY);
  Random random(seed + 6);
  for (int64_t k = 0; k < count; ++k) {
    s.row_log_sum[k] = std::fabs(s.row_log_sum[k]);
    s.entropy[k] = std::fabs(s.entropy[k]);
    // In two states of three the reference is the row's maximum.
    s.max_logprob[k] = k % 3 == 0 ? -std::fabs(s.max_logprob[k]) : -s.row_log_sum[k];
    s.sum_p_squared[k] = 1 / (1 + std::fabs(s.sum_p_squared[k]));
    s.argmax.push_back(static_cast<double>(k / tokens * kColumns + random.below(kColumns)));
  }
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t target = random.below(shards * kColumns), at = target / kColumns * tokens + i;
    s.target.push_back(static_cast<double>(target));
    s.target_logit[at] = s.row_reference[at] - std::fabs(random.normal());
    // Where maxima are equal, the first shard's argmax must win.
    for (int64_t k = i; i % 7 == 0 && k < count; k += tokens) s.row_reference[k] = 2;
  }
  return s;
}

// States as Forward writes them for masks, NaN and large logits. Token i gets case i % 8.
void make_extreme(States* s) {
  for (int64_t i = 0; i < s->tokens; ++i) {
    const int64_t shard = i / 8 % s->shards, at = shard * s->tokens + i;
    const auto empty = [&](int64_t k, double rest) {
      s->row_reference[k] = -INFINITY, s->row_log_sum[k] = s->entropy[k] = rest;
      s->sum_p_squared[k] = s->max_logprob[k] = rest, s->argmax[k] = -1;
    };
    if (i % 8 == 1) empty(at, NAN);
    if (i % 8 == 2 && s->shards > 1) empty(at, 0);
    if (i % 8 == 3 && s->shards > 1) s->row_reference[at] = 1000, s->row_log_sum[at] = -INFINITY;
    for (int64_t k = i; k < s->shards * s->tokens; k += s->tokens) {
      if (i % 8 == 4) empty(k, NAN);
      if (i % 8 == 5) s->row_reference[k] = 1e30 * (k == at ? 1 : 0.5);
    }
    if (i % 8 == 6) s->row_reference[at] = s->row_log_sum[at] = NAN;
    if (i % 8 == 7) s->row_reference[at] = INFINITY, s->row_log_sum[at] = NAN;
  }
}

// A change to problem_of()'s op, which has no option and writes all that Combine can but top-k.
struct Variation {
  const char* name;
  void (*apply)(Problem<Combine>&);
};
TensorView vector_of(Problem<Combine>& p, int64_t size, double scale, double offset) {
  return p.pool.add(DType::f32, {size}, normals(size, 91, scale, offset));
}
void weigh_classes(Problem<Combine>& p) {
  std::vector<double> weights = normals(p.op.options.vocab_total, 17, 0.4, 1);
  for (size_t j = 0; j < weights.size(); ++j) weights[j] = j % 6 == 5 ? 0 : std::fabs(weights[j]);
  p.op.weights.vocab = p.pool.add(DType::f32, {p.op.options.vocab_total}, weights);
}
void set_targets(Problem<Combine>& p, int64_t step, double value) {
  std::vector<double> target = read(p.op.target);
  for (size_t i = 0; i < target.size(); i += step) target[i] = value;
  write(p.op.target, target);
}
void reduce(Problem<Combine>& p, Reduction reduction) {
  p.op.options.reduction = reduction;
  if (p.op.loss) p.op.loss = p.pool.reserve(DType::f32, {});
}
void mean(Problem<Combine>& p) { reduce(p, Reduction::mean); }

const Variation kVariations[] = {
    {"plain", [](Problem<Combine>&) {}},
    {"smoothing", [](Problem<Combine>& p) { p.op.options.label_smoothing = 0.1f; }},
    {"smoothing of 1", [](Problem<Combine>& p) { p.op.options.label_smoothing = 1; }},
    {"z-loss", [](Problem<Combine>& p) { p.op.options.z_loss = 1e-2f; }},
    {"class weights", weigh_classes},
    {"class weights, smoothing",
     [](Problem<Combine>& p) { weigh_classes(p), p.op.options.label_smoothing = 0.2f; }},
    {"token weights",
     [](Problem<Combine>& p) { p.op.weights.token = vector_of(p, p.op.target.shape[0], 1, 0); }},
    {"ignored", [](Problem<Combine>& p) { set_targets(p, 3, -100); }},
    {"ignore_index 1",
     [](Problem<Combine>& p) { set_targets(p, 3, 1), p.op.options.ignore_index = 1; }},
    {"outside, ignored",
     [](Problem<Combine>& p) {
       set_targets(p, 3, 1e6), set_targets(p, 4, -7);
       p.op.options.out_of_range = OutOfRange::ignore;
     }},
    {"outside", [](Problem<Combine>& p) { set_targets(p, 5, 1e6); }},
    {"options of a shard",
     [](Problem<Combine>& p) {
       p.op.options.vocab_start = 7, p.op.options.logit_scale = 0.3f, p.op.options.softcap = 30;
       p.op.options.allow_tf32 = true;
       p.op.weights.temperature = vector_of(p, p.op.target.shape[0], 1, 0);  // some are <= 0
     }},
    {"sum", [](Problem<Combine>& p) { reduce(p, Reduction::sum); }},
    {"mean", mean},
    {"mean, class weights, ignored",
     [](Problem<Combine>& p) { weigh_classes(p), set_targets(p, 3, -100), mean(p); }},
    {"mean, everything",
     [](Problem<Combine>& p) {
       weigh_classes(p), set_targets(p, 3, -100), mean(p);
       p.op.options.label_smoothing = 0.1f, p.op.options.z_loss = 1e-3f;
       p.op.weights.token = vector_of(p, p.op.target.shape[0], 0.5, 1);
     }},
    {"mean, normalizer", [](Problem<Combine>& p) { mean(p), p.op.options.normalizer = 12.5; }},
    {"mean, normalizer f32",
     [](Problem<Combine>& p) {
       mean(p), p.op.weights.normalizer = p.pool.add(DType::f32, {}, {6.5});
     }},
    {"mean, normalizer i64",
     [](Problem<Combine>& p) {
       mean(p), p.op.weights.normalizer = p.pool.add(DType::i64, {1}, {7});
     }},
    {"mean of none", [](Problem<Combine>& p) { set_targets(p, 1, -100), mean(p); }},
    {"mean of none, NaN",
     [](Problem<Combine>& p) {
       set_targets(p, 1, -100), mean(p), p.op.options.empty_mean = EmptyMean::nan;
     }},
    {"mean, outside", [](Problem<Combine>& p) { set_targets(p, 5, 1e6), mean(p); }},
    {"loss alone",
     [](Problem<Combine>& p) {
       const TensorView loss = p.op.loss;
       p.op.statistics = {}, p.op.loss = loss, p.op.shard_entropy = p.op.shard_argmax = {};
       p.op.shard_weighted_logit_sum = p.op.shard_sum_p_squared = p.op.shard_mean_logit = {};
       p.op.shard_max_logprob = {};
     }},
    {"log-probabilities alone",
     [](Problem<Combine>& p) {
       const TensorView logprob = p.op.statistics.logprob;
       p.op.statistics = {.logprob = logprob}, p.op.loss = {};
       p.op.options.label_smoothing = 0.1f, p.op.shard_weighted_logit_sum = {};
     }},
};

Problem<Combine> problem_of(const States& s, Placement placement, DType integers) {
  Problem<Combine> p;
  const std::vector<int64_t> shape{s.shards, s.tokens}, row{s.tokens};
  const auto add = [&](DType dtype, const std::vector<double>& values) {
    return p.pool.add(dtype, shape, values, layout_of(placement, shape, Role::input));
  };
  const auto output = [&](DType dtype) {
    return p.pool.reserve(dtype, row, layout_of(placement, row, Role::output));
  };
  p.op.target = p.pool.add(integers, row, s.target, layout_of(placement, row, Role::input));
  p.op.shard_row_reference = add(DType::f32, s.row_reference);
  p.op.shard_row_log_sum = add(DType::f32, s.row_log_sum);
  p.op.shard_target_logit = add(DType::f32, s.target_logit);
  p.op.shard_entropy = add(DType::f32, s.entropy);
  p.op.shard_argmax = add(integers, s.argmax);
  p.op.shard_weighted_logit_sum = add(DType::f32, s.weighted_logit_sum);
  p.op.shard_sum_p_squared = add(DType::f32, s.sum_p_squared);
  p.op.shard_mean_logit = add(DType::f32, s.mean_logit);
  p.op.shard_max_logprob = add(DType::f32, s.max_logprob);
  p.op.loss = output(DType::f32);
  TokenStatistics& to = p.op.statistics;
  for (TensorView* view :
       {&to.lse, &to.target_logit, &to.entropy, &to.row_reference, &to.row_log_sum,
        &to.weighted_logit_sum, &to.logprob, &to.sum_p_squared, &to.mean_logit, &to.max_logprob}) {
    *view = output(DType::f32);
  }
  to.argmax = output(integers);
  p.op.fault = p.pool.add(DType::i32, {1}, {8});
  p.op.options.reduction = Reduction::none;
  p.op.options.vocab_total = s.shards * kColumns;
  return p;
}

Comparison judge(const TestDevice& device, const Problem<Combine>& p, const RunPlan& plan = {}) {
  return compare(expected(device, p.op, p.model), execute(device, p.op, p.pool, plan));
}

constexpr Placement kPlacements[] = {Placement::dense, Placement::strided, Placement::transposed,
                                     Placement::padded, Placement::unaligned};

TEST_P(Combines, ShardsOfAnyNumber) {
  if (!once()) return;
  for (const Variation& variation : kVariations) {
    for (int64_t shards = 1; shards <= 8; ++shards) {
      const States s = states_of(shards, 41 + 300 * (shards % 3), shards * 100);
      Problem<Combine> p = problem_of(s, kPlacements[shards % std::size(kPlacements)],
                                      shards % 2 == 0 ? DType::i32 : DType::i64);
      variation.apply(p);
      const Memory memory = shards % 2 == 0 ? Memory::minimum : Memory::recommended;
      const Comparison result = judge(device_, p, {.memory = memory});
      EXPECT_TRUE(result.ok()) << variation.name << ", " << shards << " shards\n" << result.report;
    }
  }
}

TEST_P(Combines, MasksNaNAndInfinityStayInTheirRows) {
  if (!once()) return;
  for (const Variation& variation : kVariations) {
    for (int64_t shards = 1; shards <= 8; ++shards) {
      States s = states_of(shards, 83, shards * 100 + 50);
      make_extreme(&s);
      Problem<Combine> p = problem_of(s, Placement::dense, DType::i64);
      variation.apply(p);
      if (p.op.options.reduction != Reduction::none) continue;
      const Comparison result = judge(device_, p);
      EXPECT_TRUE(result.ok()) << variation.name << ", " << shards << " shards\n" << result.report;
    }
  }
}

// A shard with almost no probability still contributes to the entropy of the whole vocabulary where
// the other shard's own entropy is 0: H = log(1 + e^-d) + d e^-d / (1 + e^-d).
TEST_P(Combines, TheEntropyOfAFarShardIsNotLost) {
  if (!once()) return;
  constexpr int64_t tokens = 24;
  States s = states_of(2, tokens, 7);
  std::vector<double> want;
  for (int64_t i = 0; i < tokens; ++i) {
    const double distance = 10 + 3 * static_cast<double>(i), e = std::exp(-distance);
    s.row_reference[i] = 1, s.row_reference[tokens + i] = 1 - distance;
    for (const int64_t k : {i, tokens + i}) s.row_log_sum[k] = s.entropy[k] = 0;
    want.push_back(std::log1p(e) + distance * e / (1 + e));
  }
  const Problem<Combine> p = problem_of(s, Placement::dense, DType::i64);
  const Outcome got = execute(device_, p.op, p.pool);
  const Comparison result = compare(expected(device_, p.op, p.model), got);
  EXPECT_TRUE(result.ok()) << result.report;
  for (int64_t i = 0; i < tokens; ++i) {
    EXPECT_NEAR(got.fields.at("entropy").value[i] / want[i], 1, 1e-6) << i;
  }
}

// Many tokens, many shards, and no tokens.
TEST_P(Combines, ManyTokensAndShards) {
  if (!once()) return;
  for (const auto& [shards, tokens] : {std::pair<int64_t, int64_t>{2, 70000}, {200, 33}, {3, 0}}) {
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
      Problem<Combine> p = problem_of(states_of(shards, tokens, 5), Placement::dense, DType::i64);
      set_targets(p, 9, -100);
      if (reduction != Reduction::none) reduce(p, reduction);
      const Comparison result = judge(device_, p);
      EXPECT_TRUE(result.ok()) << shards << " shards\n" << result.report;
    }
  }
}

TEST_P(Combines, EmptyCalls) {
  if (!once()) return;
  for (const auto empty : {EmptyMean::zero, EmptyMean::nan}) {
    Problem<Combine> p = problem_of(states_of(2, 0, 5), Placement::dense, DType::i64);
    reduce(p, Reduction::mean);
    p.op.options.empty_mean = empty;
    const Comparison result = judge(device_, p);
    EXPECT_TRUE(result.ok()) << result.report;
  }
}

// A token's result has the same bits alone and in a batch, on any number of threads.
TEST_P(Combines, TokensAreIndependent) {
  if (!once()) return;
  constexpr int64_t tokens = 700;
  const States s = states_of(5, tokens, 3);
  Problem<Combine> p = problem_of(s, Placement::dense, DType::i64);
  p.op.options.label_smoothing = 0.1f;
  const Outcome all = execute(device_, p.op, p.pool);
  ASSERT_TRUE(all.status.ok()) << all.status.message();
#ifndef __wasi__
  const ThreadExecutor threads(3);
  const SerialExecutor backwards(5, true);
  for (const Executor* executor : {threads.get(), backwards.get()}) {
    if (!device_.has_threads()) break;
    const Outcome again = execute(device_, p.op, p.pool, {.executor = executor});
    EXPECT_EQ(differing_bits(all.fields, again.fields), "");
  }
#endif
  for (const int64_t first : {int64_t{0}, int64_t{299}, tokens - 1}) {
    Combine op = p.op;
    const logitless_op unused{};
    for_each_tensor(op, unused, [&](const char* name, Access, TensorView& view, auto&&) {
      if (!view || std::string(name) == "fault") return;
      const int axis = view.rank - 1;
      view.byte_offset += first * view.stride[axis] * size_of(view.dtype);
      view.shape[axis] = 1;
    });
    const Outcome one = execute(device_, op, p.pool);
    ASSERT_TRUE(one.status.ok()) << one.status.message();
    for (const auto& [name, field] : one.fields) {
      const auto begin = all.fields.at(name).bits.begin() + first * size_of(field.dtype);
      EXPECT_TRUE(std::equal(field.bits.begin(), field.bits.end(), begin)) << name << first;
    }
  }
}

// A case with most options and statistics (not rank and mass_above, which a shard cannot write),
// for the tests below, which combine what Forward wrote.
Case everything(OpKind op, DType dtype, Reduction reduction) {
  Case c{.op = op, .shape = {29, 33, 131}, .dtype = dtype};
  apply_everything(c);
  c.options.reduction = reduction;
  c.logprob = c.sum_p_squared = c.mean_logit = c.max_logprob = true;
  return c;
}

template <class F>
void with_forward(OpKind kind, F&& f) {
  with_op(kind, [&](auto op) {
    if constexpr (ForwardOp<decltype(op)> && !GradientOp<decltype(op)>) f(op);
  });
}

TEST_P(Combines, ForwardOfShardsIsForwardOfTheWhole) {
  for (const Sizes& sizes : {Sizes{131}, Sizes{66, 65}, Sizes{7, 0, 100, 24}, Sizes{1, 129, 1},
                             Sizes{0, 16, 16, 64, 32, 3, 0}}) {
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      with_forward(op_, [&](auto op) {
        using Op = decltype(op);
        const Problem<Op> p = build<Op>(everything(op_, dtype_, reduction));
        std::vector<Fields> shards(sizes.size());
        int64_t first = 0;
        for (size_t s = 0; s < sizes.size(); ++s) {
          if (sizes[s] == 0) continue;
          const Outcome outcome = execute(device_, shard_of(p.op, first, sizes[s]), p.pool);
          ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
          shards[s] = outcome.fields;
          first += sizes[s];
        }
        const size_t largest = std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
        for (size_t s = 0; s < sizes.size(); ++s) {
          if (sizes[s] == 0) shards[s] = without_columns(shards[largest]);
        }
        const Problem<Combine> whole = combine_of(p.op, first, shards);
        const Outcome got = execute(device_, whole.op, whole.pool);
        const Comparison result = compare(expected(device_, p.op, p.model), got);
        EXPECT_TRUE(result.ok()) << sizes.size() << " shards\n" << result.report;
        const Comparison own = compare(expected(device_, whole.op, whole.model), got);
        EXPECT_TRUE(own.ok()) << sizes.size() << " shards as given\n" << own.report;
      });
    }
  }
}

// A single shard is the whole vocabulary, so Combine rounds nothing again. Left out: reduced losses
// of CUDA's linear ops, which are added in another order, and the reference, with f64 states.
TEST_P(Combines, OneShardHasForwardsBits) {
  if (std::string(device_.name()) == "reference") return;
  const bool own_order = device_.tensors().type == DeviceType::cuda && is_linear(op_);
  for (const bool plain : {false, true}) {
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      if (own_order && reduction != Reduction::none) continue;
      with_forward(op_, [&](auto op) {
        using Op = decltype(op);
        Case c = everything(op_, dtype_, reduction);
        if (plain) {
          c = {.op = op_, .shape = c.shape, .dtype = dtype_, .options = {.reduction = reduction}};
          c.row_statistics = c.logprob = true;
        }
        const Problem<Op> p = build<Op>(c);
        const Outcome forward = execute(device_, p.op, p.pool);
        ASSERT_TRUE(forward.status.ok()) << forward.status.message();
        const Problem<Combine> one = combine_of(p.op, 131, {forward.fields});
        const Outcome got = execute(device_, one.op, one.pool);
        ASSERT_TRUE(got.status.ok()) << got.status.message();
        EXPECT_EQ(differing_bits(forward.fields, got.fields), "");
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Combines, testing::ValuesIn(parameters(kForwards, inputs())),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
