// SPDX-License-Identifier: Apache-2.0
// The divergence of two heads with a sharded vocabulary: Forward of each shard, Combine and a sum
// over the shards, and Backward. Each shard is checked alone, and all together as the whole
// vocabulary.
#include <cmath>
#include <functional>

#include "tests/support/divergences.h"
#include "tests/support/shards.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Both = LinearDivergenceForwardBackward;
using Forward = LinearDivergenceForward;
using Backward = LinearDivergenceBackward;

constexpr double kInf = std::numeric_limits<double>::infinity();

void set(const TensorView& view, const std::function<double(int64_t, double)>& value_of) {
  std::vector<double> values = read(view);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = value_of(static_cast<int64_t>(i), values[i]);
  }
  write(view, values);
}

// Simulates the ranks of a group, each with one shard, in one call.
class Ranks {
 public:
  // `keeps`: each shard's Forward keeps its logits for the calls after it, where it can.
  Ranks(const TestDevice& device, Problem<Both>& p, const Sizes& sizes, const RunPlan& plan,
        bool keeps = false)
      : device_(device),
        p_(p),
        sizes_(sizes),
        plan_(plan),
        keeps_(keeps),
        vocab_(p.op.weight.shape[0]) {
    for (TensorView* view :
         {&states_.row_reference, &states_.row_log_sum, &states_.teacher_row_reference,
          &states_.teacher_row_log_sum, &target_logit_, &divergence_sum_, &slope_sum_}) {
      *view = of_tokens();
    }
  }

  Comparison judge() {
    const std::vector<Fields> states = all([&](Forward* op) {
      op->states = states_;
      if (p_.op.target) op->target_logit = target_logit_;
      op->statistics = {.entropy = p_.op.statistics.entropy,
                        .teacher_entropy = p_.op.statistics.teacher_entropy};
    });
    if (!result_.ok()) return result_;
    student_ = combined(states, "");
    teacher_ = combined(states, "teacher_");
    if (!result_.ok()) return result_;
    give_states();
    const std::vector<Fields> sums = all([&](Forward* op) {
      op->states = states_;
      op->divergence_sum = divergence_sum_, op->slope_sum = slope_sum_;
      op->statistics = {.acceptance = p_.op.statistics.acceptance};
    });
    if (!result_.ok()) return result_;
    add(sums);
    judge_outputs();
    backwards();
    return result_;
  }

 private:
  TensorView of_tokens() { return p_.pool.reserve(DType::f32, {p_.op.input.shape[0]}); }
  int64_t tokens() const { return p_.op.input.shape[0]; }

  template <class Op>
  Fields run(const Op& op, const std::string& name) {
    const Outcome outcome = execute(device_, op, p_.pool, plan_);
    for (const auto& [field, view] : {std::pair("kept", op.kept), {"kept_rows", op.kept_rows}}) {
      if (view && outcome.kept.contains(field)) write_bits(view, outcome.kept.at(field));
    }
    reference::Result want = expected(device_, op, p_.model);
    accept_no_probability(outcome.fields, &want);
    result_.merge(compare(want, outcome), name);
    return outcome.fields;
  }
  // Runs every shard's Forward after `ask` has set its outputs.
  template <class Ask>
  std::vector<Fields> all(const Ask& ask) {
    std::vector<Fields> shards;
    int64_t first = 0;
    for (const int64_t count : sizes_) {
      const Both shard = shard_of(p_.op, first, count);
      Forward op{.input = shard.input,
                 .weight = shard.weight,
                 .bias = shard.bias,
                 .teacher = shard.teacher,
                 .target = shard.target,
                 .options = shard.options,
                 .divergence = shard.divergence,
                 .weights = shard.weights};
      ask(&op);
      if (keeps_) keep(first, &op);
      shards.push_back(run(op, "Forward at " + std::to_string(first)));
      first += count;
    }
    return shards;
  }

