// SPDX-License-Identifier: Apache-2.0
// Top-k: each list holds the call's own logits in descending order, ties by the lowest id. Rows
// that are ignored, out of range or NaN follow the contract, and shards combine to the whole.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "logitless/combine.h"
#include "tests/support/executors.h"
#include "tests/support/gather.h"
#include "tests/support/shards.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Forward = LinearCrossEntropyForward;
constexpr OpKind kForward[] = {OpKind::linear_forward};
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

void append(std::vector<double>* to, const Field& field) {
  to->insert(to->end(), field.value.begin(), field.value.end());
}

class TopK : public ConformanceTest {
 protected:
  Case plain(Shape shape, int64_t count) const {
    Case c{.op = OpKind::linear_forward, .shape = shape, .dtype = dtype_, .bias = true};
    c.options.reduction = Reduction::none;
    c.bias_dtype = dtype_;
    c.listed = count;
    return c;
  }
  template <class Op>
  Fields run_of(const Problem<Op>& p, const RunPlan& plan = {}) const {
    const Outcome outcome = execute(device_, p.op, p.pool, plan);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    for (const std::string& violation : outcome.violations) ADD_FAILURE() << violation;
    return outcome.fields;
  }
  template <class Op>
  void expect_judged(const Problem<Op>& p, const std::string& what = "",
                     const RunPlan& plan = {}) const {
    const Outcome outcome = execute(device_, p.op, p.pool, plan);
    reference::Result want = expected(device_, p.op, p.model);
    if constexpr (LinearOp<Op>) accept_no_probability(outcome.fields, &want);
    const Comparison judged = compare(want, outcome);
    EXPECT_TRUE(judged.ok()) << what << "\n" << judged.report;
    if (!want.status.ok()) return;
    expect_in_order(outcome.fields, what);
    if constexpr (LinearOp<Op>) {
      expect_own_logits(p, outcome.fields, want.outputs.at("top_logits").bound, what);
    }
  }
  // Each logit belongs to its id. Its error may be as large as that of the list, or of a chosen
  // column, which is computed as another dot product.
  void expect_own_logits(const Problem<Forward>& p, const Fields& fields,
                         const std::vector<double>& of_list, const std::string& what) const {
    const Field &logits = fields.at("top_logits"), &ids = fields.at("top_ids");
    std::vector<int64_t> named(ids.value.begin(), ids.value.end());
    Forward op = p.op;
    op.loss = op.top_logits = op.top_ids = {};
    op.statistics = {};
    op.ids = matrix_view(named.data(), DType::i64, ids.shape[0], ids.shape[1]);
    op.logits_at = matrix_view(nullptr, DType::f32, ids.shape[0], ids.shape[1]);
    reference::Result want = expected(device_, op, p.model);
    reference::Output& own = want.outputs.at("logits_at");
    for (size_t at = 0; at < own.value.size(); ++at) {
      if (std::isnan(logits.value[at])) own.value[at] = kNan;
      own.bound[at] = std::max(own.bound[at], of_list[at]);
    }
    const Comparison judged = compare(want, Fields{{"logits_at", logits}});
    EXPECT_TRUE(judged.ok()) << what << ", of its own id\n" << judged.report;
  }
  // A list descends, names each column once, and has equal logits in the order of their ids.
  static void expect_in_order(const Fields& fields, const std::string& what) {
    const Field &logits = fields.at("top_logits"), &ids = fields.at("top_ids");
    const int64_t count = logits.shape[1];
    for (int64_t i = 0; i < logits.shape[0]; ++i) {
      std::set<double> named;
      for (int64_t r = 0; r < count; ++r) {
        const auto at = static_cast<size_t>(i * count + r);
        const double id = ids.value[at];
        EXPECT_TRUE(id == -1 || named.insert(id).second) << what << ": " << id << " twice of " << i;
        if (r == 0 || std::isnan(logits.value[at])) continue;
        const double before = logits.value[at - 1], last = ids.value[at - 1];
        EXPECT_TRUE(before > logits.value[at] || (before == logits.value[at] && last < id) ||
                    (before == -kInf && id == -1))
            << what << ": place " << r << " of token " << i << " has " << logits.value[at] << " of "
            << id << " behind " << before << " of " << last;
      }
      const auto first = static_cast<size_t>(i * count);
      if (fields.contains("argmax") && !std::isnan(logits.value[first])) {
        EXPECT_EQ(fields.at("argmax").value[static_cast<size_t>(i)], ids.value[first]) << what;
      }
    }
  }

