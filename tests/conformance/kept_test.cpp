// SPDX-License-Identifier: Apache-2.0
// Forward keeps state and Backward uses it. Gradients are within the bound for every kept share, a
// second Backward gives the same, and another call's state gives NaN.
#include <algorithm>
#include <cmath>

#include "tests/support/executors.h"
#include "tests/support/kept.h"

namespace logitless::conformance {
namespace {

// Shapes, and for how many columns there is room (0: for all).
struct Share {
  Shape shape;
  int64_t columns;
};
constexpr Share kShares[] = {{{9, 19, 37}, 0}, {{70, 24, 421}, 192}, {{67, 19, 453}, 384}};
constexpr Memory kMemories[] = {Memory::recommended, Memory::minimum};

TEST_P(KeptState, ServesEveryOptionAloneAndInPairs) {
  const std::vector<Pair> pairs = feature_pairs(op_, dtype_);
  const size_t step = full() ? 1 : kSanitized || eighth() ? 24 : 3;
  for (size_t i = rotation_within() % step; i < pairs.size(); i += step) {
    Case c = case_of(op_, dtype_, pairs[i]);
    // A shard's state needs target logits, which this test does not exchange; a gradient of chosen
    // columns alone needs no state.
    if (c.options.vocab_total != 0 || c.shape.tokens == 0 || c.only_chosen) continue;
    if (is_refused(device_, c)) continue;
    c.saved_state = true;
    const Share& share = kShares[i / step % 3];
    c.shape = share.shape;
    Steps steps(device_, c, share.columns);
    const Memory memory = kMemories[i / step / 3 % 2];
    if (!keep(&steps, memory)) continue;
    steps.problem.op.consume_kept = steps.kept.columns > 0 && i / step / 6 % 2 == 1;
    expect_judged(steps, backward(steps, memory),
                  std::string(features()[pairs[i].first].name) + " + " +
                      features()[pairs[i].second].name + ", " + describe(c));
  }
}

// A column far below the target keeps almost nothing. Its gradient is still right under a large
// class weight, exactly 0 where the column is masked, and infinite where the gradient of lse is.
TEST_P(KeptState, ServesColumnsFarBelowTheTarget) {
  Case c = plain(20, 200);
  c.bias = c.vocab_weight = c.grad_entropy = c.grad_lse = true;
  c.ignored = 0;
  Steps steps(device_, c, 0);
  const auto& op = steps.problem.op;
  std::vector<double> bias = read(op.bias), target = read(op.target);
  for (size_t j = 10; j < bias.size(); ++j) bias[j] = j % 5 == 0 ? -INFINITY : j % 5 == 1 ? -60 : 0;
  bias[3] = bias[4] = 9;
  for (size_t i = 0; i < target.size(); ++i) target[i] = i == 0 ? 3 : 4;
  std::vector<double> weights(200, 1000);
  write(op.bias, bias);
  write(op.target, target);
  write(op.weights.vocab, weights);
  if (!keep(&steps)) return;
  const Outcome outcome = backward(steps);
  expect_judged(steps, outcome, describe(c));
  const std::vector<double>& grad = outcome.fields.at("grad_bias").value;
  for (size_t j = 10; j < grad.size(); j += 5) EXPECT_EQ(grad[j], 0) << j;
  std::vector<double> grad_lse(20, 0.5);
  grad_lse[2] = INFINITY;
  write(op.grad_lse, grad_lse);
  const Outcome infinite = backward(steps);
  const std::vector<double>& sums = infinite.fields.at("grad_bias").value;
  for (size_t j = 11; j < sums.size(); j += 5) EXPECT_EQ(sums[j], INFINITY) << j;
}

// What is kept has the formula's size, for every dtype and on every device.
TEST_P(KeptState, HasTheSizeOfItsFormula) {
  const Case c = plain(70, 421);
  Steps steps(device_, c, 0);
  const int64_t element = size_of(dtype_);
  const auto rows = static_cast<uint64_t>(70 * 8 * 4);
  const auto block = static_cast<uint64_t>(128 * 64 * element);
  EXPECT_EQ(steps.kept.columns, 421);
  EXPECT_EQ(steps.kept.bytes, rows + 7 * block);
  EXPECT_EQ(steps.kept.shape, (std::array<int64_t, 2>{7 * 128, 64}));
  EXPECT_EQ(steps.kept.rows_shape, (std::array<int64_t, 2>{70, 8}));
  const struct {
    uint64_t bytes;
    int64_t columns;
  } sizes[] = {{rows + 7 * block - 1, 384},
               {rows + 6 * block, 384},
               {rows + 6 * block - 1, 192},
               {rows + 3 * block, 192},
               {rows + 3 * block - 1, 0},
               {rows, 0},
               {0, 0}};
  for (const auto& [bytes, columns] : sizes) {
    EXPECT_EQ(kept_of(device_, steps.forward, bytes).columns, columns) << bytes;
  }
}

// If kept state is overwritten with NaN before Backward, gradients become NaN exactly where
// logitless_keeps says that Backward uses it.
TEST_P(KeptState, ServesWhereTheLibrarySaysSo) {
  for (const float softcap : {0.0f, 5.0f}) {
    for (const float smoothing : {0.0f, 0.1f}) {
      Case c = plain(50, 421);
      c.ignored = 0;
      c.options.softcap = softcap;
      c.options.label_smoothing = smoothing;
      c.options.z_loss = softcap / 100;
      Steps steps(device_, c, 0);
      ASSERT_TRUE(keep(&steps));
      Field nothing;
      nothing.bits.assign(steps.kept.bytes, garbage);
      write_bits(steps.problem.op.kept, nothing);
      const std::vector<double> grad = backward(steps).fields.at("grad_input").value;
      const bool used = std::any_of(grad.begin(), grad.end(), [](double x) { return x != x; });
      logitless_loss_options options = LOGITLESS_LOSS_OPTIONS_INIT;
      options.softcap = softcap;
      options.label_smoothing = smoothing;
      options.z_loss = c.options.z_loss;
      const auto type = static_cast<int32_t>(device_.execution().device.type);
      EXPECT_EQ(logitless_keeps(type, static_cast<int32_t>(dtype_), &options), used) << describe(c);
    }
  }
}

// A Backward that runs in parts has the bits of one that does not: grad_input after the first part,
// everything after the third. That holds for kept state of all columns and of some, for none, and
// where a tile of grad_weight is cut in slices.
TEST_P(KeptState, ServesABackwardInParts) {
  const Share shares[] = {{{70, 24, 421}, 0}, {{70, 24, 421}, 192}, {{300, 208, 12001}, 0}};
  for (const Share& share : shares) {
    if (share.shape.vocab > 1000 && device_.execution().device.type != DeviceType::cuda) continue;
    for (const bool options : {false, true}) {
      Case c = plain(share.shape.tokens, share.shape.vocab);
      c.shape = share.shape;
      c.bias = c.wants_grad_bias = options;
      c.options.label_smoothing = options ? 0.1f : 0.0f;
      Steps steps(device_, c, share.columns);
      ASSERT_TRUE(keep(&steps));
      const Outcome whole = backward(steps);
      expect_judged(steps, whole, describe(c));
      steps.problem.op.grad_input_first = true;
      EXPECT_EQ(differing_bits(whole.fields, backward(steps).fields), "") << describe(c);
      const auto in_parts = [&](int parts) {
        return execute(device_, steps.problem.op, steps.problem.pool,
                       {.fill = garbage, .by = By::parts, .parts = parts});
      };
      const Outcome first = in_parts(1), all = in_parts(3);
      ASSERT_TRUE(first.status.ok() && all.status.ok()) << all.status.message();
      EXPECT_EQ(first.fields.at("grad_input").bits, whole.fields.at("grad_input").bits)
          << describe(c);
      EXPECT_EQ(differing_bits(whole.fields, all.fields), "") << describe(c);
      EXPECT_TRUE(all.violations.empty());
    }
  }
}

// Kept state for losses without reduction and an upstream gradient per token, with every kind of
// row: usual ones and ones beyond the exponent's range, with and without bias.
TEST_P(KeptState, ServesRowsNearAndFar) {
  for (const Data data : {Data::normal, Data::peaked, Data::constant, Data::large}) {
    for (const int64_t columns : {0, 192}) {
      Case c = plain(130, 600);
      c.data = data;
      c.bias = data == Data::peaked;
      c.bias_dtype = dtype_;
      Steps steps(device_, c, columns);
      ASSERT_TRUE(keep(&steps));
      expect_judged(steps, backward(steps), describe(c));
    }
  }
}

// One column is far above every target, within and beyond the range of exponentials.
TEST_P(KeptState, ServesTargetsFarBelowTheMaximum) {
  for (const double nats : {12, 30, 33, 37, 50, 75, 100, 300}) {
    Case c = plain(66, 600);
    c.bias = c.grad_entropy = true;
    c.bias_dtype = dtype_;
    Steps steps(device_, c, 0);
    Backward& op = steps.problem.op;
    std::vector<double> bias = read(op.bias);
    bias[17] = nats;
    write(op.bias, bias);
    ASSERT_TRUE(keep(&steps));
    expect_judged(steps, backward(steps), std::to_string(nats));
  }
}

// Gradients of target_logit 8 to 35 orders of magnitude above those of lse put the probabilities'
// factors, relative to the call's largest, on both sides of 2^-96.
TEST_P(KeptState, ServesOneHotPartsOfAnotherOrder) {
  for (const int64_t columns : {0, 192}) {
    Case c = plain(130, 600);
    c.grad_loss = c.grad_lse = c.grad_target_logit = true;
    Steps steps(device_, c, columns);
    Backward& op = steps.problem.op;
    std::vector<double> grad_lse(130);
    for (size_t i = 0; i < grad_lse.size(); ++i) {
      grad_lse[i] = std::pow(10, 4 - 3 * static_cast<double>(i % 10));
    }
    write(op.grad_loss, std::vector<double>(130, 0));
    write(op.grad_lse, grad_lse);
    write(op.grad_target_logit, std::vector<double>(130, 1e12));
    ASSERT_TRUE(keep(&steps));
    expect_judged(steps, backward(steps), std::to_string(columns));
  }
}

// A row of NaN or infinities among ordinary rows, and a masked column that is the target of a row.
TEST_P(KeptState, ServesRowsThatAreNotFinite) {
  for (const int64_t columns : {0, 192}) {
    for (const bool weight : {true, false}) {
      Case c = plain(130, 600);
      c.ignored = 0;
      c.bias = c.grad_entropy = true;
      c.bias_dtype = dtype_;
      Steps steps(device_, c, columns);
      Backward& op = steps.problem.op;
      std::vector<double> input = read(op.input), bias = read(op.bias);
      input[static_cast<size_t>(3 * c.shape.hidden)] = NAN;
      input[static_cast<size_t>(7 * c.shape.hidden)] = INFINITY;
      bias[static_cast<size_t>(read_integers(op.target)[70])] = -INFINITY;
      write(op.input, input);
      write(op.bias, bias);
      if (!weight) op.grad_weight = op.grad_bias = {};
      ASSERT_TRUE(keep(&steps));
      expect_judged(steps, backward(steps), std::to_string(columns));
    }
  }
}

// Several chunks of tokens in the least memory, one in the recommended; both keep the same state.
TEST_P(KeptState, IsKeptInChunksOfTokens) {
  Case c = plain(1100, 453);
  c.shape.hidden = 24;
  for (const bool options : {false, true}) {
    c.options.logit_scale = options ? 0.5f : 1;
    c.bias = options;
    c.bias_dtype = dtype_;
    Steps steps(device_, c, 0);
    if (steps.kept.columns == 0) return;
    ASSERT_TRUE(keep(&steps, Memory::minimum));
    const Outcome few = backward(steps);
    expect_judged(steps, few, "kept in the least memory");
    ASSERT_TRUE(keep(&steps));
    EXPECT_EQ(differing_bits(few.fields, backward(steps).fields), "");
  }
}

// Only entropy has a gradient, because there the exponentials' rounding is most of the error: on
// uniform rows, rows of two peaks, and rows of one peak.
TEST_P(KeptState, ServesEntropysGradient) {
  for (const int peaks : {0, 1, 2}) {
    for (const bool consumes : {false, true}) {
      Case c = plain(66, 453);
      c.grad_entropy = true;
      Steps steps(device_, c, 0);
      Backward& op = steps.problem.op;
      std::vector<double> input = read(op.input), weight = read(op.weight);
      for (double& x : input) x = peaks == 0 ? x / 64 : x;
      const int64_t hidden = c.shape.hidden;
      for (int peak = 0; peak < peaks; ++peak) {
        for (int64_t d = 0; d < hidden; ++d)
          weight[(17 + 100 * peak) * hidden + d] = d == 0 ? 9 : 0;
      }
      for (int64_t i = 0; peaks > 0 && i < c.shape.tokens; ++i) input[i * hidden] = 1.5;
      write(op.input, input);
      write(op.weight, weight);
      write(op.grad_loss, std::vector<double>(static_cast<size_t>(c.shape.tokens), 0));
      ASSERT_TRUE(keep(&steps));
      op.consume_kept = consumes && steps.kept.columns > 0;
      expect_judged(steps, backward(steps), std::to_string(peaks) + " peaks");
    }
  }
}

// The gradient of log p of an almost certain column is 1 - p. It is accurate only if both parts are
// added before dz is rounded.
TEST_P(KeptState, ServesALikelyChosenColumn) {
  if (device_.synchronous() && dtype_ != DType::f32) return;  // the CPU keeps e^z in 16 bits
  constexpr int64_t likely = 17;
  for (const bool capped : {false, true}) {
    Case c = plain(66, 453);
    c.ignored = 0;
    c.grad_lse = true;
    c.chosen = 2;
    c.options.softcap = capped ? 64 : 0;
    Steps steps(device_, c, 0);
    Backward& op = steps.problem.op;
    const int64_t hidden = c.shape.hidden, n = c.shape.tokens;
    std::vector<double> input = read(op.input), weight = read(op.weight);
    std::vector<double> ids, gradients;
    for (int64_t d = 0; d < hidden; ++d) weight[likely * hidden + d] = d == 0 ? 9 : 0;
    for (int64_t i = 0; i < n; ++i) {
      input[i * hidden] = 1.5;
      ids.insert(ids.end(), {likely, -1});
      gradients.insert(gradients.end(), {1, 5});
    }
    write(op.input, input);
    write(op.weight, weight);
    write(op.ids, ids);
    write(op.grad_logits_at, gradients);
    write(op.grad_lse, std::vector<double>(static_cast<size_t>(n), -1));
    write(op.grad_loss, std::vector<double>(static_cast<size_t>(n), 0));
    ASSERT_TRUE(keep(&steps));
    const Outcome made = backward(steps);
    expect_judged(steps, made, "a likely column");
    const reference::Result wanted = expected(device_, op, steps.problem.model);
    const auto& want = wanted.outputs.at("grad_input").value;
    const auto& got = made.fields.at("grad_input").value;
    for (int64_t i = 0; i < n; ++i) {
      const double of_row = want[static_cast<size_t>(i * hidden)];
      EXPECT_NEAR(got[static_cast<size_t>(i * hidden)], of_row, std::fabs(of_row) / 32)
          << "token " << i << (capped ? ", under a softcap" : "");
    }
  }
}

// Forward and Backward have the bits of one ForwardBackward if both divide the work alike (here
// into one piece): for a sum, and for upstream gradients that are powers of two.
TEST_P(KeptState, HasTheBitsOfOneCall) {
  if (!device_.keeps_state(dtype_)) return;
  // In 16 bits the CPU keeps rounded exponentials, where ForwardBackward has logits in f32.
  if (std::string(device_.name()) == "cpu" && dtype_ != DType::f32) return;
  for (const bool each : {false, true}) {
    Case c = plain(66, 453);
    c.grad_input = c.grad_weight = dtype_;
    c.options.reduction = each ? Reduction::none : Reduction::sum;
    Steps steps(device_, c, 0);
    Backward& op = steps.problem.op;
    if (each) {
      std::vector<double> upstream = read(op.grad_loss);
      for (size_t i = 0; i < upstream.size(); ++i) {
        upstream[i] = std::ldexp(i % 3 == 0 ? -1.0 : 1.0, static_cast<int>(i % 5) - 2);
      }
      write(op.grad_loss, upstream);
    }
    ASSERT_TRUE(keep(&steps));
    const Outcome later = backward(steps);
    ASSERT_TRUE(later.status.ok()) << later.status.message();
    const LinearCrossEntropyForwardBackward both{.input = op.input,
                                                 .weight = op.weight,
                                                 .target = op.target,
                                                 .grad_loss = op.grad_loss,
                                                 .grad_input = op.grad_input,
                                                 .grad_weight = op.grad_weight,
                                                 .options = op.options};
    const Outcome at_once = execute(device_, both, steps.problem.pool, {Memory::exact, 64 << 20});
    ASSERT_TRUE(at_once.status.ok()) << at_once.status.message();
    EXPECT_EQ(differing_bits(at_once.fields, later.fields), "") << describe(c);
  }
}

// A Backward with upstream gradients of zero, tiny, infinite or NaN leaves kept state that serves
// the next Backward like fresh state.
TEST_P(KeptState, IsUsedTwice) {
  for (const int64_t columns : {0, 192}) {
    Case c = plain(130, 600);
    c.data = Data::peaked;
    c.grad_lse = true;
    Steps steps(device_, c, columns);
    if (steps.kept.columns == 0) return;
    ASSERT_TRUE(keep(&steps));
    Backward& op = steps.problem.op;
    const std::vector<double> usual = read(op.grad_loss), lse = read(op.grad_lse);
    const Outcome fresh = backward(steps);
    std::vector<double> odd = usual, odd_lse = lse;
    for (size_t i = 0; i < odd.size(); ++i) {
      const double kinds[] = {0, 1e-38, INFINITY, usual[i], NAN};
      odd[i] = kinds[i % 5];
      odd_lse[i] = i % 3 == 0 ? 0 : 1e-30;
    }
    write(op.grad_loss, odd);
    write(op.grad_lse, odd_lse);
    const Outcome first = backward(steps);
    ASSERT_TRUE(first.status.ok()) << first.status.message();
    steps.take_kept(first);
    write(op.grad_loss, usual);
    write(op.grad_lse, lse);
    const Outcome second = backward(steps);
    expect_judged(steps, second, "used twice");
    // A row that one Backward recomputed is recomputed by all later ones; others keep their bits.
    const Outcome third = [&] {
      steps.take_kept(second);
      return backward(steps);
    }();
    EXPECT_EQ(differing_bits(second.fields, third.fields), "");
    EXPECT_EQ(fresh.fields.size(), second.fields.size());
  }
}

// One kept state serves several Backwards in any order: with entropy's gradient, which is computed
// from the kept values; with gradients that multiply them; and with target_logit's alone, where
// other columns have no gradient.
TEST_P(KeptState, ServesOneKindOfGradientAfterAnother) {
  for (const int64_t columns : {0, 192}) {
    Case c = plain(70, 421);
    c.grad_entropy = c.grad_target_logit = true;
    Steps steps(device_, c, columns);
    if (steps.kept.columns == 0) return;
    ASSERT_TRUE(keep(&steps));
    Backward& op = steps.problem.op;
    const TensorView entropy = op.entropy, grad_entropy = op.grad_entropy;
    const std::vector<double> upstream = read(op.grad_loss);
    for (const int kind : {0, 1, 0, 2, 1, 0}) {
      op.entropy = kind == 0 ? entropy : TensorView{};
      op.grad_entropy = kind == 0 ? grad_entropy : TensorView{};
      write(op.grad_loss, kind == 2 ? std::vector<double>(upstream.size(), 0) : upstream);
      const Outcome outcome = backward(steps);
      expect_judged(steps, outcome, "kind " + std::to_string(kind));
      ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
      steps.take_kept(outcome);
    }
  }
}

// A NaN among the upstream gradients makes its row NaN, even if all others are 0.
TEST_P(KeptState, ANaNThatArrivesIsNotLost) {
  for (const bool of_target : {false, true}) {
    Case c = plain(70, 421);
    c.ignored = 0;
    c.data = Data::peaked;
    c.grad_target_logit = of_target;
    c.grad_lse = !of_target;
    Steps steps(device_, c, 0);
    if (steps.kept.columns == 0) return;
    ASSERT_TRUE(keep(&steps));
    Backward& op = steps.problem.op;
    write(op.grad_loss, std::vector<double>(static_cast<size_t>(c.shape.tokens), 0));
    const TensorView& late = of_target ? op.grad_target_logit : op.grad_lse;
    std::vector<double> upstream = read(late);
    upstream[5] = upstream[64] = NAN;
    write(late, upstream);
    op.grad_weight = {};
    const Outcome outcome = backward(steps);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
    const Field& grad = outcome.fields.at("grad_input");
    for (int64_t i = 0; i < c.shape.tokens; ++i) {
      const double x = grad.value[static_cast<size_t>(i * c.shape.hidden)];
      ASSERT_EQ(std::isnan(x), i == 5 || i == 64) << i;
    }
  }
}

// A row whose given state is not the kept one gets NaN gradients, and the fault word is set.
TEST_P(KeptState, OfAnotherForwardIsNaN) {
  for (const int64_t columns : {0, 192}) {
    Case c = plain(70, 421);
    c.ignored = 0;
    c.fault = true;
    Steps steps(device_, c, columns);
    if (steps.kept.columns == 0 || !device_.keeps_state(dtype_)) return;
    ASSERT_TRUE(keep(&steps));
    Backward& op = steps.problem.op;
    op.grad_weight = {};
    std::vector<double> log_sum = read(op.row_log_sum), reference = read(op.row_reference);
    log_sum[3] += 0.5;
    reference[64] -= 0.5;
    write(op.row_log_sum, log_sum);
    write(op.row_reference, reference);
    const Outcome outcome = backward(steps);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
    const Field& grad = outcome.fields.at("grad_input");
    for (int64_t i = 0; i < c.shape.tokens; ++i) {
      for (int64_t d = 0; d < c.shape.hidden; ++d) {
        const double x = grad.value[static_cast<size_t>(i * c.shape.hidden + d)];
        ASSERT_EQ(std::isnan(x), i == 3 || i == 64) << i << " " << d;
      }
    }
    EXPECT_EQ(outcome.fault, 2);
  }
}

// A Backward that consumes the state marks it so, and a second one fails.
TEST_P(KeptState, OnceConsumedIsAnError) {
  Case c = plain(70, 421);
  c.ignored = 0;
  c.fault = true;
  Steps steps(device_, c, 0);
  if (steps.kept.columns == 0 || !device_.keeps_state(dtype_)) return;
  ASSERT_TRUE(keep(&steps));
  steps.problem.op.consume_kept = true;
  const Outcome first = backward(steps);
  expect_judged(steps, first, "consumed");
  steps.take_kept(first);
  const Outcome second = backward(steps);
  EXPECT_EQ(second.fault, 2);
  for (const double x : second.fields.at("grad_input").value) ASSERT_TRUE(std::isnan(x));
}

// Keeping state changes no bit of the loss and the statistics.
TEST_P(KeptState, LeavesLossAndStatisticsAlone) {
  for (const Share& share : kShares) {
    for (const float softcap : {0.0f, 20.0f}) {
      Case c = plain(0, 0);
      c.shape = share.shape;
      c.bias = true;
      c.options.softcap = softcap;
      c.options.label_smoothing = 0.1f;
      Steps steps(device_, c, share.columns);
      if (steps.kept.columns == 0 || !device_.keeps_state(dtype_)) return;
      Forward keeping = steps.forward;
      const auto of_tokens = [&] {
        return steps.problem.pool.reserve(DType::f32, {c.shape.tokens});
      };
      keeping.loss = of_tokens();
      for (TensorView* view : {&keeping.statistics.lse, &keeping.statistics.target_logit,
                               &keeping.statistics.weighted_logit_sum}) {
        *view = of_tokens();
      }
      Forward alone = keeping;
      alone.kept = alone.kept_rows = {};
      for (const Memory memory : kMemories) {
        const Outcome with = execute(device_, keeping, steps.problem.pool, {memory});
        const Outcome without = execute(device_, alone, steps.problem.pool, {memory});
        ASSERT_TRUE(with.status.ok()) << with.status.message();
        EXPECT_EQ(differing_bits(with.fields, without.fields), "") << describe(c);
      }
    }
  }
}

// In f32 the CPU keeps the logits themselves, so gradients have the bits of ForwardBackward, in one
// chunk and in several.
TEST_P(KeptState, OfTheCpuHasTheBitsOfForwardBackward) {
  if (!device_.has_threads() || dtype_ != DType::f32) return;
  for (const Reduction reduction : {Reduction::sum, Reduction::mean, Reduction::none}) {
    for (const int64_t tokens : {70, 1100}) {
      Case c = plain(tokens, 421);
      c.options.reduction = reduction;
      c.bias = true;
      Steps steps(device_, c, 0);
      Backward& op = steps.problem.op;
      std::vector<double> upstream = read(op.grad_loss);
      for (size_t i = 0; reduction == Reduction::none && i < upstream.size(); ++i) {
        upstream[i] = std::ldexp(i % 3 == 0 ? -1 : 1, static_cast<int>(i % 5));
      }
      write(op.grad_loss, upstream);
      LinearCrossEntropyForwardBackward fused{.input = op.input,
                                              .weight = op.weight,
                                              .bias = op.bias,
                                              .target = op.target,
                                              .grad_loss = op.grad_loss,
                                              .grad_input = op.grad_input,
                                              .grad_weight = op.grad_weight,
                                              .grad_bias = op.grad_bias,
                                              .options = op.options,
                                              .weights = op.weights};
      ASSERT_TRUE(keep(&steps));
      const Outcome later = backward(steps);
      const Outcome at_once = execute(device_, fused, steps.problem.pool);
      ASSERT_TRUE(at_once.status.ok()) << at_once.status.message();
      EXPECT_EQ(differing_bits(later.fields, at_once.fields), "") << describe(c);
      EXPECT_EQ(later.fields.size(), 3u);
    }
  }
}

// Neither the kept state nor the gradients depend on the number of threads.
TEST_P(KeptState, OfTheCpuIsTheSameOnAnyThreads) {
  if (!device_.has_threads()) return;
  for (const Share& share : kShares) {
    for (const Memory memory : kMemories) {
      Case c = plain(0, 0);
      c.shape = share.shape;
      c.grad_entropy = true;
      Steps steps(device_, c, share.columns);
      Outcome kept, gradients;
      for (const int threads : {1, 3, 8}) {
        const SerialExecutor executor(threads, threads == 3);
        const RunPlan plan{.memory = memory, .executor = executor.get()};
        const Outcome forward = execute(device_, steps.forward, steps.problem.pool, plan);
        ASSERT_TRUE(forward.status.ok()) << forward.status.message();
        steps.hand_over(forward);
        const Outcome backward = execute(device_, steps.problem.op, steps.problem.pool, plan);
        if (threads == 1) kept = forward, gradients = backward;
        EXPECT_EQ(differing_bits(kept.kept, forward.kept), "");
        EXPECT_EQ(differing_bits(gradients.fields, backward.fields), "") << threads;
      }
    }
  }
}

// A Backward uses its minimum workspace up to the last KiB.
TEST_P(KeptState, TakesTheBytesAskedFor) {
  if (!device_.has_threads()) return;
  for (const int64_t columns : {0, 192}) {
    Case c = plain(130, 600);
    c.ignored = 0;
    Steps steps(device_, c, columns);
    ASSERT_TRUE(keep(&steps));
    const Outcome outcome = backward(steps, Memory::minimum);
    EXPECT_LE(outcome.given - outcome.touched, 1024u) << outcome.given;
  }
}

TEST_P(KeptState, OnEveryInstructionSet) {
  const std::vector<std::string> sets = device_.instruction_sets();
  for (size_t i = 0; i < sets.size(); ++i) {
    ASSERT_TRUE(device_.force_instruction_set(sets[i])) << sets[i];
    for (const Share& share : kShares) {
      Case c = plain(0, 0);
      c.shape = share.shape;
      c.bias = true;
      c.grad_entropy = i % 2 == 0;
      c.options.label_smoothing = i % 3 == 0 ? 0.1f : 0.0f;
      Steps steps(device_, c, share.columns);
      steps.forward.statistics.target_logit =
          steps.problem.pool.reserve(DType::f32, {c.shape.tokens});
      const Outcome forward = execute(device_, steps.forward, steps.problem.pool);
      ASSERT_TRUE(forward.status.ok()) << forward.status.message();
      steps.hand_over(forward);
      expect_judged(steps, backward(steps), sets[i] + ", " + describe(c));
      // kept_rows holds the target's logit, to which the exponentials are relative.
      const std::vector<int64_t> target = read_integers(steps.problem.op.target);
      for (size_t n = 0; steps.kept.columns > 0 && n < target.size(); ++n) {
        if (target[n] < 0 || target[n] >= c.shape.vocab) continue;
        EXPECT_EQ(forward.kept.at("kept_rows").value[n * 8 + 2],
                  forward.fields.at("target_logit").value[n])
            << sets[i] << " " << n;
      }
    }
  }
  device_.force_instruction_set("");
}

constexpr OpKind kKeptOps[] = {OpKind::linear_backward};
LOGITLESS_CONFORMANCE_SUITE_OF(KeptState, kKeptOps, inputs());

}  // namespace
}  // namespace logitless::conformance