  // What the shard at column `first` keeps: written by the Forward of its states.
  struct KeptShard {
    Kept size;
    TensorView kept, rows;
  };
  void keep(int64_t first, Forward* op) {
    if (!kept_.contains(first)) {
      KeptShard& made = kept_[first];
      Forward asked = *op;
      place(asked, device_.tensors());
      const Status status = kept_size(asked, device_.execution(), UINT64_MAX, &made.size);
      EXPECT_TRUE(status.ok()) << status.message();
      const Kept& k = made.size;
      made.kept = p_.pool.reserve(p_.op.input.dtype, {k.shape[0], k.shape[1]});
      made.rows = p_.pool.reserve(DType::f32, {k.rows_shape[0], k.rows_shape[1]});
    }
    op->kept = kept_[first].kept, op->kept_rows = kept_[first].rows;
  }
  void give_kept(int64_t first, Backward* op) {
    const KeptShard& made = kept_.at(first);
    op->kept = made.kept, op->kept_rows = made.rows, op->kept_key = made.size.key;
  }

  // Combines the shards' states of one head, the student ("") or the teacher ("teacher_").
  Fields combined(const std::vector<Fields>& shards, const std::string& head) {
    LinearCrossEntropyForward whole{
        .target = p_.op.target, .options = p_.op.options, .weights = p_.op.weights};
    whole.weights.normalizer = {};
    whole.options.reduction = Reduction::none;
    if (!whole.target) {
      whole.target = p_.pool.add(DType::i64, {tokens()}, std::vector<double>(tokens()));
      whole.options.ignore_index = -1;
    }
    const TensorView row = p_.op.statistics.entropy;
    whole.statistics = {.entropy = row, .row_reference = row, .row_log_sum = row};
    if (head.empty() && p_.op.target) whole.statistics.logprob = row;
    std::vector<Fields> own;
    for (const Fields& shard : shards) {
      Fields& state = own.emplace_back();
      for (const char* name : {"row_reference", "row_log_sum", "entropy"}) {
        state[name] = shard.at(head + name);
      }
      const auto target = shard.find("target_logit");
      state["target_logit"] = target == shard.end() ? state["row_reference"] : target->second;
    }
    const Problem<Combine> op = combine_of(whole, vocab_, own);
    const Outcome outcome = execute(device_, op.op, op.pool, plan_);
    result_.merge(compare(expected(device_, op.op, op.model), outcome), "combined " + head);
    return outcome.fields;
  }
  void give_states() {
    write_bits(states_.row_reference, student_.at("row_reference"));
    write_bits(states_.row_log_sum, student_.at("row_log_sum"));
    write_bits(states_.teacher_row_reference, teacher_.at("row_reference"));
    write_bits(states_.teacher_row_log_sum, teacher_.at("row_log_sum"));
  }
  // Adds the shards' sums in f32, in their order.
  void add(const std::vector<Fields>& shards) {
    sum_ = shards[0];
    for (size_t s = 1; s < shards.size(); ++s) {
      for (auto& [name, field] : sum_) {
        for (size_t i = 0; i < field.value.size(); ++i) {
          field.value[i] = static_cast<float>(field.value[i] + shards[s].at(name).value[i]);
        }
      }
    }
  }
  // The ranks' results are within the bound of the whole vocabulary, plus that of their additions.
  void judge_outputs() {
    const DivergenceOptions& o = p_.op.divergence;
    Fields fields;
    fields["loss"] = sum_.at("divergence_sum");
    fields["acceptance"] = sum_.at("acceptance");
    fields["entropy"] = student_.at("entropy"), fields["teacher_entropy"] = teacher_.at("entropy");
    if (p_.op.target) fields["logprob"] = student_.at("logprob");
    const std::vector<double> weight =
        p_.op.weights.token ? read(p_.op.weights.token) : std::vector<double>(tokens(), 1);
    for (size_t i = 0; i < weight.size(); ++i) {
      double& loss = fields["loss"].value[i];
      EXPECT_FALSE(loss < 0) << loss;
      if (o.label_weight != 0) loss -= o.label_weight * student_.at("logprob").value[i];
      loss = static_cast<float>(weight[i] * loss);
    }
    reference::Result want = expected(device_, p_.op, p_.model);
    for (const char* name : {"grad_input", "grad_weight", "grad_bias"}) want.outputs.erase(name);
    for (auto& [name, output] : want.outputs) {
      for (size_t i = 0; i < output.value.size(); ++i) {
        const double more = 0x1p-24 * static_cast<double>(sizes_.size()) * output.value[i];
        if (std::isfinite(more)) output.bound[i] += std::fabs(more);
      }
    }
    result_.merge(compare(want, fields), "all shards");
  }
  void backwards() {
    const reference::Result want = expected(device_, p_.op, p_.model);
    Backward whole{.input = p_.op.input,
                   .weight = p_.op.weight,
                   .bias = p_.op.bias,
                   .teacher = p_.op.teacher,
                   .target = p_.op.target,
                   .grad_loss = p_.op.grad_loss,
                   .states = states_,
                   .slope_mean = slope_sum_,
                   .grad_input = p_.op.grad_input,
                   .grad_weight = p_.op.grad_weight,
                   .grad_bias = p_.op.grad_bias,
                   .options = p_.op.options,
                   .divergence = p_.op.divergence,
                   .weights = p_.op.weights};
    write(slope_sum_, sum_.at("slope_sum").value);
    Field sum;
    std::vector<double> magnitude;
    int64_t first = 0;
    for (const int64_t count : sizes_) {
      const std::string name = "Backward at " + std::to_string(first);
      Backward shard = shard_of(whole, first, count);
      if (keeps_) give_kept(first, &shard);
      const Fields fields = run(shard, name);
      if (!result_.ok()) return;
      expect_parts(device_, shard, p_.pool, plan_, fields, name);
      result_.merge(compare_columns(want, fields, vocab_, first, count), name + " of the whole");
      const Field& part = fields.at("grad_input");
      if (first == 0) sum = part, magnitude.resize(part.value.size());
      for (size_t k = 0; k < part.value.size(); ++k) {
        if (first > 0) sum.value[k] = static_cast<float>(sum.value[k] + part.value[k]);
        magnitude[k] += std::fabs(part.value[k]);
      }
      first += count;
    }
    reference::Result added;
    reference::Output& output = added.outputs["grad_input"] = want.outputs.at("grad_input");
    for (size_t k = 0; k < magnitude.size(); ++k) {
      const double more = 0x1p-24 * static_cast<double>(sizes_.size()) * magnitude[k];
      if (std::isfinite(more)) output.bound[k] += more;
    }
    result_.merge(compare(added, Fields{{"grad_input", sum}}), "the sum of the parts");
  }