  // Runs each shard, combines the lists, and compares them with those of the whole vocabulary.
  void judge_shards(const Problem<Forward>& whole, const std::vector<int64_t>& sizes,
                    const std::string& what) {
    const int64_t n = whole.op.input.shape[0], k = whole.op.top_logits.shape[1];
    const int64_t vocab = whole.op.weight.shape[0], shards = std::ssize(sizes);
    std::vector<double> reference, log_sum, target_logit, logits, ids;
    int64_t first = 0;
    for (const int64_t count : sizes) {
      Problem<Forward> shard{
          .op = shard_of(whole.op, first, count), .pool = {}, .model = whole.model};
      Forward& op = shard.op;
      op.loss = {}, op.statistics = {};
      for (TensorView* view : {&op.statistics.row_reference, &op.statistics.row_log_sum,
                               &op.statistics.target_logit}) {
        *view = vector_view(nullptr, DType::f32, n);
      }
      shard = copy(shard);
      expect_judged(shard, what + ", a shard");
      const Fields fields = run_of(shard);
      append(&reference, fields.at("row_reference"));
      append(&log_sum, fields.at("row_log_sum"));
      append(&target_logit, fields.at("target_logit"));
      append(&logits, fields.at("top_logits"));
      append(&ids, fields.at("top_ids"));
      first += count;
    }
    for (const DType dtype : {DType::i64, DType::i32}) {
      Problem<Combine> p;
      const auto states = [&](const std::vector<double>& values) {
        return p.pool.add(DType::f32, {shards, n}, values);
      };
      p.op.options = whole.op.options;
      p.op.options.vocab_total = vocab;
      p.op.target = p.pool.add(DType::i64, {n}, read(whole.op.target));
      p.op.shard_row_reference = states(reference);
      p.op.shard_row_log_sum = states(log_sum);
      p.op.shard_target_logit = states(target_logit);
      p.op.shard_top_logits =
          p.pool.add(DType::f32, {shards, n * k}, logits,
                     dtype == DType::i32 ? Layout{.stride = {n * k * 2 + 3, 2}} : Layout{});
      p.op.shard_top_ids = p.pool.add(dtype, {shards, n * k}, ids);
      p.op.top_logits = p.pool.reserve(DType::f32, {n, k});
      p.op.top_ids = p.pool.reserve(dtype, {n, k});
      expect_judged(p, what + ", combined as they are");
      const Fields combined = run_of(p);
      Forward alone = whole.op;
      alone.loss = {}, alone.statistics = {};
      const Comparison judged = compare(expected(device_, alone, whole.model), combined);
      EXPECT_TRUE(judged.ok()) << what << ", of the whole\n" << judged.report;
      std::vector<double> target = read(p.op.target);
      target[0] = static_cast<double>(p.op.options.ignore_index);
      write(p.op.target, target);
      expect_judged(p, what + ", of a list that does not count");
      expect_combined_on_the_host(combined, logits, ids, shards, read(whole.op.target));
      if (shards == 1) expect_as_given(combined, logits, ids);
    }
  }
  // With a single shard the list keeps its bits.
  static void expect_as_given(const Fields& combined, const std::vector<double>& logits,
                              const std::vector<double>& ids) {
    for (size_t at = 0; at < logits.size(); ++at) {
      const double logit = combined.at("top_logits").value.at(at);
      EXPECT_TRUE(logit == logits[at] || (std::isnan(logit) && std::isnan(logits[at])));
      EXPECT_EQ(combined.at("top_ids").value.at(at), ids[at]);
    }
  }
  // combine_top on the host, shard after shard, gives the same lists; it does not know which tokens
  // count.
  static void expect_combined_on_the_host(const Fields& combined, const std::vector<double>& logits,
                                          const std::vector<double>& ids, int64_t shards,
                                          const std::vector<double>& target) {
    const std::vector<float> z(logits.begin(), logits.end());
    const std::vector<int64_t> id(ids.begin(), ids.end());
    const int64_t k = std::ssize(z) / shards / std::ssize(target);
    for (int64_t i = 0; i < std::ssize(target); ++i) {
      std::vector<float> all(z.begin() + i * k, z.begin() + (i + 1) * k), next(all);
      std::vector<int64_t> named(id.begin() + i * k, id.begin() + (i + 1) * k), next_named(named);
      for (int64_t s = 1; s < shards; ++s) {
        const int64_t at = (s * std::ssize(target) + i) * k;
        combine_top(k, all.data(), named.data(), &z[at], &id[at], next.data(), next_named.data());
        std::swap(all, next), std::swap(named, next_named);
      }
      for (int64_t r = 0; r < k; ++r) {
        const double got = combined.at("top_logits").value[i * k + r];
        EXPECT_TRUE(got == all[r] || (std::isnan(got) && std::isnan(all[r])));
        EXPECT_EQ(combined.at("top_ids").value[i * k + r], static_cast<double>(named[r]));
      }
    }
  }
  // Returns the same op with its own memory for inputs and outputs.
  static Problem<Forward> copy(const Problem<Forward>& p) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < p.op.input.shape[0]; ++i) rows.push_back(i);
    return gather(p, rows);
  }
};

