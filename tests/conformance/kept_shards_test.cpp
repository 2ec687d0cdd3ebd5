// SPDX-License-Identifier: Apache-2.0
// Shards of the vocabulary keep state relative to the targets' logits, which the ranks exchange
// first. Gradients are within the bound for every kept share and wherever the target is.
#include <algorithm>
#include <cmath>

#include "tests/support/kept.h"
#include "tests/support/shards.h"

namespace logitless::conformance {
namespace {

const Sizes kPartitions[] = {{453}, {227, 226}, {7, 400, 46}, {64, 192, 197}};

// One shard's Forward and Backward, and its kept state.
struct Shard {
  Forward forward{};
  Backward backward{};
  Kept kept;
};

class KeptShards : public KeptState {
 protected:
  // A Forward over the whole vocabulary that also writes its state.
  static Forward forward_of(Problem<Backward>* problem) {
    const Backward& op = problem->op;
    Forward whole{.input = op.input,
                  .weight = op.weight,
                  .bias = op.bias,
                  .target = op.target,
                  .options = op.options,
                  .weights = op.weights};
    for (TensorView* view : {&whole.statistics.row_reference, &whole.statistics.row_log_sum,
                             &whole.statistics.target_logit, &whole.statistics.entropy}) {
      *view = problem->pool.reserve(DType::f32, {op.input.shape[0]});
    }
    return whole;
  }
  // Runs a Forward that writes only the target logits.
  std::vector<double> targets_of(const Problem<Backward>& problem, Forward alone) {
    alone.statistics = {.target_logit = alone.statistics.target_logit};
    const Outcome outcome = execute(device_, alone, problem.pool, {.fill = garbage});
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    if (!outcome.status.ok()) return {};
    EXPECT_TRUE(compare(expected(device_, alone, problem.model), outcome).ok());
    return outcome.fields.at("target_logit").value;
  }
  // Runs each shard's Forward twice, first for the target logits, then to keep state, and gives the
  // shards' Backwards the states of the whole vocabulary. Every shard keeps its columns, or the
  // first `columns` of them.
  std::vector<Shard> keep_shards(Problem<Backward>* problem, const Sizes& sizes, int64_t columns) {
    Backward& op = problem->op;
    const auto tokens = static_cast<size_t>(op.input.shape[0]);
    const Forward whole = forward_of(problem);
    std::vector<double> anchor(tokens, -INFINITY);
    std::vector<Shard> shards;
    std::vector<std::vector<double>> targets;
    int64_t first = 0;
    for (const int64_t size : sizes) {
      shards.push_back({shard_of(whole, first, size), shard_of(op, first, size), {}});
      first += size;
      targets.push_back(targets_of(*problem, shards.back().forward));
      if (targets.back().empty()) return {};
      for (size_t i = 0; i < tokens; ++i) anchor[i] = std::max(anchor[i], targets.back()[i]);
    }
    const TensorView anchors = problem->pool.reserve(DType::f32, {op.input.shape[0]});
    write(anchors, anchor);
    std::vector<TokenState> states(tokens);
    for (size_t s = 0; s < sizes.size(); ++s) {
      if (sizes.size() > 1) shards[s].forward.anchor = anchors;
      make_room(problem, columns, &shards[s]);
      const Outcome outcome = run_forward(*problem, &shards[s]);
      if (!outcome.status.ok()) return {};
      // The target logit has the same bits with any other outputs.
      EXPECT_EQ(outcome.fields.at("target_logit").value, targets[s]);
      add_states(outcome.fields, s == 0, &states);
      if (shards[s].kept.columns > 0 && is_relative(op.options)) expect_anchors(outcome, anchor);
    }
    give_states(op, states);
    return shards;
  }
  // Runs a shard's Forward and gives its kept state to the shard's Backward.
  Outcome run_forward(const Problem<Backward>& problem, Shard* shard) {
    Outcome outcome = execute(device_, shard->forward, problem.pool, {.fill = garbage});
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    EXPECT_TRUE(outcome.violations.empty()) << outcome.violations[0];
    if (shard->kept.columns == 0 || !outcome.status.ok()) return outcome;
    shard->backward.kept = shard->forward.kept;
    shard->backward.kept_rows = shard->forward.kept_rows;
    shard->backward.kept_key = shard->kept.key;
    write_bits(shard->backward.kept, outcome.kept.at("kept"));
    write_bits(shard->backward.kept_rows, outcome.kept.at("kept_rows"));
    return outcome;
  }
  static void add_states(const Fields& fields, bool first, std::vector<TokenState>* states) {
    for (size_t i = 0; i < states->size(); ++i) {
      const auto at = [&](const char* name) {
        return static_cast<float>(fields.at(name).value[i]);
      };
      const TokenState own{.row_reference = at("row_reference"),
                           .row_log_sum = at("row_log_sum"),
                           .target_logit = at("target_logit"),
                           .entropy = at("entropy")};
      (*states)[i] = first ? own : combine((*states)[i], own);
    }
  }
  // Whether kept state is relative to the target's logit. The CPU in f32 keeps logits instead.
  bool is_relative(const LossOptions& options) const {
    const std::string name = device_.name();
    return name == "cuda" || (name == "cpu" && dtype_ == DType::bf16 && options.softcap == 0);
  }
  // Gradients are right with any anchor near the target's logit, so they do not show whether this
  // one was used.
  static void expect_anchors(const Outcome& outcome, const std::vector<double>& anchor) {
    const std::vector<double>& rows = outcome.kept.at("kept_rows").value;
    for (size_t i = 0; i < anchor.size(); ++i) {
      if (!std::isfinite(anchor[i]) || anchor[i] == 0) continue;  // the token does not count
      EXPECT_EQ(rows[8 * i + 2], anchor[i]) << i;
    }
  }
  void make_room(Problem<Backward>* problem, int64_t columns, Shard* shard) {
    const Forward& forward = shard->forward;
    const int64_t tokens = forward.input.shape[0];
    shard->kept = kept_of(device_, forward, whole);
    if (columns > 0 && columns < forward.weight.shape[0]) {
      const auto rows = static_cast<uint64_t>(tokens) * 32;
      const int64_t blocks = shard->kept.shape[0] / ((tokens + 63) / 64 * 64);
      const uint64_t of_block = (shard->kept.bytes - rows) / static_cast<uint64_t>(blocks);
      shard->kept =
          kept_of(device_, forward, rows + of_block * static_cast<uint64_t>(columns / 64));
    }
    const Kept& kept = shard->kept;
    if (kept.columns == 0) return;
    shard->forward.kept =
        problem->pool.reserve(forward.input.dtype, {kept.shape[0], kept.shape[1]});
    shard->forward.kept_rows =
        problem->pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
  }
  // Gives Backward the states of the whole vocabulary, which are the same for every shard.
  static void give_states(const Backward& op, const std::vector<TokenState>& states) {
    std::vector<double> reference, log_sum, entropy;
    for (const TokenState& state : states) {
      reference.push_back(state.row_reference);
      log_sum.push_back(state.row_log_sum);
      entropy.push_back(state.entropy);
    }
    write(op.row_reference, reference);
    write(op.row_log_sum, log_sum);
    if (op.entropy) write(op.entropy, entropy);
  }
  // Raises the first 20 columns, which include all targets, by `distance` nats.
  static void put_targets_apart(const Backward& op, double distance) {
    std::vector<double> bias = read(op.bias), target = read(op.target);
    for (size_t j = 0; j < 20; ++j) bias[j] = distance;
    for (double& t : target) t = t < 0 || t >= 453 ? t : std::fmod(t, 20);
    write(op.bias, bias);
    write(op.target, target);
  }
  // Expects a fault, and NaN gradients of exactly the tokens that is_nan names.
  template <class IsNan>
  void expect_nan(const Problem<Backward>& problem, const Backward& op, IsNan&& is_nan) {
    const Outcome outcome = execute(device_, op, problem.pool, {.fill = garbage});
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
    EXPECT_EQ(outcome.fault, 2);
    const Field& grad = outcome.fields.at("grad_input");
    for (int64_t i = 0; i < op.input.shape[0]; ++i) {
      const double x = grad.value[static_cast<size_t>(i * op.input.shape[1])];
      ASSERT_EQ(std::isnan(x), is_nan(i)) << i;
    }
  }
  void expect_shards(const Case& c, Problem<Backward>* problem, const Sizes& sizes,
                     int64_t columns) {
    for (const Shard& shard : keep_shards(problem, sizes, columns)) {
      const Outcome outcome = execute(device_, shard.backward, problem->pool, {.fill = garbage});
      ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
      const Comparison result = compare(expected(device_, shard.backward, problem->model), outcome);
      EXPECT_TRUE(result.ok()) << describe(c) << ", the shard of " << shard.backward.weight.shape[0]
                               << " columns from " << shard.backward.options.vocab_start << "\n"
                               << result.report;
    }
  }
};

TEST_P(KeptShards, GradientsAreWithinTheBound) {
  for (const Sizes& sizes : kPartitions) {
    for (const int64_t columns : {0, 192}) {
      for (const int kind : {0, 1, 2, 3}) {
        Case c = plain(67, 453);
        c.bias = kind == 1;
        c.options.label_smoothing = kind == 1 ? 0.1f : 0.0f;
        c.options.softcap = kind == 2 ? 20.0f : 0.0f;
        c.options.z_loss = kind == 2 ? 1e-2f : 0.0f;
        c.grad_entropy = c.grad_target_logit = kind == 3;
        Problem<Backward> problem = build<Backward>(c);
        expect_shards(c, &problem, sizes, columns);
      }
    }
  }
}

// Another shard has a likely column too, so 1 - p_t within the target's shard is far less than in
// the whole vocabulary.
TEST_P(KeptShards, ATargetThatAloneInItsShardIsCertain) {
  Case c = plain(66, 453);
  c.bias = true;
  Problem<Backward> problem = build<Backward>(c);
  const Backward& op = problem.op;
  std::vector<double> bias = read(op.bias), target = read(op.target);
  bias[3] = 30, bias[300] = 28;
  for (double& t : target) t = t < 0 || t >= 453 ? t : 3;
  write(op.bias, bias);
  write(op.target, target);
  for (const Sizes& sizes : {Sizes{227, 226}, Sizes{64, 192, 197}}) {
    expect_shards(c, &problem, sizes, 0);
  }
}

// The target's logit may be far above a shard's logits, so that the shard's own exponentials are
// negligible, or far below, where the row is computed again.
TEST_P(KeptShards, AnAnchorFarAwayServes) {
  for (const double distance : {-200.0, -70.0, -40.0, 40.0, 70.0, 110.0}) {
    Case c = plain(66, 453);
    c.bias = true;
    Problem<Backward> problem = build<Backward>(c);
    const Backward& op = problem.op;
    put_targets_apart(op, distance);
    for (const Sizes& sizes : {Sizes{20, 433}, Sizes{100, 353}}) {
      expect_shards(c, &problem, sizes, 0);
    }
  }
}

// Exponentials relative to the anchor are just above f32's smallest; the statistics of the shard's
// own distribution keep their bound.
TEST_P(KeptShards, StatisticsFarBelowTheAnchorAreRight) {
  for (const double distance : {58.0, 62.0, 66.0, 70.0}) {
    Case c = plain(66, 453);
    c.bias = true;
    Problem<Backward> problem = build<Backward>(c);
    put_targets_apart(problem.op, distance);
    std::vector<Shard> shards = keep_shards(&problem, {20, 433}, 0);
    ASSERT_EQ(shards.size(), 2u);
    const Outcome outcome = run_forward(problem, &shards[1]);
    const Comparison result = compare(expected(device_, shards[1].forward, problem.model), outcome);
    EXPECT_TRUE(result.ok()) << distance << " nats\n" << result.report;
  }
}

// A view of every column is not a shard, even if vocab_total is given.
TEST_P(KeptShards, OfEveryColumnTheStateIsItsOwn) {
  if (!device_.keeps_state(dtype_) || device_.name() == std::string("webgpu")) return;
  Case c = plain(70, 453);
  c.ignored = 0;
  c.fault = true;
  Problem<Backward> problem = build<Backward>(c);
  const std::vector<Shard> shards = keep_shards(&problem, {453}, 0);
  ASSERT_EQ(shards.size(), 1u);
  if (shards[0].kept.columns == 0) return;
  const Backward& op = shards[0].backward;
  std::vector<double> log_sum = read(op.row_log_sum);
  log_sum[3] += 0.5;
  write(op.row_log_sum, log_sum);
  expect_nan(problem, op, [](int64_t i) { return i == 3; });
}

// A shard does not know the whole vocabulary's state when it keeps its own. It can check that the
// whole's lse is not below its own, and that the state was not consumed.
TEST_P(KeptShards, StateOfAnotherForwardIsNaN) {
  if (!device_.keeps_state(dtype_) || device_.name() == std::string("webgpu")) return;
  for (const bool consumed : {false, true}) {
    Case c = plain(70, 453);
    c.ignored = 0;
    c.fault = true;
    Problem<Backward> problem = build<Backward>(c);
    problem.op.grad_weight = {};
    std::vector<Shard> shards = keep_shards(&problem, {200, 253}, 0);
    for (Shard& shard : shards) {
      if (shard.kept.columns == 0) return;
      Backward op = shard.backward;
      op.consume_kept = consumed;
      if (consumed) {
        const Outcome first = execute(device_, op, problem.pool, {.fill = garbage});
        write_bits(op.kept_rows, first.kept.at("kept_rows"));
      } else {
        std::vector<double> log_sum = read(op.row_log_sum);
        log_sum[3] -= 20;
        write(op.row_log_sum, log_sum);
      }
      expect_nan(problem, op, [&](int64_t i) { return consumed || i == 3; });
      if (!consumed) return;  // the states were changed above
    }
  }
}

constexpr OpKind kKeptShardOps[] = {OpKind::linear_backward};
LOGITLESS_CONFORMANCE_SUITE_OF(KeptShards, kKeptShardOps, inputs());

}  // namespace
}  // namespace logitless::conformance
