// SPDX-License-Identifier: Apache-2.0
// Infinite, NaN, huge and tiny values in one row affect no other row, and a finite loss stays
// finite.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>

#include "tests/support/nonfinite.h"

namespace logitless::conformance {
namespace {

// Sets the logits of columns j >= begin to value_of(j): in row kRow, or, for a linear op, in every
// row through the bias.
template <class Op, class F>
void write_columns(const Op& op, int64_t begin, const F& value_of) {
  const TensorView& view = masked_by(op);
  std::vector<double> values = read(view);
  const int64_t first = LinearOp<Op> ? 0 : kRow * kVocab;
  for (int64_t j = begin; j < kVocab; ++j) values[first + j] = value_of(j);
  write(view, values);
}

// One logit of a row, or one element of its input, is infinite or NaN.
TEST_P(NonFinite, StaysInItsRow) {
  for_settings(plain(), [&](const Case& c, const char* name) {
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      Problem<Op> p = build<Op>(c);
      const Fields before = judged(p, name);
      for (const double value : {kInf, -kInf, std::nan("")}) {
        // Columns 5 and 65 have class weight 0.
        for (const int64_t column : {int64_t{-1}, int64_t{4}, int64_t{5}, int64_t{65}}) {
          const std::string what =
              std::string(name) + ", " + std::to_string(value) + " at " + std::to_string(column);
          TensorView view;
          int64_t index = 0;
          if constexpr (LinearOp<Op>) {
            view = p.op.input;
            index = kRow * kHidden + (column + 1) % kHidden;
          } else {
            view = p.op.logits;
            index = kRow * kVocab + column;
            if constexpr (LossOp<Op>) {
              if (column < 0) index = kRow * kVocab + static_cast<int64_t>(read(p.op.target)[kRow]);
            }
            if (column < 0 && !LossOp<Op>) continue;
          }
          const double old = read(view)[index];
          set(view, index, value);
          expect_other_rows(before, judged(p, what), kRow, what);
          set(view, index, old);
        }
      }
    });
  });
}

// The bias or the weight of a column is infinite or NaN, and so is every row's logit there.
TEST_P(NonFinite, InAColumn) {
  if (!is_linear(op_)) return;
  for_settings(plain(), [&](const Case& c, const char* name) {
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (LinearOp<Op>) {
        for (const double value : {kInf, -kInf, std::nan("")}) {
          for (const int64_t column : {int64_t{4}, int64_t{5}, kVocab - 1}) {
            Problem<Op> p = build<Op>(c);
            if (c.bias) {
              set(p.op.bias, column, value);
              judged(p, std::string(name) + ", bias");
              p = build<Op>(c);
            }
            set(p.op.weight, column * kHidden + 3, value);
            judged(p, std::string(name) + ", weight");
          }
        }
      }
    });
  });
}

// A row of NaN, and columns of -inf far from every target, in a vocabulary of many tiles: Hopper's
// kernels do not test for such values and see them only in their sums.
TEST_P(NonFinite, FarFromTheTargets) {
  if (!is_linear(op_)) return;
  constexpr int64_t tokens = 64, vocab = 700, row = 35;
  for (const bool caps : {false, true}) {
    for (const bool biased : {false, true}) {
      Case c = plain();
      c.shape = {tokens, 64, vocab};
      c.vocab_weight = true, c.options.label_smoothing = 0.1f;
      if (caps) c.options.softcap = 20;
      if (!biased) c.bias = c.statistics = false;
      const std::string what = c.options.softcap > 0 ? "softcap" : "no softcap";
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        if constexpr (LinearOp<Op>) {
          Problem<Op> p = build<Op>(c);
          std::vector<double> targets(tokens);
          for (int64_t i = 0; i < tokens; ++i) targets[i] = static_cast<double>(600 + i);
          write(p.op.target, targets);
          const Fields before = judged(p, what);
          const double old = read(p.op.input)[row * 64];
          set(p.op.input, row * 64, std::nan(""));
          expect_other_rows(before, judged(p, what + ", a row"), row, what, tokens);
          set(p.op.input, row * 64, old);
          // Column 197 has class weight 0.
          for (const int64_t column : {int64_t{197}, int64_t{200}}) {
            if (!biased) continue;
            set(p.op.bias, column, -kInf);
            judged(p, what + ", column " + std::to_string(column));
          }
        }
      });
    }
  }
}

