// SPDX-License-Identifier: Apache-2.0
// Factors near the ends of f32 on CUDA: a softcap whose limit only an infinite logit reaches, and
// upstream gradients and weights with which f16 intermediates must neither underflow nor overflow.
#include <array>
#include <cmath>

#include "tests/support/nonfinite.h"

namespace logitless::conformance {
namespace {

class CudaRange : public NonFinite {
 protected:
  // A linear op whose input is scaled by `input` and whose weight by 1 / `input`, so that logits
  // and p are as usual.
  template <class Op>
  Problem<Op> far_from_one(const Case& c, double input) const {
    Problem<Op> p = build<Op>(c);
    times(p.op.input, input);
    times(p.op.weight, 1 / input);
    return p;
  }
  static void times(const TensorView& view, double factor) {
    std::vector<double> values = read(view);
    for (double& x : values) x *= factor;
    write(view, values);
  }
  Case gradients() const {
    Case c{.op = op_, .shape = {33, 64, 300}, .dtype = dtype_};
    c.options.reduction = Reduction::none;
    return c;
  }
  // Calls f(op) if the parameter is a linear op with gradients.
  template <class F>
  void with_linear_gradients(F&& f) const {
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (LinearOp<Op> && GradientOp<Op>) f(op);
    });
  }
};

// scale / softcap is 1e-38: f32's largest finite logit comes to tanh 3.4, an infinite one to 1; at
// the target's column and elsewhere.
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

// A dz of f16 is stored divided by a power of two that the upstream gradients decide. If these are
// tiny, the input or the weight is large: otherwise the bound's absolute term of 2^-126 would
// accept any gradient.
TEST_P(CudaRange, UpstreamGradientsFarFromOne) {
  with_linear_gradients([&](auto op) {
    using Op = decltype(op);
    for (const auto& [exponent, input] : std::array<std::pair<int, double>, 6>{
             {{-120, 4096}, {-120, 1.0 / 4096}, {-104, 4096}, {104, 1}, {120, 1}, {122, 1}}}) {
      Case c = gradients();
      c.grad_loss = true;
      Problem<Op> p = far_from_one<Op>(c, input);
      times(p.op.grad_loss, std::ldexp(1, exponent));
      judged(p, "upstream gradients of 2^" + std::to_string(exponent));
    }
  });
}

TEST_P(CudaRange, GradientsOfStatisticsFarFromOne) {
  if (op_ != OpKind::linear_backward) return;
  for (const auto& [exponent, input] :
       std::array<std::pair<int, double>, 3>{{{-120, 4096}, {-120, 1.0 / 4096}, {120, 1}}}) {
    Case c = gradients();
    c.grad_loss = c.grad_lse = c.grad_target_logit = c.grad_entropy = true;
    auto p = far_from_one<LinearCrossEntropyBackward>(c, input);
    for (const TensorView* view :
         {&p.op.grad_loss, &p.op.grad_lse, &p.op.grad_target_logit, &p.op.grad_entropy}) {
      times(*view, std::ldexp(1, exponent));
    }
    judged(p, "gradients of 2^" + std::to_string(exponent));
  }
}

// Token weights change that power of two too, with and without upstream gradients per token.
TEST_P(CudaRange, TokenWeightsFarFromOne) {
  with_linear_gradients([&](auto op) {
    using Op = decltype(op);
    for (const Reduction reduction : {Reduction::none, Reduction::sum}) {
      for (const bool given : {false, true}) {
        Case c = gradients();
        c.options.reduction = reduction;
        c.token_weight = true;
        c.grad_loss = given;
        Problem<Op> p = far_from_one<Op>(c, 1);
        times(p.op.weights.token, std::ldexp(1, 112));
        judged(p, std::string("token weights of 2^112") + (given ? ", gradients given" : ""));
      }
    }
  });
}

LOGITLESS_CONFORMANCE_SUITE(CudaRange);

}  // namespace
}  // namespace logitless::conformance
