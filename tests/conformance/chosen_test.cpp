// SPDX-License-Identifier: Apache-2.0
// Chosen columns (ids): each logit has the bits of a target's logit, with any other outputs.
// Gradients add up in the order of k. Gradients of ids that are absent or outside, and rows that
// are ignored or inactive, are not read.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/executors.h"
#include "tests/support/gather.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Forward = LinearCrossEntropyForward;
using Backward = LinearCrossEntropyBackward;
constexpr OpKind kForward[] = {OpKind::linear_forward};
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class ChosenColumns : public ConformanceTest {
 protected:
  Case plain(OpKind op, Shape shape, int64_t chosen) const {
    Case c{.op = op, .shape = shape, .dtype = dtype_, .bias = true, .chosen = chosen};
    c.options.reduction = Reduction::none;
    c.bias_dtype = dtype_;
    return c;
  }
  template <class Op>
  Outcome run_of(const Problem<Op>& p, const RunPlan& plan = {}) const {
    const Outcome outcome = execute(device_, p.op, p.pool, plan);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    for (const std::string& violation : outcome.violations) ADD_FAILURE() << violation;
    return outcome;
  }
  template <class Op>
  void expect_judged(const Problem<Op>& p, const std::string& what = "") const {
    const Comparison judged =
        compare(expected(device_, p.op, p.model), execute(device_, p.op, p.pool));
    EXPECT_TRUE(judged.ok()) << what << "\n" << judged.report;
  }
};

void use_ids(Problem<Forward>* p, int64_t chosen, const std::vector<double>& ids) {
  p->op.ids = p->pool.add(DType::i64, {p->op.input.shape[0], chosen}, ids);
  p->op.logits_at = p->pool.reserve(DType::f32, {p->op.input.shape[0], chosen});
}
void use_ids(Problem<Backward>* p, int64_t chosen, const std::vector<double>& ids,
             const std::vector<double>& gradients) {
  p->op.ids = p->pool.add(DType::i64, {p->op.input.shape[0], chosen}, ids);
  p->op.grad_logits_at = p->pool.add(DType::f32, {p->op.input.shape[0], chosen}, gradients);
}

// Column k of a field [N, K], as bits.
std::vector<std::byte> column_of(const Field& field, int64_t k) {
  const int64_t columns = field.shape[1], size = size_of(field.dtype);
  std::vector<std::byte> bits;
  for (int64_t i = 0; i < field.shape[0]; ++i) {
    const std::byte* at = &field.bits[static_cast<size_t>((i * columns + k) * size)];
    bits.insert(bits.end(), at, at + size);
  }
  return bits;
}

// Leaves logits_at as the only output.
void ask_for_nothing_else(Problem<Forward>* p) {
  p->op.loss = {};
  p->op.statistics = {};
}

TEST_P(ChosenColumns, HaveTheBitsOfATargetsLogit) {
  for (const Shape& shape : {Shape{9, 19, 37}, {70, 33, 515}, {41, 257, 200}}) {
    for (const bool capped : {false, true}) {
      Case c = plain(OpKind::linear_forward, shape, 6);
      c.statistics = true;
      if (capped) c.options.softcap = 2, c.options.logit_scale = -0.7f, c.temperatures = true;
      Problem<Forward> p = build<Forward>(c);
      const std::vector<double> ids = read(p.op.ids);
      Problem<Forward> alone = build<Forward>(c);
      ask_for_nothing_else(&alone);
      const Field beside = run_of(p).fields.at("logits_at");
      const Field made_alone = run_of(alone, {.memory = Memory::minimum}).fields.at("logits_at");
      EXPECT_EQ(beside.bits, made_alone.bits) << describe(c);
      for (int64_t k = 0; k < 6; ++k) {
        Problem<Forward> of_target = build<Forward>(c);
        of_target.op.ids = of_target.op.logits_at = {};
        std::vector<double> targets;
        for (int64_t i = 0; i < shape.tokens; ++i) {
          targets.push_back(std::max(ids[static_cast<size_t>(i * 6 + k)], 0.0));
        }
        write(of_target.op.target, targets);
        const Field target_logit = run_of(of_target).fields.at("target_logit");
        for (int64_t i = 0; i < shape.tokens; ++i) {
          const auto at = static_cast<size_t>(i * 6 + k);
          if (ids[at] < 0) {
            EXPECT_EQ(beside.value[at], -kInf);
          } else {
            EXPECT_EQ(std::memcmp(&beside.bits[4 * at], &target_logit.bits[4 * i], 4), 0)
                << describe(c) << ", token " << i << ", id " << ids[at];
          }
        }
      }
    }
  }
}