// The tanh of an infinite logit is exactly 1 or -1, however small the scale before it. Replacing
// infinity by the largest finite number would fail here.
TEST_P(NonFinite, ASoftcapHoldsInfiniteLogitsUnderAnyScale) {
  struct Map {
    float scale, softcap, temperature;
  };
  for (const Map& map :
       {Map{1e-37f, 10, 1}, Map{-1e-37f, 10, 2}, Map{-3e-38f, 1, 0.5f}, Map{1, 10, 1}}) {
    for (const double value : {kInf, -kInf}) {
      Case c = plain();
      c.options.logit_scale = map.scale;
      c.options.softcap = map.softcap;
      c.options.temperature = map.temperature;
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        if constexpr (LossOp<Op>) {
          Problem<Op> p = build<Op>(c);
          const auto target = static_cast<int64_t>(read(p.op.target)[kRow]);
          const int64_t first = LinearOp<Op> ? 0 : kRow * kVocab;
          set(masked_by(p.op), first + target, value);
          set(masked_by(p.op), first + (target + 7) % kVocab, -value);
          const std::string what =
              "scale " + std::to_string(map.scale / 1e-38f) + "e-38, " + std::to_string(value);
          const Fields fields = judged(p, what);
          if (!fields.contains("target_logit")) return;
          const double size = map.softcap / map.temperature;
          EXPECT_EQ(fields.at("target_logit").value[kRow], std::copysign(size, value * map.scale))
              << what;
        }
      });
    }
  }
}

// Near 1 the slope of tanh is a small difference, so every rounding counts. These softcaps and
// temperatures have quotients whose rounding errors add up.
TEST_P(NonFinite, ASoftcapsSlopeBesideItsEnd) {
  struct Map {
    float softcap, temperature;
  };
  for (const Map& map : {Map{50, 3.79f}, Map{50, 1.57f}, Map{0.1f, 1}, Map{0.3f, 0.7f}}) {
    Case c = plain();
    c.options.softcap = map.softcap;
    c.options.temperature = map.temperature;
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      Problem<Op> p = build<Op>(c);
      // tanh 3 is 1 - 0.005, tanh 11 rounds to 1.
      write_columns(p.op, 0, [&](int64_t j) {
        const double size = j % 7 == 0 ? kInf : (3 + 8.0 * j / kVocab) * map.softcap;
        return j % 2 == 0 ? size : -size;
      });
      judged(p, "softcap " + std::to_string(map.softcap));
    });
  }
}

// A row of logits masked to -inf, except in a few columns or in none.
TEST_P(NonFinite, RowsOfMinusInfinity) {
  for_settings(plain(), [&](const Case& c, const char* name) {
    if (is_linear(op_) && !c.bias) return;  // only a bias can mask a linear op's logits
    for (const int64_t kept : {0, 1, 3}) {
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        Problem<Op> p = build<Op>(c);
        const Fields before = judged(p, name);
        write_columns(p.op, kept, [](int64_t) { return -kInf; });
        const std::string what = std::string(name) + ", " + std::to_string(kept) + " columns left";
        const Fields after = judged(p, what);
        if (!LinearOp<Op>) expect_other_rows(before, after, kRow, what);
        if (kept > 0 || !after.contains("loss")) return;
        const double loss = after.at("loss").value[kRow];
        // A softcap maps -inf to -softcap, so nothing is masked; a scale of 0 makes NaN.
        if (c.options.softcap > 0 && c.options.logit_scale != 0) {
          EXPECT_TRUE(std::isfinite(loss)) << what;
        } else {
          EXPECT_TRUE(std::isnan(loss)) << what;
        }
      });
    }
  });
}

// The lowest finite number, which many programs use as a mask, is a logit like any other: in every
// column of a row, or in all but a few.
TEST_P(NonFinite, RowsOfTheLowestNumber) {
  const double lowest = -round_to(dtype_, std::nextafter(overflow_threshold(dtype_), 0));
  for (const int64_t kept : {0, 1, 3}) {
    const Case c = plain();
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      Problem<Op> p = build<Op>(c);
      write_columns(p.op, kept, [&](int64_t) { return lowest; });
      const Fields after = judged(p, std::to_string(kept) + " columns left");
      // The contract's bounds grow with |z|; equal logits have closed-form results. Except in f16,
      // such a bias absorbs the whole dot product, so that linear ops too have equal logits.
      if (kept > 0 || (LinearOp<Op> && dtype_ == DType::f16)) return;
      for (const char* name : {"loss", "entropy", "row_log_sum"}) {
        if (!after.contains(name)) continue;
        EXPECT_NEAR(after.at(name).value[kRow], std::log(kVocab), 1e-4) << name;
      }
      for (const char* name : {"probabilities", "grad_logits"}) {
        if (!after.contains(name)) continue;
        const double* row = &after.at(name).value[kRow * kVocab];
        const double wanted = std::string("probabilities") == name ? 1 : 0;
        EXPECT_NEAR(std::accumulate(row, row + kVocab, 0.0), wanted, 1e-3) << name;
      }
    });
  }
}

