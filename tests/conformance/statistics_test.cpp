// SPDX-License-Identifier: Apache-2.0
// Targets' log-probabilities are never above 0 and have the same bits with any other outputs. Ranks
// are exact where logits differ by more than rounding.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "tests/support/data.h"
#include "tests/support/gather.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Rows = std::vector<std::vector<double>>;

class TokenStatistics : public ConformanceTest {
 protected:
  Case plain(Shape shape) const {
    Case c{.op = op_, .shape = shape, .dtype = dtype_};
    c.options.reduction = Reduction::none;
    c.options.out_of_range = OutOfRange::ignore;
    c.logprob = c.rank = c.sum_p_squared = c.mean_logit = c.max_logprob = c.mass_above = true;
    return c;
  }
  // Whether these statistics take another kernel than the log-probability alone, so that the
  // contract allows other bits.
  bool is_elsewhere(const Case& c) const {
    if (!is_linear(op_) || device_.reference_is_maximum(dtype_)) return false;
    return c.statistics || c.entropy || c.rank || c.sum_p_squared || c.mean_logit ||
           c.max_logprob || c.mass_above || c.temperatures;
  }
  // The case's row in the contract's table ("Determinism"); cases of one row have the same bits.
  int line_of(const Case& c) const {
    if (!is_elsewhere(c)) return 0;
    const int squares = c.sum_p_squared ? 1 : 0;
    return c.statistics || c.entropy ? 3 + squares : c.max_logprob ? 5 + squares : 1 + squares;
  }
  // Makes an op whose logits, before scale and softcap, are exactly these. In linear ops column i
  // of the weight holds token i's logits, and the input is the identity.
  template <class Op>
  Problem<Op> of_rows(Case c, const Rows& logits, const std::vector<double>& target) {
    const auto tokens = static_cast<int64_t>(logits.size());
    const auto vocab = static_cast<int64_t>(logits[0].size());
    c.shape = {tokens, tokens, vocab};
    Problem<Op> p = build<Op>(c);
    if constexpr (LinearOp<Op>) {
      std::vector<double> one(tokens * tokens, 0.0), columns(vocab * tokens);
      for (int64_t i = 0; i < tokens; ++i) {
        one[i * tokens + i] = 1;
        for (int64_t j = 0; j < vocab; ++j) columns[j * tokens + i] = logits[i][j];
      }
      write(p.op.input, one);
      write(p.op.weight, columns);
    } else {
      std::vector<double> all;
      for (const auto& row : logits) all.insert(all.end(), row.begin(), row.end());
      write(p.op.logits, all);
    }
    write(p.op.target, target);
    return p;
  }
  // Compares only loss and statistics: in such regular rows gradients' rounding errors exceed their
  // bound.
  template <class Op>
  Fields judged(const Problem<Op>& p, const std::string& what, Memory memory = Memory::minimum) {
    Outcome outcome = execute(device_, p.op, p.pool, {.memory = memory});
    reference::Result want = expected(device_, p.op, p.model);
    const auto is_gradient = [](const auto& one) { return one.first.starts_with("grad_"); };
    std::erase_if(want.outputs, is_gradient);
    std::erase_if(outcome.fields, is_gradient);
    const Comparison result = compare(want, outcome);
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
    return outcome.fields;
  }
  template <class F>
  void with_forward(F&& f) {
    with_op(op_, [&](auto op) {
      if constexpr (ForwardOp<decltype(op)>) f(op);
    });
  }
};

// Rows whose rounded log-probability may come out above 0: with almost no probability outside the
// target, or with large logits.
Rows peaked_rows(int64_t vocab, DType dtype) {
  const double large = dtype == DType::f16 ? 6e4 : 1e30;
  Rows rows;
  const auto add = [&](double target, double others) {
    rows.emplace_back(vocab, others)[0] = target;
  };
  for (const double gap : {0.0, 1.0, 8.0, 14.0, 15.5, 16.0, 16.625, 17.0, 18.0, 30.0, 88.0, 104.0})
    add(gap, 0);
  for (const double offset : {-30.0, 30.0, 100.0, -100.0, 1000.0, -1000.0}) {
    add(offset, offset);
    add(offset, offset - 16);
    add(offset, -std::fabs(offset) - 40);
  }
  for (const double z : {large, -large}) add(z, z), add(z, -large), add(z, 0);
  // Another column than the target has almost all of the probability.
  for (const double gap : {16.0, 20.0, 24.0, 28.0, 36.0}) {
    rows.emplace_back(vocab, -gap - 40)[0] = 0;
    rows.back()[vocab - 1] = gap;
  }
  // Two columns, or three, share the maximum.
  rows.emplace_back(vocab, -50.0);
  rows.back()[0] = rows.back()[vocab - 1] = 3;
  rows.push_back(rows.back());
  rows.back()[vocab / 2] = 3;
  return rows;
}