// A chosen logit has the same bits for any K, other ids, target and other outputs.
TEST_P(ChosenColumns, DoNotDependOnWhatStandsBesideThem) {
  constexpr int64_t n = 70, v = 421;
  const int64_t most = std::min<int64_t>(device_.most_chosen(), 65);
  const Case c = plain(OpKind::linear_forward, {n, 40, v}, most);
  const Problem<Forward> p = build<Forward>(c);
  const std::vector<double> ids = read(p.op.ids);
  const Field many = run_of(p).fields.at("logits_at");
  for (const int64_t k : {int64_t{0}, int64_t{17}, most - 1}) {
    std::vector<double> one;
    for (int64_t i = 0; i < n; ++i) one.push_back(ids[static_cast<size_t>(i * most + k)]);
    for (const bool all : {false, true}) {
      Problem<Forward> single = build<Forward>(c);
      use_ids(&single, 1, one);
      std::vector<double> targets(n, static_cast<double>(k % v));
      write(single.op.target, targets);
      if (all) {
        single.op.statistics.rank = single.pool.reserve(DType::i64, {n});
        single.op.statistics.entropy = single.pool.reserve(DType::f32, {n});
      }
      const Field logits = run_of(single, {.memory = Memory::minimum}).fields.at("logits_at");
      EXPECT_EQ(column_of(logits, 0), column_of(many, k)) << "k = " << k;
    }
  }
  for (const int threads : {1, 3}) {
    if (!device_.has_threads()) break;
    const SerialExecutor executor(threads, threads == 3);
    EXPECT_EQ(run_of(p, {.executor = executor.get()}).fields.at("logits_at").bits, many.bits);
  }
  const std::vector<int64_t> rows{41, 3, 69, 3};
  const Field part = run_of(gather(p, rows)).fields.at("logits_at");
  if (!device_.batch_invariant(c)) return;
  for (size_t r = 0; r < rows.size(); ++r) {
    const size_t bytes = static_cast<size_t>(most) * 4;
    EXPECT_EQ(std::memcmp(&part.bits[r * bytes], &many.bits[rows[r] * bytes], bytes), 0) << r;
  }
}

TEST_P(ChosenColumns, GradientsHaveTheSameBitsOnAnyNumberOfThreads) {
  if (!device_.has_threads()) return;
  Case c = plain(OpKind::linear_backward, {150, 40, 1300}, 33);
  c.grad_lse = c.saved_state = true;
  const Problem<Backward> p = build<Backward>(c);
  for (const Memory memory : {Memory::minimum, Memory::recommended}) {
    const SerialExecutor one(1), many(5, true);
    const Outcome first = run_of(p, {.memory = memory, .executor = one.get()});
    const Outcome again = run_of(p, {.memory = memory, .executor = many.get()});
    EXPECT_EQ(differing_bits(first.fields, again.fields), "");
  }
}

TEST_P(ChosenColumns, EveryShape) {
  for (const OpKind op : {OpKind::linear_forward, OpKind::linear_backward}) {
    const size_t step = full() ? 1 : eighth() ? 24 : 5;
    std::vector<Row> rows = shape_rows(op, dtype_, {rotation() % step, step});
    for (size_t r = 0; r < rows.size(); ++r) {
      Case& c = rows[r].c;
      c.chosen = r % 3 == 0 ? 1 : r % 3 == 1 ? 9 : 40;
      c.ids = r % 2 == 0 ? DType::i64 : DType::i32;
      c.lists = r % 4 == 1 && device_.has_id_lists();
      c.only_chosen = op == OpKind::linear_backward && r % 5 < 3 && device_.has_id_lists();
      const Comparison judged = judge(device_, c, {.memory = rows[r].memory});
      EXPECT_TRUE(judged.ok()) << rows[r].name << ", K = " << c.chosen << "\n" << judged.report;
    }
  }
}