  const TestDevice& device_;
  Problem<Both>& p_;
  const Sizes sizes_;
  const RunPlan plan_;
  const bool keeps_;
  int64_t vocab_;
  std::map<int64_t, KeptShard> kept_;
  DivergenceStates states_;
  TensorView target_logit_, divergence_sum_, slope_sum_;
  Fields student_, teacher_, sum_;
  Comparison result_;
};

class DivergenceShards : public ConformanceTest {
 protected:
  bool is_served() const { return std::string("webgpu") != device_.name(); }
  Case plain(Shape shape, DivergenceKind kind) const {
    Case c{.op = op_, .shape = shape, .dtype = dtype_, .statistics = true, .logprob = true};
    c.options.reduction = Reduction::none;
    c.grad_input = DType::f32;  // the shards' grad_input are added in f32
    c.divergence.kind = kind;
    return c;
  }
  void expect_shards(Problem<Both> p, const Sizes& sizes, const std::string& what) const {
    if (!is_served()) return;
    const bool can_keep = std::string("cuda") == device_.name() && sizes.size() > 1;
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      for (const bool keeps : {false, true}) {
        if (keeps && !can_keep) continue;
        const Comparison result = Ranks(device_, p, sizes, {.memory = memory}, keeps).judge();
        EXPECT_TRUE(result.ok()) << what << ", " << sizes.size() << " shards"
                                 << (keeps ? " that keep\n" : "\n") << result.report;
      }
    }
  }
};

std::string name_of(DivergenceKind kind) {
  constexpr const char* names[] = {"forward_kl", "reverse_kl", "jsd", "skew_kl", "tv"};
  return names[static_cast<int>(kind)];
}

// One shard, two halves, three uneven shards, a single column on either side, five shards.
const Sizes kPartitions[] = {{131}, {66, 65}, {7, 100, 24}, {1, 129, 1}, {16, 16, 64, 32, 3}};

TEST_P(DivergenceShards, AreTheWhole) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const Sizes& sizes : kPartitions) {
      expect_shards(build<Both>(plain({19, 33, 131}, kind)), sizes, name_of(kind));
    }
  }
}