void ask_for_nothing_else(Problem<Forward>* p) {
  p->op.loss = {};
  p->op.statistics = {};
}
void give_list(Problem<Forward>* p, int64_t count, DType ids = DType::i64) {
  p->op.top_logits = p->pool.reserve(DType::f32, {p->op.input.shape[0], count});
  p->op.top_ids = p->pool.reserve(ids, {p->op.input.shape[0], count});
}
// The bits of these tokens' rows in `field` [N, width].
std::vector<std::byte> rows_of(const Field& field, const std::vector<int64_t>& rows) {
  const int64_t width = field.shape[1] * size_of(field.dtype);
  std::vector<std::byte> bits;
  for (const int64_t row : rows) {
    bits.insert(bits.end(), field.bits.begin() + row * width,
                field.bits.begin() + (row + 1) * width);
  }
  return bits;
}

TEST_P(TopK, EveryShape) {
  const size_t step = full() ? 1 : eighth() ? 24 : 5;
  std::vector<Row> rows = shape_rows(OpKind::linear_forward, dtype_, {rotation() % step, step});
  constexpr int64_t counts[] = {1, 20, 256, 7};
  for (size_t r = 0; r < rows.size(); ++r) {
    Case& c = rows[r].c;
    c.listed = counts[r % 4];
    c.statistics = r % 3 != 0;
    expect_judged(build<Forward>(c), rows[r].name, {.memory = rows[r].memory});
  }
}

TEST_P(TopK, EveryK) {
  for (const int64_t v : {1, 2, 31, 257, 1100}) {
    for (const int64_t k : {1, 2, 3, 16, 31, 32, 33, 64, 100, 127, 128, 129, 255, 256}) {
      if (k > v) break;
      for (const bool beside : {false, true}) {
        Case c = plain({5, 24, v}, k);
        c.statistics = beside;
        c.seed = static_cast<uint64_t>(k);
        Problem<Forward> p = build<Forward>(c);
        if (!beside) ask_for_nothing_else(&p);
        expect_judged(p, describe(c) + " k = " + std::to_string(k));
      }
    }
  }
}

// The list for k is the beginning of the list for any larger k, and agrees with the call's
// statistics to the bit.
TEST_P(TopK, IsTheBeginningOfALongerList) {
  constexpr int64_t n = 33, v = 700;
  for (const bool capped : {false, true}) {
    Case c = plain({n, 40, v}, 256);
    c.statistics = true;
    if (capped) c.options.softcap = 2, c.options.logit_scale = -0.7f, c.temperatures = true;
    Problem<Forward> p = build<Forward>(c);
    const Fields whole = run_of(p);
    for (const int64_t k : {1, 20, 32, 100}) {
      give_list(&p, k, k == 20 ? DType::i32 : DType::i64);
      const Fields part = run_of(p);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t r = 0; r < k; ++r) {
          const auto at = static_cast<size_t>(i * k + r), from = static_cast<size_t>(i * 256 + r);
          EXPECT_EQ(part.at("top_ids").value[at], whole.at("top_ids").value[from]);
          EXPECT_EQ(std::memcmp(&part.at("top_logits").bits[4 * at],
                                &whole.at("top_logits").bits[4 * from], 4),
                    0);
        }
      }
    }
    // Where the target is in the list, its logit has the bits of target_logit.
    const std::vector<double> target = read(p.op.target);
    int found = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t r = 0; r < 256; ++r) {
        const auto at = static_cast<size_t>(i * 256 + r);
        if (whole.at("top_ids").value[at] != target[static_cast<size_t>(i)]) continue;
        ++found;
        EXPECT_EQ(whole.at("top_logits").value[at],
                  whole.at("target_logit").value[static_cast<size_t>(i)]);
      }
      if (device_.reference_is_maximum(dtype_)) {
        EXPECT_EQ(whole.at("top_logits").value[static_cast<size_t>(i * 256)],
                  whole.at("row_reference").value[static_cast<size_t>(i)]);
      }
    }
    EXPECT_GT(found, 0);
  }
}

