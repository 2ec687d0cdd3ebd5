// SPDX-License-Identifier: Apache-2.0
// Factors near the ends of f32 on CUDA: an infinite logit under a softcap that only infinity
// reaches.
#include <cmath>

#include "nonfinite.h"

namespace logitless::conformance {
namespace {

class CudaRange : public NonFinite {};

// scale / softcap is 1e-38: the largest finite logit comes to tanh 3.4, an infinite one to 1. At
// the target's column and away from it.
TEST_P(CudaRange, OnlyAnInfiniteLogitReachesTheSoftcap) {
  const double largest = round_to(dtype_, std::nextafter(overflow_threshold(dtype_), 0));
  for (const float temperature : {1.0f, 0.5f}) {
    Case c = plain();
    c.options.logit_scale = 1e-37f, c.options.softcap = 10, c.options.temperature = temperature;
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      Problem<Op> p = build<Op>(c);
      int64_t target = 4;
      if constexpr (LossOp<Op>) target = static_cast<int64_t>(read(p.op.target)[kRow]);
      const int64_t first = LinearOp<Op> ? 0 : kRow * kVocab;
      for (const double value : {kInf, -kInf, largest, -largest}) {
        for (const int64_t column : {target, (target + 30) % kVocab}) {
          const TensorView& view = masked_by(p.op);
          const double old = read(view)[first + column];
          set(view, first + column, value);
          const Fields fields = judged(p, std::to_string(value) + " at " + std::to_string(column));
          set(view, first + column, old);
          if (std::isfinite(value) || column != target || !fields.contains("target_logit"))
            continue;
          EXPECT_EQ(fields.at("target_logit").value[kRow],
                    std::copysign(10.0 / temperature, value));
        }
      }
    });
  }
}

LOGITLESS_CONFORMANCE_SUITE(CudaRange);

}  // namespace
}  // namespace logitless::conformance