// Enough columns for an engine to store the shards' logits.
TEST_P(DivergenceShards, OfManyColumns) {
  if (std::string("cuda") != device_.name()) return;
  for (const DivergenceKind kind : {DivergenceKind::reverse_kl, DivergenceKind::jsd}) {
    Case c = plain({500, 16, 8500}, kind);
    c.temperatures = true;
    expect_shards(build<Both>(c), {4200, 4300}, name_of(kind));
  }
}

TEST_P(DivergenceShards, WithEveryOption) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const float beta : {0.0f, 0.3f, 1.0f}) {
      Case c = plain({23, 33, 131}, kind);
      c.divergence.beta = beta;
      c.divergence.label_weight = 0.4f;
      c.divergence.teacher_softcap = 3, c.divergence.teacher_logit_scale = 0.7f;
      c.options.softcap = 4, c.options.logit_scale = 1.3f;
      c.ignored = 0.2, c.teacher_hidden = 20;
      c.bias = c.teacher_bias = c.temperatures = c.teacher_temperatures = true;
      c.token_weight = c.grad_loss = true;
      expect_shards(build<Both>(c), {40, 91}, name_of(kind) + " at " + std::to_string(beta));
    }
  }
}

TEST_P(DivergenceShards, OfLogitsAndWithoutATarget) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain({19, 33, 131}, kind);
    c.teacher_logits = c.no_target = true;
    c.logprob = false;
    expect_shards(build<Both>(c), {7, 100, 24}, name_of(kind));
  }
}

// Kept rows that no Forward of a shard wrote give NaN, and set the fault word.
TEST_P(DivergenceShards, KeptRowsOfNoForwardGiveNaN) {
  if (std::string("cuda") != device_.name()) return;
  const Case c = plain({19, 33, 131}, DivergenceKind::reverse_kl);
  for (const double garbage : {0.0, 21.0}) {
    Problem<Both> p = build<Both>(c);
    const Both shard = shard_of(p.op, 20, 60);
    const auto of_tokens = [&] { return p.pool.add(DType::f32, {19}, std::vector<double>(19, 1)); };
    const DivergenceStates states{of_tokens(), of_tokens(), of_tokens(), of_tokens()};
    Forward forward{.input = shard.input,
                    .weight = shard.weight,
                    .teacher = shard.teacher,
                    .states = states,
                    .options = shard.options,
                    .divergence = shard.divergence};
    place(forward, device_.tensors());
    Kept size;
    ASSERT_TRUE(kept_size(forward, device_.execution(), UINT64_MAX, &size).ok());
    const std::vector<double> rows(static_cast<size_t>(19 * size.rows_shape[1]), garbage);
    const Backward op{.input = shard.input,
                      .weight = shard.weight,
                      .teacher = shard.teacher,
                      .kept = p.pool.reserve(dtype_, {size.shape[0], size.shape[1]}),
                      .kept_rows = p.pool.add(DType::f32, {19, size.rows_shape[1]}, rows),
                      .kept_key = size.key,
                      .states = states,
                      .slope_mean = of_tokens(),
                      .grad_input = shard.grad_input,
                      .options = shard.options,
                      .divergence = shard.divergence,
                      .fault = p.pool.add(DType::i32, {1}, {0})};
    const Outcome got = execute(device_, op, p.pool);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    EXPECT_EQ(got.fault, 2) << garbage;
    for (const double x : got.fields.at("grad_input").value) ASSERT_TRUE(std::isnan(x));
  }
}