// Among columns with equal weight the lowest ids win, wherever tiles and blocks end.
TEST_P(TopK, TiesGoToTheLowestId) {
  for (const int64_t v : {40, 700, 2500}) {
    for (const int64_t classes : {1, 2, 5}) {  // the last row's number
      for (const int64_t k : {1, 7, 40, 200}) {
        if (k > v) continue;
        Case c = plain({6, 8, v}, k);
        c.bias = false;
        c.statistics = true;
        Problem<Forward> p = build<Forward>(c);
        std::vector<double> weight = read(p.op.weight);
        for (int64_t j = 0; j < v; ++j) {
          // Classes 0 and 1 get few columns, so that a list that begins there goes on in the last.
          const int64_t like = classes == 1 ? 0 : j % (classes * 3) < 2 ? j % classes : classes - 1;
          for (int64_t d = 0; d < 8; ++d)
            weight[j * 8 + d] = std::ldexp(like + 1, -static_cast<int>(d));
        }
        write(p.op.weight, weight);
        // Small integers: every product is exact in any order, so equal logits stay equal.
        std::vector<double> input = read(p.op.input);
        for (size_t d = 0; d < input.size(); ++d) input[d] = static_cast<double>(d % 3) - 1;
        write(p.op.input, input);
        expect_judged(p, "ties");
        const Fields fields = run_of(p);
        std::vector<double> raw(static_cast<size_t>(v));
        for (int64_t i = 0; i < 6; ++i) {
          std::vector<int64_t> order;
          for (int64_t j = 0; j < v; ++j) {
            raw[j] = 0;
            for (int64_t d = 0; d < 8; ++d) raw[j] += input[i * 8 + d] * weight[j * 8 + d];
            order.push_back(j);
          }
          std::ranges::sort(order, [&](int64_t a, int64_t b) {
            return raw[a] != raw[b] ? raw[a] > raw[b] : a < b;
          });
          for (int64_t r = 0; r < k; ++r) {
            EXPECT_EQ(fields.at("top_ids").value[i * k + r], static_cast<double>(order[r]))
                << "V " << v << ", k " << k << ", token " << i << ", place " << r;
          }
        }
      }
    }
  }
}

// If logits rise, every column enters the list of candidates, which must not overflow.
TEST_P(TopK, RisingAndFallingLogits) {
  for (const bool rises : {false, true}) {
    for (const int64_t k : {1, 64, 256}) {
      constexpr int64_t v = 6000;
      Case c = plain({3, 4, v}, k);
      c.bias_dtype = DType::f32;
      Problem<Forward> p = build<Forward>(c);
      write(p.op.weight, std::vector<double>(v * 4, 0.0));
      std::vector<double> bias(v);
      for (int64_t j = 0; j < v; ++j) bias[j] = static_cast<double>(rises ? j : v - j) / 64;
      write(p.op.bias, bias);
      expect_judged(p);
      const Field ids = run_of(p).at("top_ids");
      for (int64_t at = 0; at < 3 * k; ++at) {
        EXPECT_EQ(ids.value[at], static_cast<double>(rises ? v - 1 - at % k : at % k));
      }
    }
  }
}

// A vocabulary of several blocks and of more segments than a thread block has threads, and several
// chunks of tokens.
TEST_P(TopK, ManyBlocks) {
  struct Plan {
    Shape shape;
    int64_t k;
    Memory memory;
  };
  constexpr Plan plans[] = {{{2, 4, 400000}, 256, Memory::recommended},
                            {{2, 4, 100000}, 20, Memory::minimum},
                            {{600, 4, 1500}, 256, Memory::minimum},
                            {{1100, 4, 700}, 32, Memory::recommended}};
  for (const auto& [shape, k, memory] : plans) {
    const Case c = plain(shape, k);
    expect_judged(build<Forward>(c), describe(c) + " k = " + std::to_string(k), {.memory = memory});
  }
}