TEST_P(NonFinite, MinusInfinityUnderSmoothingIsAnInfiniteLoss) {
  if (op_ != OpKind::forward) return;
  Case c = plain();
  c.options.label_smoothing = 0.1f;
  Problem<CrossEntropyForward> p = build<CrossEntropyForward>(c);
  set(p.op.logits, kRow * kVocab + 7, -kInf);
  const Fields fields = judged(p, "smoothing");
  EXPECT_EQ(fields.at("loss").value[kRow], kInf);
  EXPECT_TRUE(std::isfinite(fields.at("entropy").value[kRow]));
}

// |z| goes up to 1e30 and down to subnormals.
TEST_P(NonFinite, HugeAndTiny) {
  for (const double scale : {1e30, 1e20, 1e4, 1e-20, 1e-38, 1e-41}) {
    if (dtype_ == DType::f16 && (scale > 1e4 || scale < 1e-8)) continue;
    // WGSL lets an implementation flush subnormals to 0.
    if (std::string(device_.name()) == "webgpu" && scale < 1e-37) continue;
    for (const auto& [shifted, alone] :
         std::array<std::pair<bool, bool>, 3>{{{false, false}, {true, false}, {false, true}}}) {
      Case c = plain();
      c.bias = false;
      if (alone) only(c);
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        Problem<Op> p = build<Op>(c);
        const TensorView& view = [&]() -> const TensorView& {
          if constexpr (LinearOp<Op>) {
            return p.op.input;
          } else {
            return p.op.logits;
          }
        }();
        std::vector<double> values = read(view);
        for (double& x : values) x = shifted && !LinearOp<Op> ? scale + x : scale * x / 10;
        write(view, values);
        judged(p, "scale " + std::to_string(scale));
      });
    }
  }
}

// Makes column 0 every row's target, with a logit of -distances[i].
template <class Op>
void set_targets_below(Op* op, std::span<const double> distances) {
  std::vector<double> input = read(op->input), matrix = read(op->weight);
  const auto hidden = op->input.shape[1];
  for (size_t i = 0; i < distances.size(); ++i) input[i * hidden + hidden - 1] = -distances[i];
  for (int64_t j = 0; j < op->weight.shape[0]; ++j) {
    for (int64_t d = 0; d < hidden; ++d) {
      double& w = matrix[j * hidden + d];
      if (d == hidden - 1) w = j == 0 ? 1 : 0;
      if (d != hidden - 1 && j == 0) w = 0;
    }
  }
  write(op->input, input);
  write(op->weight, matrix);
  write(op->target, std::vector<double>(distances.size(), 0));
}

// The target's logit is far below the others, under tiny to huge token weights: neither a
// probability's exponent nor its factor may overflow or underflow.
TEST_P(NonFinite, FarTargetsUnderAnyWeight) {
  if (!is_linear(op_)) return;
  constexpr double kDistances[] = {0, 20, 40, 55, 62, 80, 100};
  constexpr int64_t kRows = std::size(kDistances);
  for (const double weight : {1e-22, 1e-12, 1.0, 1e12}) {
    for (const bool statistics : {false, true}) {
      Case c{.op = op_, .shape = {kRows, kHidden, kVocab}, .dtype = dtype_};
      c.options.reduction = Reduction::none;
      c.token_weight = true;
      c.grad_loss = c.grad_lse = c.grad_target_logit = statistics;
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        if constexpr (LinearOp<Op>) {
          Problem<Op> p = build<Op>(c);
          set_targets_below(&p.op, kDistances);
          write(p.op.weights.token, std::vector<double>(kRows, weight));
          if constexpr (BackwardOnlyOp<Op>) {
            if (statistics) {  // makes P and the one-hot factor differ by orders of magnitude
              write(p.op.grad_loss, std::vector<double>(kRows, 0));
              write(p.op.grad_lse, std::vector<double>(kRows, 1e-11));
              write(p.op.grad_target_logit, std::vector<double>(kRows, weight));
            }
          }
          judged(p, "weight " + std::to_string(std::log10(weight)) +
                        (statistics ? ", of statistics" : ""));
        }
      });
    }
  }
}