TEST_P(TokenStatistics, LogprobIsNeverAboveZero) {
  for (const int64_t vocab : {1, 2, 70, 300}) {
    for (const bool mapped : {false, true}) {
      with_forward([&](auto op) {
        using Op = decltype(op);
        const Rows rows = peaked_rows(vocab, dtype_);
        Case c = plain({});
        c.row_statistics = mapped;
        c.options.temperature = mapped ? 0.75f : 1;
        const auto p = of_rows<Op>(c, rows, std::vector<double>(rows.size(), 0.0));
        for (const Memory memory : {Memory::minimum, Memory::recommended}) {
          const Fields fields = judged(p, std::to_string(vocab) + " columns", memory);
          for (size_t i = 0; i < rows.size(); ++i) {
            EXPECT_LE(fields.at("logprob").value[i], 0) << i;
            EXPECT_FALSE(fields.at("max_logprob").value[i] > 0) << i;
            EXPECT_FALSE(fields.at("mass_above").value[i] > 1) << i;
          }
          if (vocab > 1) continue;
          for (const double x : fields.at("logprob").value) EXPECT_EQ(x, 0);
        }
      });
    }
  }
}

// Random rows as in training, with targets so far above that a single rounding could exceed 0.
TEST_P(TokenStatistics, LogprobOfTrainedRowsIsNeverAboveZero) {
  with_forward([&](auto op) {
    using Op = decltype(op);
    Case c = plain({130, 24, 421});
    c.data = Data::peaked;
    Problem<Op> p = build<Op>(c);
    for (const float scale : {0.25f, 0.5f, 1.0f, 2.0f}) {
      p.op.options.logit_scale = scale;
      const Fields fields = judged(p, std::to_string(scale));
      for (const double x : fields.at("logprob").value) EXPECT_LE(x, 0) << scale;
      for (const double x : fields.at("max_logprob").value) EXPECT_LE(x, 0) << scale;
    }
  });
}

// If min(x, 0) dropped a NaN, the target would seem certain.
TEST_P(TokenStatistics, LogprobKeepsNaN) {
  with_forward([&](auto op) {
    using Op = decltype(op);
    if constexpr (!LinearOp<Op>) {
      const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
      Rows rows(7, std::vector<double>(70, 1.0));
      rows[1][0] = nan;
      rows[2][69] = nan;
      rows[3][0] = inf;
      rows[4][33] = inf;
      rows[5][0] = -inf;
      rows[6].assign(70, -inf);
      const auto p = of_rows<Op>(plain({}), rows, std::vector<double>(7, 0.0));
      const Fields fields = judged(p, "rows that are not finite");
      const Field& logprob = fields.at("logprob");
      for (const size_t i : {1, 2, 3, 4, 6}) EXPECT_TRUE(std::isnan(logprob.value[i])) << i;
      EXPECT_EQ(logprob.value[5], -inf);
      const Field& mass = fields.at("mass_above");
      for (const size_t i : {1, 2, 3, 4, 6}) EXPECT_TRUE(std::isnan(mass.value[i])) << i;
      EXPECT_NEAR(mass.value[5], 1, 1e-6);
    } else {
      Problem<Op> p = build<Op>(plain({9, 16, 70}));
      std::vector<double> input = read(p.op.input);
      input[3 * 16] = std::nan("");
      write(p.op.input, input);
      const Fields fields = judged(p, "a NaN");
      for (const char* name : {"logprob", "mass_above"})
        EXPECT_TRUE(std::isnan(fields.at(name).value[3])) << name;
    }
  });
}

// Expects row k of `part` to have the log-probability of row rows[k] of `whole`, to the bit.
void expect_logprob(const Field& whole, const Field& part, const std::vector<int64_t>& rows,
                    const std::string& what) {
  for (size_t k = 0; k < rows.size(); ++k) {
    if (std::memcmp(&part.bits[4 * k], &whole.bits[4 * rows[k]], 4) == 0) continue;
    ADD_FAILURE() << what << ": logprob of token " << rows[k] << " is " << part.value[k] << ", not "
                  << whole.value[rows[k]];
    return;
  }
}