TEST_P(ChosenColumns, TheMostThatATokenMayHave) {
  for (const OpKind op : {OpKind::linear_forward, OpKind::linear_backward}) {
    Case c = plain(op, {5, 24, 700}, device_.most_chosen());
    c.saved_state = true;
    const Comparison judged = judge(device_, c);
    EXPECT_TRUE(judged.ok()) << judged.report;
    if (c.chosen == 1024) continue;  // 1024 is the contract's limit
    ++c.chosen;
    EXPECT_TRUE(is_refused(device_, c) && judge(device_, c).ok()) << judge(device_, c).report;
  }
}

// In f32, in the order of k, column 7's gradients add up to 0; their exact sum is 2.
TEST_P(ChosenColumns, GradientsOfOneColumnAddUpInTheOrderOfK) {
  if (std::string(device_.name()) == "reference") return;  // which adds in f64
  Case c = plain(OpKind::linear_backward, {2, 8, 70}, 4);
  Problem<Backward> p = build<Backward>(c);
  write(p.op.target, {0, 0});
  p.op.grad_loss = p.pool.add(DType::f32, {2}, {0, 0});
  const double big = 16777216;
  use_ids(&p, 4, {7, 69, 7, 7, 7, 7, -1, 7}, {big, 2, 1, -big, 1, big, kNan, -big});
  p.op.grad_input = p.op.grad_weight = {};
  const Field bias = run_of(p).fields.at("grad_bias");
  if (p.op.grad_bias.dtype != DType::f32) FAIL() << "the sum is rounded";
  for (size_t j = 0; j < bias.value.size(); ++j) {
    EXPECT_EQ(bias.value[j], j == 69 ? 2 : 0) << j;
  }
  // big + 1 rounds to big, so only the order (big - big) + 1 gives 1.
  use_ids(&p, 4, {7, 7, 7, -1, -1, -1, -1, -1}, {big, -big, 1, 0, 0, 0, 0, 0});
  EXPECT_EQ(run_of(p).fields.at("grad_bias").value[7], 1);
}

// The logit of a chosen column passes its gradient on even where the column is masked (-inf).
TEST_P(ChosenColumns, AMaskedColumnPassesItsGradient) {
  Case c = plain(OpKind::linear_backward, {6, 24, 200}, 3);
  c.grad_lse = true;
  Problem<Backward> p = build<Backward>(c);
  std::vector<double> bias = read(p.op.bias);
  bias[5] = bias[150] = -kInf;
  write(p.op.bias, bias);
  std::vector<double> ids, gradients;
  for (int64_t i = 0; i < 6; ++i) {
    ids.insert(ids.end(), {5, i % 2 == 0 ? 150.0 : 5.0, static_cast<double>(10 + i)});
    gradients.insert(gradients.end(), {0.5, 0.25, -1});
  }
  use_ids(&p, 3, ids, gradients);
  write(p.op.target, {9, 9, 9, 9, 9, 9});
  expect_judged(p);
  EXPECT_EQ(run_of(p).fields.at("grad_bias").value[5], 6 * 0.5 + 3 * 0.25);
  EXPECT_EQ(run_of(p).fields.at("grad_bias").value[150], 3 * 0.25);

  Problem<Forward> forward = build<Forward>(plain(OpKind::linear_forward, {6, 24, 200}, 3));
  write(forward.op.bias, bias);
  use_ids(&forward, 3, ids);
  expect_judged(forward);
  EXPECT_EQ(run_of(forward).fields.at("logits_at").value[0], -kInf);
}

TEST_P(ChosenColumns, AnIdOutsideIsAnError) {
  constexpr double wide = 4294967301;  // its low 32 bits are a valid column
  for (const double id : {37.0, -2.0, 1e6, -100.0, wide, -wide}) {
    for (const DType ids : {DType::i32, DType::i64}) {
      if (std::fabs(id) == wide && ids == DType::i32) continue;
      Case c = plain(OpKind::linear_forward, {9, 19, 37}, 5);
      c.ids = ids;
      c.fault = true;
      Problem<Forward> p = build<Forward>(c);
      std::vector<double> values = read(p.op.ids);
      values[3 * 5 + 2] = id;
      write(p.op.ids, values);
      expect_judged(p);
      c.op = OpKind::linear_backward;
      Problem<Backward> back = build<Backward>(c);
      write(back.op.ids, values);
      expect_judged(back);
      if (!device_.synchronous()) continue;
      const std::string message = execute(device_, p.op, p.pool).status.message();
      EXPECT_EQ(message, "ids[3, 2] is " + std::to_string(static_cast<int64_t>(id)) +
                             "; allowed: 0 to 36, or -1 for none");
    }
  }
}