TEST_P(TopK, InfiniteLogitsAreOrdinary) {
  constexpr int64_t v = 300;
  for (const int64_t k : {3, 20, 256}) {
    Case c = plain({4, 16, v}, k);
    c.bias_dtype = DType::f32;
    Problem<Forward> p = build<Forward>(c);
    std::vector<double> bias = read(p.op.bias);
    for (int64_t j = 0; j < v; ++j) {
      if (j % 30 != 7) bias[j] = -kInf;  // ten columns are not masked
    }
    write(p.op.bias, bias);
    write(p.op.target, {7, 37, 67, 0});
    expect_judged(p, "masked");
    const Fields masked = run_of(p);
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t r = 10; r < k; ++r) {
        EXPECT_EQ(masked.at("top_logits").value[i * k + r], -kInf);
        // Then follow the lowest ids of the masked columns, which are all but every 30th.
        const int64_t masked_before = r - 10;
        EXPECT_EQ(masked.at("top_ids").value[i * k + r],
                  static_cast<double>(masked_before + (masked_before + 22) / 29));
      }
    }
    bias[150] = bias[12] = kInf;
    write(p.op.bias, bias);
    expect_judged(p, "infinite");
    const Fields infinite = run_of(p);
    EXPECT_EQ(infinite.at("top_ids").value[0], 12);
    EXPECT_EQ(infinite.at("top_ids").value[1], 150);
    EXPECT_EQ(infinite.at("top_logits").value[1], kInf);
    std::fill(bias.begin(), bias.end(), -kInf);
    write(p.op.bias, bias);
    expect_judged(p, "nothing but -inf");
    EXPECT_EQ(run_of(p).at("top_ids").value[k - 1], static_cast<double>(k - 1));
  }
}

TEST_P(TopK, ANaNIsItsRowsAlone) {
  constexpr int64_t n = 9, v = 1300;
  for (const int64_t k : {1, 20, 256}) {
    for (const int64_t column : {0, 700, 1299}) {
      Case c = plain({n, 16, v}, k);
      c.statistics = true;
      Problem<Forward> p = build<Forward>(c);
      std::vector<double> input = read(p.op.input);
      input[4 * 16 + 3] = kNan;
      write(p.op.input, input);
      expect_judged(p, "a token's NaN");
      const Fields fields = run_of(p);
      for (int64_t at = 0; at < n * k; ++at) {
        EXPECT_EQ(std::isnan(fields.at("top_logits").value[at]), at / k == 4);
        EXPECT_GE(fields.at("top_ids").value[at], 0);
        EXPECT_LT(fields.at("top_ids").value[at], v);
      }
      Problem<Forward> of_column = build<Forward>(c);
      std::vector<double> weight = read(of_column.op.weight);
      weight[column * 16 + 1] = kNan;
      write(of_column.op.weight, weight);
      expect_judged(of_column, "a column's NaN");
    }
  }
}

TEST_P(TopK, OfTokensThatDoNotCountThereIsNoList) {
  for (const int64_t k : {1, 33}) {
    Case c = plain({40, 19, 70}, k);
    c.ignored = 0.4;
    c.outside = 0.2;
    c.fault = true;
    for (const OutOfRange outside : {OutOfRange::ignore, OutOfRange::error}) {
      c.options.out_of_range = outside;
      Problem<Forward> p = build<Forward>(c);
      std::vector<double> input = read(p.op.input);
      const std::vector<double> target = read(p.op.target);
      for (int64_t i = 0; i < 40; ++i) {
        if (target[i] == static_cast<double>(c.options.ignore_index)) input[i * 19] = kNan;
      }
      write(p.op.input, input);
      expect_judged(p);
      if (outside == OutOfRange::error && device_.synchronous()) continue;
      const Fields fields = run_of(p);
      for (int64_t at = 0; at < 40 * k; ++at) {
        const double t = target[at / k];
        const bool counts = t >= 0 && t < 70;
        EXPECT_EQ(fields.at("top_ids").value[at] == -1, !counts);
        EXPECT_EQ(fields.at("top_logits").value[at] == -kInf, !counts);
      }
    }
  }
}