// If student and teacher are equal, a shard's sums are exactly 0.
TEST_P(DivergenceShards, EqualHeadsGiveExactlyZero) {
  if (!is_served()) return;
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain({9, 19, 131}, kind);
    c.equal = true;
    const Problem<Both> p = build<Both>(c);
    const Both shard = shard_of(p.op, 20, 60);
    Problem<Both> q = build<Both>(c);
    const TensorView row = q.pool.add(DType::f32, {9}, std::vector<double>(9, 3.25));
    const TensorView log_sum = q.pool.add(DType::f32, {9}, std::vector<double>(9, 1.625));
    Forward op{.input = q.op.input,
               .weight = q.op.weight,
               .teacher = q.op.teacher,
               .states = {row, log_sum, row, log_sum},
               .divergence_sum = q.op.statistics.entropy,
               .slope_sum = q.op.statistics.teacher_entropy,
               .options = shard.options,
               .divergence = shard.divergence};
    op.weight = columns_of(op.weight, 20, 60, 0);
    op.teacher.weight = columns_of(op.teacher.weight, 20, 60, 0);
    const Outcome got = execute(device_, op, q.pool);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    for (const char* name : {"divergence_sum", "slope_sum"}) {
      for (const double x : got.fields.at(name).value) ASSERT_EQ(x, 0) << name_of(kind) << name;
    }
  }
}

// A whole shard of -inf in one head or in both, or single masked columns.
TEST_P(DivergenceShards, ColumnsThatAreMasked) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const int masked : {1, 2, 3}) {
      for (const bool whole_shard : {false, true}) {
        Case c = plain({7, 19, 83}, kind);
        c.bias = c.teacher_bias = true;
        Problem<Both> p = build<Both>(c);
        const auto mask = [&](int64_t j, double x) {
          return (whole_shard ? j >= 20 && j < 40 : j % 9 == 4) ? -kInf : x;
        };
        if (masked & 1) set(p.op.bias, mask);
        if (masked & 2) set(p.op.teacher.bias, mask);
        set(p.op.target, [](int64_t i, double) { return static_cast<double>(9 * (i % 2)); });
        expect_shards(std::move(p), {20, 20, 43},
                      name_of(kind) + " masked " + std::to_string(masked));
      }
    }
  }
}

// A NaN, an infinity or a row of -inf shows on every shard, and only in its row.
TEST_P(DivergenceShards, WhatIsNotFiniteStaysInItsRow) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const bool of_teacher : {false, true}) {
      for (const double value : {std::nan(""), kInf, -kInf}) {
        Case c = plain({9, 19, 60}, kind);
        c.teacher_logits = of_teacher;
        Problem<Both> p = build<Both>(c);
        const int64_t width = of_teacher ? 60 : 19;
        set(of_teacher ? p.op.teacher.logits : p.op.input,
            [&](int64_t i, double old) { return i / width == 4 ? value : old; });
        expect_shards(std::move(p), {20, 40}, name_of(kind) + " of a row that is not finite");
      }
    }
  }
}

TEST_P(DivergenceShards, IgnoredRowsAreNotRead) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain({37, 19, 130}, kind);
    c.ignored = 0.4;
    Problem<Both> p = build<Both>(c);
    const std::vector<double> target = read(p.op.target);
    set(p.op.input, [&](int64_t i, double x) { return target[i / 19] == -100 ? kInf : x; });
    set(p.op.teacher.input, [&](int64_t i, double x) { return target[i / 19] == -100 ? kInf : x; });
    expect_shards(std::move(p), {30, 100}, name_of(kind));
  }
}

// Rows that several blocks of a GPU share, and fewer tokens than tiles of the vocabulary.
TEST_P(DivergenceShards, RowsOfManyColumns) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain({5, 16, 20011}, kind);
    c.divergence.label_weight = 0.3f;
    expect_shards(build<Both>(c), {9000, 11011}, name_of(kind));
  }
}

TEST_P(DivergenceShards, WebGPUSaysThatItHasNone) {
  if (is_served()) return;
  const Problem<Both> p = build<Both>(plain({9, 19, 60}, DivergenceKind::forward_kl));
  const Both shard = shard_of(p.op, 0, 20);
  const Forward op{.input = shard.input,
                   .weight = shard.weight,
                   .teacher = shard.teacher,
                   .states = {.row_reference = p.op.loss},
                   .options = shard.options};
  const Outcome got = execute(device_, op, p.pool);
  EXPECT_EQ(got.status.code(), StatusCode::not_supported);
  EXPECT_NE(std::string(got.status.message()).find("vocab_total"), std::string::npos)
      << got.status.message();
}

constexpr OpKind kBoth[] = {OpKind::divergence_forward_backward};
LOGITLESS_CONFORMANCE_SUITE_OF(DivergenceShards, kBoth, inputs());

}  // namespace
}  // namespace logitless::conformance