TEST_P(ChosenColumns, OfTokensThatDoNotCountAreNotLookedAt) {
  for (const OpKind op : {OpKind::linear_forward, OpKind::linear_backward}) {
    with_op(op, [&](auto made) {
      using Op = decltype(made);
      if constexpr (ChoosingOp<Op>) {
        Case c = plain(op, {9, 19, 37}, 5);
        c.ignored = 0.5;
        c.fault = true;
        Problem<Op> p = build<Op>(c);
        const std::vector<double> target = read(p.op.target);
        std::vector<double> ids = read(p.op.ids);
        int ignored = 0;
        for (size_t place = 0; place < ids.size(); ++place) {
          if (target[place / 5] != static_cast<double>(c.options.ignore_index)) continue;
          ids[place] = place % 2 == 0 ? 1e9 : -77;
          ++ignored;
        }
        ASSERT_GT(ignored, 0);
        write(p.op.ids, ids);
        expect_judged(p);
        if constexpr (ForwardOp<Op>) {
          const Field logits = run_of(p).fields.at("logits_at");
          for (size_t place = 0; place < ids.size(); ++place) {
            if (target[place / 5] == static_cast<double>(c.options.ignore_index)) {
              EXPECT_EQ(logits.value[place], -kInf);
            }
          }
        }
      }
    });
  }
}

// A token whose present ids all have a gradient of 0 is inactive: nothing of its row is read.
TEST_P(ChosenColumns, ATokenWithoutAGradientIsInactive) {
  Case c = plain(OpKind::linear_backward, {8, 24, 131}, 2);
  Problem<Backward> p = build<Backward>(c);
  p.op.grad_loss = p.pool.add(DType::f32, {8}, std::vector<double>(8, 0.0));
  std::vector<double> ids(16, -1), gradients(16, kNan), input = read(p.op.input);
  ids[2] = 3, gradients[2] = -0.0;  // token 1 stays inactive, token 3 is active
  ids[7] = 130, gradients[7] = 0.5;
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t k = 0; k < 24 && i != 3; ++k) input[static_cast<size_t>(i * 24 + k)] = kNan;
  }
  write(p.op.input, input);
  use_ids(&p, 2, ids, gradients);
  expect_judged(p);
  const Field grad_bias = run_of(p).fields.at("grad_bias");
  for (size_t j = 0; j < 131; ++j) EXPECT_EQ(grad_bias.value[j], j == 130 ? 0.5 : 0) << j;

  // A NaN that is read stays in its row.
  gradients[7] = kNan;
  use_ids(&p, 2, ids, gradients);
  const Outcome outcome = run_of(p);
  for (size_t at = 0; at < 8 * 24; ++at) {
    EXPECT_EQ(std::isnan(outcome.fields.at("grad_input").value[at]), at / 24 == 3) << at;
  }
}

// Gradients are scaled by the largest of them; the gradient of an absent id must not count.
TEST_P(ChosenColumns, AnAbsentGradientOfAnySizeChangesNothing) {
  const Case c = plain(OpKind::linear_backward, {9, 24, 131}, 4);
  Problem<Backward> p = build<Backward>(c);
  const std::vector<double> ids = read(p.op.ids);
  Fields fields[3];
  const double absent[] = {0, 3e38, kInf};
  for (int i = 0; i < 3; ++i) {
    std::vector<double> gradients = read(p.op.grad_logits_at);
    int changed = 0;
    for (size_t k = 0; k < ids.size(); ++k) {
      if (ids[k] < 0) gradients[k] = absent[i], ++changed;
    }
    ASSERT_GT(changed, 0);
    use_ids(&p, 4, ids, gradients);
    fields[i] = run_of(p).fields;
  }
  EXPECT_EQ(differing_bits(fields[0], fields[1]), "");
  EXPECT_EQ(differing_bits(fields[0], fields[2]), "");
}

