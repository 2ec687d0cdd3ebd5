// SPDX-License-Identifier: Apache-2.0
// Backward alone, with a state that holds less than the logits do: -inf for every column, or no
// sign of a NaN. Belongs to the suite of nonfinite_test.cpp.
#include "tests/support/nonfinite.h"

namespace logitless::conformance {
namespace {

// Every logit is -inf, and the state is what combined shards without probability have.
TEST_P(NonFinite, AStateOfMinusInfinity) {
  for (const Setting& setting : kSettings) {
    Case c = plain();
    setting.apply(c);
    // A softcap or a scale <= 0 maps -inf to another value.
    if (c.options.softcap > 0 || c.options.logit_scale <= 0) continue;
    c.saved_state = true;
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (BackwardOnlyOp<Op>) {
        Problem<Op> p = build<Op>(c);
        for (const TensorView& view : {masked_by(p.op), p.op.row_reference, p.op.row_log_sum}) {
          write(view, std::vector<double>(read(view).size(), -kInf));
        }
        judged(p, setting.name);
      }
    });
  }
}

void expect_nan(const Fields& fields, const char* name, int64_t first, int64_t count,
                const std::string& what) {
  for (int64_t k = first; k < first + count; ++k) {
    ASSERT_TRUE(std::isnan(fields.at(name).value[k])) << what << ": " << name << " at " << k;
  }
}

// A logit becomes NaN after Forward: its gradient is NaN, not that of a probability of 0 or 1. The
// rest of the row is not compared, because the reference sums over the row.
TEST_P(NonFinite, ANanThatTheStateDoesNotTell) {
  constexpr int64_t column = 37;
  const double nan = std::nan("");
  for (const Setting& setting : kSettings) {
    for (const bool biased : {true, false}) {
      Case c = plain();
      setting.apply(c);
      c.saved_state = true;
      c.bias = biased;
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        if constexpr (BackwardOnlyOp<Op>) {
          const std::string what = setting.name;
          Problem<Op> p = build<Op>(c);
          const Fields before = judged(p, what);
          if constexpr (LinearOp<Op>) {
            const double old = read(p.op.input)[kRow * kHidden];
            set(p.op.input, kRow * kHidden, nan);
            Fields after = execute(device_, p.op, p.pool).fields;
            expect_nan(after, "grad_input", kRow * kHidden, kHidden, what);
            expect_nan(after, "grad_weight", 0, kVocab * kHidden, what);
            expect_other_rows(before, after, kRow, what);
            if (!biased) return;
            set(p.op.input, kRow * kHidden, old);
            set(p.op.bias, column, nan);
            after = execute(device_, p.op, p.pool).fields;
            expect_nan(after, "grad_input", 0, kTokens * kHidden, what);
            expect_nan(after, "grad_weight", column * kHidden, kHidden, what);
            expect_nan(after, "grad_bias", column, 1, what);
          } else {
            set(p.op.logits, kRow * kVocab + column, nan);
            const Fields after = execute(device_, p.op, p.pool).fields;
            expect_nan(after, "grad_logits", kRow * kVocab + column, 1, what);
            expect_other_rows(before, after, kRow, what);
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace logitless::conformance