// Targets far below and far above the others, among rows with near targets.
TEST_P(NonFinite, FarTargetsBesideOthers) {
  if (!is_linear(op_)) return;
  constexpr double kDistances[] = {0, 15, 20, 40, 62, 3, -100, -70, -60, -20, 1, 100};
  constexpr int64_t kRows = std::size(kDistances);
  for (const Setting& setting : kAlone) {
    Case c{.op = op_, .shape = {kRows, kHidden, 450}, .dtype = dtype_};
    setting.apply(c);
    c.options.reduction = Reduction::none;
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (LinearOp<Op>) {
        Problem<Op> p = build<Op>(c);
        set_targets_below(&p.op, kDistances);
        judged(p, setting.name);
      }
    });
  }
}

// All logits of a row are close together and so large that they are rounded to a fraction of a nat.
TEST_P(NonFinite, NearTargetsOfHugeLogits) {
  if (!is_linear(op_)) return;
  for (const double sign : {1.0, -1.0}) {
    for (const Setting& setting : kAlone) {
      Case c{.op = op_, .shape = {kTokens, kHidden, 450}, .dtype = dtype_};
      setting.apply(c);
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        if constexpr (LinearOp<Op>) {
          Problem<Op> p = build<Op>(c);
          std::vector<double> input = read(p.op.input), matrix = read(p.op.weight);
          for (size_t k = 0; k < input.size(); k += kHidden) input[k] = 1280;
          for (size_t k = 0; k < matrix.size(); k += kHidden) matrix[k] = sign * 1024;
          write(p.op.input, input);
          write(p.op.weight, matrix);
          judged(p, std::string(setting.name) + (sign > 0 ? ", above" : ", below"));
        }
      });
    }
  }
}

// The factor of p is far above 1: from z-loss with a large lse, or from a low temperature under
// gradients of statistics.
TEST_P(NonFinite, SteepFactorsStayInRange) {
  if (!is_linear(op_) || op_ == OpKind::linear_forward) return;
  for (const bool statistics : {false, true}) {
    Case c{.op = op_, .shape = {4, kHidden, 20}, .dtype = dtype_};
    c.options.reduction = Reduction::none;
    if (statistics) {
      c.grad_loss = c.grad_lse = true;
      c.options.temperature = 5e-4f;
    } else {
      c.options.z_loss = 0.5f;
    }
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (LinearOp<Op>) {
        Problem<Op> p = build<Op>(c);
        std::vector<double> input = read(p.op.input), matrix = read(p.op.weight);
        for (double& x : input) x = statistics ? std::nearbyint(x) / 4096 : 40;
        for (double& w : matrix) w = statistics ? w / 16 : 1 + std::nearbyint(w) / 64;
        write(p.op.input, input);
        write(p.op.weight, matrix);
        if constexpr (BackwardOnlyOp<Op>) {
          if (statistics) {
            write(p.op.grad_loss, std::vector<double>(4, 0));
            write(p.op.grad_lse, std::vector<double>(4, 1));
          }
        }
        judged(p, statistics ? "temperature" : "z_loss");
      }
    });
  }
}

// dz of a token with a small weight is scaled up, and a large z-loss makes it larger: the product
// stays within f16 up to an |lse| of about 1000.
TEST_P(NonFinite, SmallWeightsBesideZLossStayInRange) {
  if (!is_linear(op_) || op_ == OpKind::linear_forward) return;
  Case c{.op = op_, .shape = {4, kHidden, 20}, .dtype = dtype_};
  c.options.reduction = Reduction::sum;
  c.options.z_loss = 1;
  c.token_weight = true;
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    if constexpr (LinearOp<Op>) {
      Problem<Op> p = build<Op>(c);
      std::vector<double> input = read(p.op.input), matrix = read(p.op.weight);
      for (double& x : input) x = 450.0 / kHidden;  // logits of about 900
      for (double& w : matrix) w = 2 + std::nearbyint(w) / 64;
      write(p.op.input, input);
      write(p.op.weight, matrix);
      write(p.op.weights.token, std::vector<double>(4, 0.1));
      judged(p, "z_loss beside weights");
    }
  });
}

LOGITLESS_CONFORMANCE_SUITE(NonFinite);

}  // namespace
}  // namespace logitless::conformance