TEST_P(ChosenColumns, OfAnotherShardHaveNoLogitAndNoGradient) {
  constexpr int64_t n = 9, v = 70, first = 30;
  Case c = plain(OpKind::linear_forward, {n, 24, v}, 5);
  c.options.vocab_total = 130, c.options.vocab_start = first;
  c.statistics = true;
  Problem<Forward> p = build<Forward>(c);
  expect_judged(p);
  const std::vector<double> ids = read(p.op.ids);
  const Field logits = run_of(p).fields.at("logits_at");
  int elsewhere = 0;
  for (size_t k = 0; k < ids.size(); ++k) {
    const bool here = ids[k] >= first && ids[k] < first + v;
    EXPECT_EQ(logits.value[k] == -kInf, !here) << ids[k];
    elsewhere += ids[k] >= 0 && !here;
  }
  EXPECT_GT(elsewhere, 0);

  // A token is active here even if its only gradient is to a column of another shard.
  c.op = OpKind::linear_backward;
  c.saved_state = true;
  Problem<Backward> back = build<Backward>(c);
  back.op.grad_loss = back.pool.add(DType::f32, {n}, std::vector<double>(n, 0.0));
  use_ids(&back, 1, {129, -1, 129, 0, 30, 99, 100, 5, -1}, std::vector<double>(n, 0.5));
  expect_judged(back);
  std::vector<double> input = read(back.op.input);
  for (size_t i = 0; i < 2 * 24; ++i) input[i] = kNan;
  write(back.op.input, input);
  const Field grad_input = run_of(back).fields.at("grad_input");
  EXPECT_TRUE(std::isnan(grad_input.value[0]));
  EXPECT_EQ(grad_input.value[24], 0);
}

// The maximum over the shards' logits_at is the whole vocabulary's logits_at.
TEST_P(ChosenColumns, OfAllShardsAreThoseOfTheWhole) {
  constexpr int64_t n = 9, v = 130, cut = 59;
  const Case c = plain(OpKind::linear_forward, {n, 24, v}, 7);
  Problem<Forward> whole = build<Forward>(c);
  Fields largest;
  for (const int64_t first : {int64_t{0}, cut}) {
    Problem<Forward> shard = build<Forward>(c);
    ask_for_nothing_else(&shard);
    const int64_t count = first == 0 ? cut : v - cut;
    Forward& op = shard.op;
    op.options.vocab_start = first, op.options.vocab_total = v;
    op.weight.byte_offset += first * op.weight.stride[0] * size_of(op.weight.dtype);
    op.bias.byte_offset += first * op.bias.stride[0] * size_of(op.bias.dtype);
    op.weight.shape[0] = op.bias.shape[0] = count;
    const Field logits = run_of(shard).fields.at("logits_at");
    if (largest.empty()) largest["logits_at"] = logits;
    for (size_t k = 0; k < logits.value.size(); ++k) {
      double& most = largest["logits_at"].value[k];
      most = std::max(most, logits.value[k]);
    }
  }
  ask_for_nothing_else(&whole);
  const Comparison judged = compare(expected(device_, whole.op, whole.model), largest);
  EXPECT_TRUE(judged.ok()) << judged.report;
}

// Turns the rows of ids, and the tensors that go with them, into lists without the absent ids at
// the rows' ends.
template <class Op>
void use_lists(Problem<Op>* p) {
  const int64_t rows = p->op.ids.shape[0], columns = p->op.ids.shape[1];
  const std::vector<double> ids = read(p->op.ids);
  std::vector<double> listed, gradients, offsets{0};
  for (int64_t i = 0; i < rows; ++i) {
    int64_t count = columns;
    while (count > 0 && ids[static_cast<size_t>(i * columns + count - 1)] == -1) --count;
    for (int64_t k = 0; k < count; ++k) listed.push_back(ids[static_cast<size_t>(i * columns + k)]);
    if constexpr (!ForwardOp<Op>) {
      const std::vector<double> values = read(p->op.grad_logits_at);
      gradients.insert(gradients.end(), values.begin() + i * columns,
                       values.begin() + i * columns + count);
    }
    offsets.push_back(static_cast<double>(listed.size()));
  }
  p->op.id_offsets = p->pool.add(DType::i32, {rows + 1}, offsets);
  p->op.ids = p->pool.add(DType::i64, {std::ssize(listed)}, listed);
  if constexpr (ForwardOp<Op>) {
    p->op.logits_at = p->pool.reserve(DType::f32, {std::ssize(listed)});
  } else {
    p->op.grad_logits_at = p->pool.add(DType::f32, {std::ssize(listed)}, gradients);
  }
}