// Threads, workspace, batch and other outputs change no bit of a list.
TEST_P(TopK, DoesNotDependOnWhatStandsBesideIt) {
  constexpr int64_t n = 70;
  Case c = plain({n, 40, 1421}, 50);
  const Problem<Forward> p = build<Forward>(c);
  const Fields fields = run_of(p);
  const auto expect_same = [&](const Fields& other, const std::vector<int64_t>& rows,
                               const std::string& what) {
    for (const char* name : {"top_logits", "top_ids"}) {
      EXPECT_EQ(other.at(name).bits, rows_of(fields.at(name), rows)) << name << ", " << what;
    }
  };
  std::vector<int64_t> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(i);
  expect_same(run_of(p), all, "again");
  for (const int threads : {1, 3, 8}) {
    if (!device_.has_threads()) break;
    const SerialExecutor executor(threads, threads == 3);
    expect_same(run_of(p, {.executor = executor.get()}), all, "threads");
  }
  if (!device_.batch_invariant(c)) return;
  expect_same(run_of(p, {.memory = Memory::minimum}), all, "the smallest workspace");
  Problem<Forward> alone = build<Forward>(c);
  ask_for_nothing_else(&alone);
  expect_same(run_of(alone), all, "alone");
  Case everything = c;
  everything.statistics = everything.rank = everything.logprob = everything.mass_above = true;
  everything.chosen = 3;
  expect_same(run_of(build<Forward>(everything)), all, "beside everything");
  const std::vector<int64_t> rows{41, 3, 69, 3};
  expect_same(run_of(gather(p, rows)), rows, "in another batch");
}

TEST_P(TopK, TheLogProbabilitiesSumToOne) {
  Case c = plain({20, 24, 256}, 256);
  c.row_statistics = true;
  const Fields fields = run_of(build<Forward>(c));
  for (int64_t i = 0; i < 20; ++i) {
    double sum = 0;
    for (int64_t r = 0; r < 256; ++r) {
      const double z = fields.at("top_logits").value[i * 256 + r];
      sum +=
          std::exp((z - fields.at("row_reference").value[i]) - fields.at("row_log_sum").value[i]);
    }
    EXPECT_NEAR(sum, 1, 1e-4);
  }
}

TEST_P(TopK, ShardsComeToTheWhole) {
  struct Split {
    int64_t vocab;
    std::vector<int64_t> sizes;
  };
  const Split splits[] = {{130, {59, 71}},
                          {130, {130}},
                          {700, {1, 300, 2, 397}},
                          {37, {4, 4, 9, 20}},
                          {1200, {300, 900}}};
  for (const auto& [vocab, sizes] : splits) {
    for (const int64_t k : {1, 5, 33, 256}) {
      Case c = plain({9, 24, vocab}, k);
      c.ignored = 0.2;
      c.seed = static_cast<uint64_t>(k + vocab);
      judge_shards(build<Forward>(c), sizes,
                   "V " + std::to_string(vocab) + ", k " + std::to_string(k));
    }
  }
}

TEST_P(TopK, ShardsOfTiesMasksAndNaN) {
  constexpr int64_t vocab = 90;
  for (const int64_t k : {4, 90}) {
    for (const char* content : {"ties", "masked", "NaN"}) {
      Case c = plain({5, 8, vocab}, k);
      c.bias_dtype = DType::f32;
      Problem<Forward> p = build<Forward>(c);
      std::vector<double> bias(vocab, 0.0), input = read(p.op.input);
      if (content[0] == 't') {
        write(p.op.weight, std::vector<double>(vocab * 8, 0.25));
      } else if (content[0] == 'm') {
        for (int64_t j = 0; j < 60; ++j) bias[j] = -kInf;
        write(p.op.target, {60, 61, 70, 80, 89});
      } else {
        bias[30] = kNan;  // in the middle shard
      }
      write(p.op.bias, bias);
      write(p.op.input, input);
      judge_shards(p, {20, 40, 30}, content);
    }
  }
}

// Other devices refuse top-k, as the suite Conformance checks.
std::vector<Parameter> forwards() {
  std::vector<Parameter> all = parameters(kForward, inputs());
  std::erase_if(all, [](const Parameter& p) { return !device(std::get<0>(p)).has_top(); });
  return all;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TopK);
INSTANTIATE_TEST_SUITE_P(All, TopK, testing::ValuesIn(forwards()), parameter_name);

}  // namespace
}  // namespace logitless::conformance