std::vector<int64_t> all_rows(int64_t tokens) {
  std::vector<int64_t> rows(tokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// What a call may have beside a log-probability.
const Setting kBeside[] = {
    {"nothing else", [](Case&) {}},
    {"the row", [](Case& c) { c.row_statistics = true; }},
    {"everything of the row", [](Case& c) { c.statistics = true; }},
    {"entropy", [](Case& c) { c.entropy = true; }},
    {"rank", [](Case& c) { c.rank = true; }},
    {"sum_p_squared", [](Case& c) { c.sum_p_squared = true; }},
    {"mean_logit", [](Case& c) { c.mean_logit = true; }},
    {"max_logprob", [](Case& c) { c.max_logprob = true; }},
    {"mass_above", [](Case& c) { c.mass_above = true; }},
    {"all statistics",
     [](Case& c) {
       c.statistics = c.rank = c.sum_p_squared = c.mean_logit = c.max_logprob = true;
       c.mass_above = true;
     }},
    {"a sum", [](Case& c) { c.options.reduction = Reduction::sum; }},
    {"a mean", [](Case& c) { c.options.reduction = Reduction::mean; }},
    {"token weights", [](Case& c) { c.token_weight = true; }},
    {"temperatures of 1", [](Case& c) { c.temperatures = true; }},
};

// Forward and ForwardBackward, with each setting of kBeside, in the minimum and the recommended
// workspace.
TEST_P(TokenStatistics, LogprobHasTheSameBitsWhateverElseIsAsked) {
  for (const Setting& map : kAlone) {
    Case c{.op = op_, .shape = {70, 24, 421}, .dtype = dtype_};
    map.apply(c);
    c.row_statistics = false;
    c.logprob = true;
    c.options.reduction = Reduction::none;
    c.data = Data::peaked;
    Field firsts[7];
    const auto compare_with = [&](const Field& logprob, int line, const std::string& what) {
      Field& first = firsts[line];
      if (first.bits.empty()) first = logprob;
      expect_logprob(first, logprob, all_rows(70), std::string(map.name) + ", " + what);
    };
    for (const Setting& beside : kBeside) {
      Case own = c;
      beside.apply(own);
      for (const Memory memory : {Memory::minimum, Memory::recommended}) {
        for (const bool gradients : {false, true}) {
          own.op = is_linear(op_)
                       ? (gradients ? OpKind::linear_forward_backward : OpKind::linear_forward)
                       : (gradients ? OpKind::forward_backward : OpKind::forward);
          with_op(own.op, [&](auto op) {
            using Op = decltype(op);
            if constexpr (ForwardOp<Op>) {
              Problem<Op> p = build<Op>(own);
              if (own.temperatures) write(p.op.weights.temperature, std::vector<double>(70, 1.0));
              if (!own.statistics && !own.row_statistics &&
                  own.options.reduction == Reduction::none && !GradientOp<Op>) {
                p.op.loss = {};
              }
              const Outcome outcome = execute(device_, p.op, p.pool, {.memory = memory});
              ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
              compare_with(outcome.fields.at("logprob"), line_of(own),
                           std::string(beside.name) + (gradients ? " and gradients" : ""));
            }
          });
        }
      }
    }
  }
}

TEST_P(TokenStatistics, LogprobHasTheSameBitsBesideKeptState) {
  if (op_ != OpKind::linear_forward || !device_.keeps_state(dtype_)) return;
  for (const float softcap : {0.0f, 20.0f}) {
    Case c{.op = op_, .shape = {70, 40, 421}, .dtype = dtype_, .row_statistics = true};
    c.logprob = true;
    c.options.softcap = softcap;
    c.options.reduction = Reduction::none;
    Problem<LinearCrossEntropyForward> p = build<LinearCrossEntropyForward>(c);
    const Outcome without = execute(device_, p.op, p.pool);
    LinearCrossEntropyForward placed = p.op;
    place(placed, device_.tensors());
    Kept kept;
    ASSERT_TRUE(
        kept_size(placed, device_.execution(), std::numeric_limits<uint64_t>::max(), &kept).ok());
    if (kept.columns == 0) return;
    p.op.kept = p.pool.reserve(dtype_, {kept.shape[0], kept.shape[1]});
    p.op.kept_rows = p.pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome with = execute(device_, p.op, p.pool, {.memory = memory});
      ASSERT_TRUE(with.status.ok()) << with.status.message();
      expect_logprob(without.fields.at("logprob"), with.fields.at("logprob"), all_rows(70), "kept");
    }
  }
}

// A token at another position, next to other tokens and in a batch of another size, if the device
// promises batch invariance.
TEST_P(TokenStatistics, HaveTheSameBitsInAnyBatch) {
  for (const bool every : {false, true}) {
    Case c = plain({70, 24, 421});
    c.rank = c.sum_p_squared = c.mean_logit = c.max_logprob = c.statistics = every;
    c.mass_above = c.temperatures = every;
    if (!device_.batch_invariant(c)) return;
    with_forward([&](auto op) {
      using Op = decltype(op);
      const Problem<Op> p = build<Op>(c);
      const Outcome whole = execute(device_, p.op, p.pool);
      ASSERT_TRUE(whole.status.ok()) << whole.status.message();
      std::vector<int64_t> reversed = all_rows(70);
      std::reverse(reversed.begin(), reversed.end());
      const std::vector<int64_t> some{69, 3, 3, 41, 0, 17, 18};
      for (const std::vector<int64_t>& rows : {std::vector<int64_t>{33}, some, reversed}) {
        const Problem<Op> part = gather(p, rows);
        const Outcome outcome = execute(device_, part.op, part.pool, {.memory = Memory::minimum});
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
        for (const char* name :
             {"logprob", "sum_p_squared", "mean_logit", "max_logprob", "mass_above", "lse"}) {
          if (!outcome.fields.contains(name)) continue;
          expect_logprob(whole.fields.at(name), outcome.fields.at(name), rows, name);
        }
        if (!every) continue;
        for (size_t k = 0; k < rows.size(); ++k) {
          EXPECT_EQ(outcome.fields.at("rank").value[k], whole.fields.at("rank").value[rows[k]]);
        }
      }
    });
  }
}

// Logits at least a quarter apart, in any order, so that every dtype holds them and no rounding
// error makes two equal.
Rows separated_rows(int64_t tokens, int64_t vocab) {
  Rows rows;
  Random random(11);
  for (int64_t i = 0; i < tokens; ++i) {
    std::vector<double> row(vocab);
    for (int64_t j = 0; j < vocab; ++j) row[j] = 0.25 * static_cast<double>(j - vocab / 2);
    for (int64_t j = vocab - 1; j > 0; --j) std::swap(row[j], row[random.below(j + 1)]);
    rows.push_back(row);
  }
  return rows;
}

TEST_P(TokenStatistics, RankIsExactOnSeparatedLogits) {
  constexpr int64_t tokens = 40, vocab = 131;
  const Rows rows = separated_rows(tokens, vocab);
  const struct {
    float scale, softcap, temperature;
  } maps[] = {{1, 0, 1}, {-0.5f, 0, 1}, {1, 20, 0.7f}};
  for (const auto& [scale, softcap, temperature] : maps) {
    for (const DType index : {DType::i32, DType::i64}) {
      with_forward([&](auto op) {
        using Op = decltype(op);
        Case c = plain({});
        c.statistics = index == DType::i32;
        c.argmax = index;
        c.options.logit_scale = scale;
        c.options.softcap = softcap;
        c.options.temperature = temperature;
        std::vector<double> target(tokens);
        for (int64_t i = 0; i < tokens; ++i) {
          const auto sign = [&](double z) { return scale < 0 ? -z : z; };
          // Every third row's target has the largest logit; other targets are arbitrary.
          int64_t t = i * 37 % vocab;
          for (int64_t j = 0; i % 3 == 0 && j < vocab; ++j) {
            if (sign(rows[i][j]) > sign(rows[i][t])) t = j;
          }
          target[i] = static_cast<double>(t);
        }
        Problem<Op> p = of_rows<Op>(c, rows, target);
        const Fields fields = judged(p, "separated");
        for (int64_t i = 0; i < tokens; ++i) {
          const double own = rows[i][static_cast<int64_t>(target[i])];
          const auto above = std::count_if(rows[i].begin(), rows[i].end(),
                                           [&](double z) { return scale < 0 ? z < own : z > own; });
          EXPECT_EQ(fields.at("rank").value[i], static_cast<double>(above)) << i;
          EXPECT_EQ(fields.at("mass_above").value[i] == 0, above == 0) << i;
          if (!c.statistics) continue;
          EXPECT_EQ(fields.at("argmax").value[i] == target[i], above == 0) << i;
        }
      });
    }
  }
}

// Logits equal to the target's are not above it, in any column.
TEST_P(TokenStatistics, RankCountsNoTie) {
  with_forward([&](auto op) {
    using Op = decltype(op);
    constexpr int64_t vocab = 300;
    Rows rows(4, std::vector<double>(vocab, 2.0));
    for (int64_t j = 0; j < vocab; j += 3) rows[1][j] = 4;  // 100 columns above the target
    // row 2: no column is above the target
    for (int64_t j = 0; j < vocab; j += 3) rows[2][j] = j == 150 ? 2 : -1;
    rows[3].assign(vocab, 0.0);
    Problem<Op> p = of_rows<Op>(plain({}), rows, {299, 1, 150, 7});
    const Fields fields = judged(p, "ties");
    EXPECT_EQ(fields.at("rank").value, (std::vector<double>{0, 100, 0, 0}));
    const std::vector<double>& mass = fields.at("mass_above").value;
    for (const size_t i : {0, 2, 3}) EXPECT_EQ(mass[i], 0) << i;
    EXPECT_NEAR(mass[1], std::exp(2) / (std::exp(2) + 2), 1e-5);
  });
}

// The logits are almost equal, so each column's probability is about 1 / V.
TEST_P(TokenStatistics, MassAboveIsOfTheColumnsThatRankCounts) {
  for (const int64_t vocab : {131, 700}) {
    with_forward([&](auto op) {
      using Op = decltype(op);
      Case c = plain({40, 24, vocab});
      Problem<Op> p = build<Op>(c);
      Random random(5);
      if constexpr (LinearOp<Op>) {
        std::vector<double> values = read(p.op.weight);  // every class gets row 0
        for (size_t k = 24; k < values.size(); ++k) values[k] = values[k % 24];
        write(p.op.weight, values);
      } else {
        std::vector<double> values(40 * vocab);
        for (double& z : values) z = random.below(2) == 0 ? 0 : 0x1p-14;
        write(p.op.logits, values);
      }
      const Fields fields = execute(device_, p.op, p.pool).fields;
      for (size_t i = 0; i < 40; ++i) {
        const double rank = fields.at("rank").value[i], mass = fields.at("mass_above").value[i];
        EXPECT_NEAR(mass, rank / static_cast<double>(vocab), 2e-4) << i;
        EXPECT_EQ(mass == 0, rank == 0) << i;
      }
    });
  }
}

// The rank is -1 where the token does not count, and any index in [0, V) in a row of NaN.
TEST_P(TokenStatistics, RankOfRowsWithoutOne) {
  for (const DType index : {DType::i32, DType::i64}) {
    with_forward([&](auto op) {
      using Op = decltype(op);
      Case c = plain({9, 16, 70});
      c.argmax = index;
      Problem<Op> p = build<Op>(c);
      std::vector<double> target = read(p.op.target);
      target[1] = static_cast<double>(c.options.ignore_index);
      target[4] = 70;
      target[5] = -1;
      write(p.op.target, target);
      const TensorView& rows = [&]() -> const TensorView& {
        if constexpr (LinearOp<Op>) {
          return p.op.input;
        } else {
          return p.op.logits;
        }
      }();
      std::vector<double> values = read(rows);
      const int64_t columns = rows.shape[1];
      values[1 * columns + 2] = values[2 * columns + 3] = values[7 * columns] = std::nan("");
      if (!LinearOp<Op>) values[8 * columns + static_cast<int64_t>(target[8])] = std::nan("");
      write(rows, values);
      const Fields fields = judged(p, "NaN and ignored");
      const std::vector<double>& rank = fields.at("rank").value;
      for (const size_t i : {1, 4, 5}) EXPECT_EQ(rank[i], -1) << i;
      const std::vector<double>& mass = fields.at("mass_above").value;
      for (const size_t i : {1, 4, 5}) EXPECT_EQ(mass[i], 0) << i;
      for (const size_t i : {2, 7}) EXPECT_TRUE(std::isnan(mass[i])) << i;
      EXPECT_EQ(std::isnan(mass[8]), !LinearOp<Op>);
      for (const size_t i : {2, 7, 8}) EXPECT_TRUE(rank[i] >= 0 && rank[i] < 70) << i << rank[i];
    });
  }
}

// A warp on CUDA keeps a row's first 64 partial sums and loads the others 128 at a time. At up to
// 1024 columns a sum, these rows have 196 and more.
TEST_P(TokenStatistics, OfRowsOfManyColumns) {
  for (const bool every : {false, true}) {
    Case c = plain({5, 8, 200003});
    c.statistics = c.rank = c.sum_p_squared = c.mean_logit = every;
    c.max_logprob = c.mass_above = every;
    c.row_statistics = !every;
    with_forward(
        [&](auto op) { judged(build<decltype(op)>(c), describe(c), Memory::recommended); });
  }
}

constexpr OpKind kStatisticsOps[] = {OpKind::forward, OpKind::forward_backward,
                                     OpKind::linear_forward, OpKind::linear_forward_backward};
LOGITLESS_CONFORMANCE_SUITE_OF(TokenStatistics, kStatisticsOps, inputs());

}  // namespace
}  // namespace logitless::conformance