TEST_P(ChosenColumns, ListsHaveTheBitsOfRows) {
  if (!device_.has_id_lists()) return;
  for (const bool alone : {false, true}) {
    Case c = plain(OpKind::linear_forward, {70, 40, 421}, 9);
    c.ignored = 0.2;
    Problem<Forward> rows = build<Forward>(c), lists = build<Forward>(c);
    const std::vector<double> ids = read(rows.op.ids);
    use_lists(&lists);
    if (alone) ask_for_nothing_else(&rows), ask_for_nothing_else(&lists);
    const Field of_rows = run_of(rows).fields.at("logits_at");
    const Field of_lists = run_of(lists).fields.at("logits_at");
    const std::vector<double> offsets = read(lists.op.id_offsets);
    for (size_t i = 0; i < 70; ++i) {
      const auto first = static_cast<size_t>(offsets[i]), end = static_cast<size_t>(offsets[i + 1]);
      EXPECT_EQ(std::memcmp(of_lists.bits.data() + first * 4, of_rows.bits.data() + i * 9 * 4,
                            (end - first) * 4),
                0)
          << "token " << i;
    }
    expect_judged(lists);
  }
  for (const bool only : {false, true}) {
    Case c = plain(OpKind::linear_backward, {70, 40, 421}, 9);
    c.saved_state = c.grad_lse = true;
    c.only_chosen = only;
    Problem<Backward> rows = build<Backward>(c), lists = build<Backward>(c);
    use_lists(&lists);
    EXPECT_EQ(differing_bits(run_of(rows).fields, run_of(lists).fields), "") << only;
    expect_judged(lists);
  }
}

TEST_P(ChosenColumns, ListsMayBeEmptyOrLong) {
  if (!device_.has_id_lists()) return;
  for (const OpKind op : {OpKind::linear_forward, OpKind::linear_backward}) {
    with_op(op, [&](auto made) {
      using Op = decltype(made);
      if constexpr (ChoosingOp<Op>) {
        for (const bool long_one : {false, true}) {
          Problem<Op> p = build<Op>(plain(op, {3, 24, 300}, 1));
          const int64_t count = long_one ? 2500 : 0;
          std::vector<double> ids, gradients;
          for (int64_t k = 0; k < count; ++k) {
            ids.push_back(static_cast<double>(k * 7 % 300));
            gradients.push_back(static_cast<double>(k % 5) - 2);
          }
          const auto end = static_cast<double>(count);
          p.op.id_offsets = p.pool.add(DType::i64, {4}, {0, 0, end, end});
          p.op.ids = p.pool.add(DType::i64, {count}, ids);
          if constexpr (ForwardOp<Op>) {
            p.op.logits_at = p.pool.reserve(DType::f32, {count});
          } else {
            p.op.grad_logits_at = p.pool.add(DType::f32, {count}, gradients);
            p.op.only_chosen = long_one;
          }
          expect_judged(p, long_one ? "a long list" : "no id at all");
        }
      }
    });
  }
}

TEST_P(ChosenColumns, OffsetsThatAreNoneAreAnError) {
  if (!device_.synchronous()) return;
  const struct {
    std::vector<double> offsets;
    const char* message;
  } wrong[] = {{{1, 2, 4, 6}, "id_offsets[0] is 1; allowed: 0 to 0"},
               {{0, 4, 3, 6}, "id_offsets[2] is 3; allowed: 4 to 6"},
               {{0, 7, 7, 6}, "id_offsets[1] is 7; allowed: 0 to 6"},
               {{0, 2, 4, 5}, "id_offsets[3] is 5; allowed: 6 to 6"},
               {{0, 2, 4, 7}, "id_offsets[3] is 7; allowed: 6 to 6"},
               {{0, -1, 4, 6}, "id_offsets[1] is -1; allowed: 0 to 6"}};
  for (const auto& w : wrong) {
    Problem<Forward> p = build<Forward>(plain(OpKind::linear_forward, {3, 24, 300}, 2));
    p.op.id_offsets = p.pool.add(DType::i64, {4}, w.offsets);
    p.op.ids = p.pool.add(DType::i64, {6}, {1, 2, 3, 4, 5, 6});
    p.op.logits_at = p.pool.reserve(DType::f32, {6});
    const Outcome outcome = execute(device_, p.op, p.pool);
    EXPECT_EQ(outcome.status.code(), StatusCode::invalid_argument);
    EXPECT_STREQ(outcome.status.message(), w.message);
    EXPECT_TRUE(outcome.violations.empty());
    EXPECT_STREQ(reference::evaluate(p.op, p.model).status.message(), w.message);
  }
}

// An asynchronous device takes invalid lists as empty; valid lists keep their ids.
TEST_P(ChosenColumns, OffsetsThatAreNoneMakeEmptyLists) {
  if (device_.synchronous() || !device_.has_id_lists()) return;
  const std::vector<double> ids{1, 2, 3, 4, 5, 6}, gradients{1, 2, 3, 4, 5, 6};
  const struct {
    std::vector<double> offsets;
    std::vector<size_t> rows;  // the token of each id, 3 if it is in no list
  } wrong[] = {{{0, 4, 2, 6}, {0, 0, 0, 0, 3, 3}},       {{1, 2, 4, 6}, {3, 0, 1, 1, 2, 2}},
               {{0, 2, 1 << 30, 6}, {0, 0, 3, 3, 3, 3}}, {{0, -5, 3, 6}, {3, 3, 3, 2, 2, 2}},
               {{0, 2, 4, 5}, {0, 0, 1, 1, 2, 3}},       {{-2, 2, 4, 7}, {3, 3, 1, 1, 3, 3}}};
  for (const auto& w : wrong) {
    Case c = plain(OpKind::linear_forward, {3, 24, 300}, 6);
    c.fault = true;
    Problem<Forward> rows = build<Forward>(c), lists = build<Forward>(c);
    std::vector<double> padded(18, -1), padded_gradients(18, kNan);
    for (size_t p = 0; p < 6; ++p) {
      if (w.rows[p] == 3) continue;
      padded[w.rows[p] * 6 + p] = ids[p];
      padded_gradients[w.rows[p] * 6 + p] = gradients[p];
    }
    use_ids(&rows, 6, padded);
    lists.op.id_offsets = lists.pool.add(DType::i64, {4}, w.offsets);
    lists.op.ids = lists.pool.add(DType::i64, {6}, ids);
    lists.op.logits_at = lists.pool.reserve(DType::f32, {6});
    const Field of_rows = run_of(rows).fields.at("logits_at");
    const Outcome outcome = run_of(lists);
    EXPECT_EQ(outcome.fault, 1);
    for (size_t p = 0; p < 6; ++p) {
      const double made = outcome.fields.at("logits_at").value[p];
      if (w.rows[p] == 3) {
        EXPECT_TRUE(std::isnan(made)) << p;
      } else {
        EXPECT_EQ(made, of_rows.value[w.rows[p] * 6 + p]) << p;
      }
    }
    for (const bool only : {false, true}) {
      c.op = OpKind::linear_backward;
      c.only_chosen = only;
      Problem<Backward> back = build<Backward>(c), listed = build<Backward>(c);
      use_ids(&back, 6, padded, padded_gradients);
      listed.op.id_offsets = listed.pool.add(DType::i64, {4}, w.offsets);
      listed.op.ids = listed.pool.add(DType::i64, {6}, ids);
      listed.op.grad_logits_at = listed.pool.add(DType::f32, {6}, gradients);
      EXPECT_EQ(differing_bits(run_of(back).fields, run_of(listed).fields), "");
    }
  }
}

// With only_chosen, only the chosen columns' rows of weight are read and of grad_weight changed.
TEST_P(ChosenColumns, OnlyTheirGradientsAreMade) {
  if (!device_.has_id_lists()) return;
  Case c = plain(OpKind::linear_backward, {6, 24, 200}, 3);
  c.only_chosen = true;
  for (const bool accumulates : {false, true}) {
    c.accumulate = accumulates;
    Problem<Backward> p = build<Backward>(c);
    std::vector<double> ids, gradients, weight = read(p.op.weight), input = read(p.op.input);
    for (int64_t i = 0; i < 6; ++i) {  // 17 is in every row; token 4 has only gradients of 0
      ids.insert(ids.end(), {17, i % 2 == 0 ? 60.0 + static_cast<double>(i) : 17.0, -1});
      gradients.insert(gradients.end(), {i == 4 ? 0 : 0.5, i == 4 ? 0 : -0.25, kNan});
    }
    for (size_t j = 0; j < 200; ++j) {
      for (size_t k = 0; k < 24; ++k) {
        if (j != 17 && (j < 60 || j > 64)) weight[j * 24 + k] = kNan;
      }
    }
    for (size_t k = 0; k < 24; ++k) input[4 * 24 + k] = kNan;
    write(p.op.weight, weight);
    write(p.op.input, input);
    use_ids(&p, 3, ids, gradients);
    std::vector<double> old = read(p.op.grad_weight), old_bias = read(p.op.grad_bias);
    old[0] = old_bias[0] = -0.0;  // adding 0 would make it +0
    write(p.op.grad_weight, old);
    write(p.op.grad_bias, old_bias);
    expect_judged(p);
    const Outcome outcome = run_of(p);
    const Field& made = outcome.fields.at("grad_weight");
    for (size_t j = 0; j < 200; ++j) {
      const bool chosen = j == 17 || j == 60 || j == 62;
      for (size_t k = 0; k < 24; ++k) {
        const double left = accumulates ? old[j * 24 + k] : 0;
        EXPECT_EQ(made.value[j * 24 + k] != left, chosen) << j;
      }
    }
    for (size_t k = 0; k < 24; ++k) {
      EXPECT_EQ(outcome.fields.at("grad_input").value[4 * 24 + k], 0);
    }
    EXPECT_EQ(std::signbit(made.value[0]), accumulates);
    EXPECT_EQ(std::signbit(outcome.fields.at("grad_bias").value[0]), accumulates);
    if (accumulates) continue;
    EXPECT_EQ(outcome.fields.at("grad_bias").value[17], 5 * 0.5 - 3 * 0.25);
    EXPECT_EQ(outcome.fields.at("grad_bias").value[62], -0.25);
  }
}

TEST_P(ChosenColumns, OnlyTheirGradientsHaveTheSameBitsInAnyWorkspaceAndOnAnyThreads) {
  if (!device_.has_id_lists()) return;
  for (const bool capped : {false, true}) {
    Case c = plain(OpKind::linear_backward, {150, 40, 300}, 33);
    c.only_chosen = true;
    c.temperatures = capped;
    if (capped) c.options.softcap = 2;
    const Problem<Backward> p = build<Backward>(c);
    const Outcome first = run_of(p, {.memory = Memory::minimum});
    EXPECT_EQ(differing_bits(first.fields, run_of(p).fields), "");
    if (!device_.has_threads()) continue;
    for (const int threads : {1, 5}) {
      const SerialExecutor executor(threads, threads == 5);
      EXPECT_EQ(differing_bits(first.fields, run_of(p, {.executor = executor.get()}).fields), "");
    }
  }
}

// A column's gradient does not depend on the other columns or their number.
TEST_P(ChosenColumns, AColumnsGradientDependsOnItsOwnPlacesAlone) {
  if (!device_.has_id_lists()) return;
  Case c = plain(OpKind::linear_backward, {1100, 8, 70}, 2);
  c.only_chosen = true;
  Problem<Backward> p = build<Backward>(c), q = build<Backward>(c);
  std::vector<double> ids, others, gradients;
  for (int64_t i = 0; i < 1100; ++i) {
    ids.insert(ids.end(), {40, -1});
    others.insert(others.end(), {40, static_cast<double>(i % 40)});
    const double g = static_cast<double>(i % 13) / 7 - 0.6;
    gradients.insert(gradients.end(), {g, 0.3});
  }
  use_ids(&p, 2, ids, gradients);
  use_ids(&q, 2, others, gradients);
  expect_judged(p);
  expect_judged(q);
  const Field alone = run_of(p).fields.at("grad_weight"),
              beside = run_of(q).fields.at("grad_weight");
  EXPECT_EQ(std::memcmp(alone.bits.data() + 40 * 8 * 4, beside.bits.data() + 40 * 8 * 4, 8 * 4), 0);
}

INSTANTIATE_TEST_SUITE_P(All, ChosenColumns, testing::ValuesIn(parameters(kForward, inputs())),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
