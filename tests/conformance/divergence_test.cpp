// SPDX-License-Identifier: Apache-2.0
// What the contract promises of divergences beyond the table of cases: equal and close heads,
// results that are 0 or infinite, rows that are not read, kept state.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>

#include "tests/support/divergences.h"
#include "tests/support/gather.h"
#include "tests/support/judge.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Both = LinearDivergenceForwardBackward;
using Forward = LinearDivergenceForward;
using Backward = LinearDivergenceBackward;

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

class Divergences : public ConformanceTest {
 protected:
  Case plain(Shape shape, DivergenceKind kind) const {
    Case c{.op = op_, .shape = shape, .dtype = dtype_, .statistics = true, .logprob = true};
    c.options.reduction = Reduction::none;
    c.divergence.kind = kind;
    return c;
  }
  // Runs the op, and expects the reference's results.
  template <class Op>
  Outcome judged(const Problem<Op>& p, const std::string& what, Memory memory) const {
    Outcome got = execute(device_, p.op, p.pool, {.memory = memory});
    const Comparison result = compare(expected(device_, p.op, p.model), got);
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
    return got;
  }
  template <class Op>
  Outcome judged(const Problem<Op>& p, const std::string& what) const {
    judged(p, what + ", least memory", Memory::minimum);
    return judged(p, what, Memory::recommended);
  }
};

std::string name_of(DivergenceKind kind) {
  constexpr const char* names[] = {"forward_kl", "reverse_kl", "jsd", "skew_kl", "tv"};
  return names[static_cast<int>(kind)];
}

void set(const TensorView& view, const std::function<double(int64_t, double)>& value_of) {
  std::vector<double> values = read(view);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = value_of(static_cast<int64_t>(i), values[i]);
  }
  write(view, values);
}
void set_row(const TensorView& view, int64_t row, double value) {
  const int64_t columns = view.shape[1];
  set(view, [&](int64_t i, double old) { return i / columns == row ? value : old; });
}

TEST_P(Divergences, EqualHeadsGiveExactlyZero) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const Shape& shape : {Shape{9, 19, 37}, Shape{70, 40, 1030}, Shape{3, 5, 1}}) {
      Case c = plain(shape, kind);
      c.equal = c.bias = c.teacher_bias = true;
      Problem<Both> p = build<Both>(c);
      p.op.teacher.bias = p.op.bias;
      for (const float softcap : {0.0f, 3.0f}) {  // the same in both heads
        p.op.options.softcap = p.op.divergence.teacher_softcap = softcap;
        if (softcap > 0) {
          p.op.options.logit_scale = p.op.divergence.teacher_logit_scale = 0.7f;
          p.op.options.temperature = p.op.divergence.teacher_temperature = 1.3f;
        }
        const Outcome got = judged(p, name_of(kind));
        for (const char* name : {"loss", "grad_input", "grad_weight", "grad_bias"}) {
          for (const double x : got.fields.at(name).value) {
            ASSERT_EQ(x, 0) << name_of(kind) << " " << name << " softcap " << softcap;
          }
        }
      }
    }
  }
}

// A student very close to its teacher still has a gradient; 16-bit logits would lose it.
TEST_P(Divergences, GradientsOfHeadsThatAreNear) {
  for (const DivergenceKind kind : {DivergenceKind::forward_kl, DivergenceKind::reverse_kl,
                                    DivergenceKind::jsd, DivergenceKind::skew_kl}) {
    Case c = plain({48, 128, 2000}, kind);
    c.near = true;
    const Problem<Both> p = build<Both>(c);
    const reference::Result want = expected(device_, p.op, p.model);
    const Outcome got = execute(device_, p.op, p.pool);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    for (const char* name : {"grad_input", "grad_weight"}) {
      const std::vector<double>& exact = want.outputs.at(name).value;
      const std::vector<double>& made = got.fields.at(name).value;
      double error = 0, size = 0;
      for (size_t k = 0; k < exact.size(); ++k) {
        error += (made[k] - exact[k]) * (made[k] - exact[k]);
        size += exact[k] * exact[k];
      }
      // A sum of 128 products, one after the other in f32, alone is off by 6e-5.
      EXPECT_LT(std::sqrt(error / size), dtype_ == DType::f32 ? 1.5e-4 : 5e-3)
          << name_of(kind) << " " << name << " of a divergence of "
          << got.fields.at("loss").value[0];
    }
  }
}

// A divergence far below the rounding errors of p and q stays accurate: it is not computed from p -
// q.
TEST_P(Divergences, OfHeadsThatAreVeryNear) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const float temperature : {1.00001f, 1.001f}) {
      Case c = plain({20, 33, 1030}, kind);
      c.equal = true;
      c.divergence.teacher_temperature = temperature;
      const std::string what = name_of(kind) + " at " + std::to_string(temperature);
      const Problem<Both> p = build<Both>(c);
      const Outcome got = judged(p, what);
      // The two heads' logits have the same rounding errors, so the loss is far more accurate than
      // its bound.
      const reference::Result want = expected(device_, p.op, p.model);
      const std::vector<double>& exact = want.outputs.at("loss").value;
      for (size_t i = 0; i < exact.size(); ++i) {
        EXPECT_NEAR(got.fields.at("loss").value[i], exact[i], 0.1 * exact[i]) << what;
      }
    }
  }
}

// A bias of -inf makes a probability 0: in the student alone, the teacher alone, or both.
TEST_P(Divergences, ColumnsThatAreMasked) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const int masked : {1, 2, 3}) {
      for (const float beta : {0.0f, 0.5f, 1.0f}) {
        Case c = plain({7, 19, 83}, kind);
        c.divergence.beta = beta;
        c.bias = c.teacher_bias = true;
        Problem<Both> p = build<Both>(c);
        const auto mask = [](int64_t j, double x) { return j % 9 == 4 ? -kInf : x; };
        if (masked & 1) set(p.op.bias, mask);
        if (masked & 2) set(p.op.teacher.bias, mask);
        set(p.op.target, [](int64_t i, double) { return static_cast<double>(9 * i); });
        judged(p, name_of(kind) + " masked " + std::to_string(masked));
      }
    }
  }
}

// Where one head's logit is -inf, the other's probability counts as 0 if it is below f32's range,
// and the divergence stays finite. The first columns share the probability, so that p and q are
// small relative to 1 and to the row's maximum.
TEST_P(Divergences, ProbabilitiesThatF32HasNoNumberFor) {
  using enum DivergenceKind;
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const int64_t vocab : {3, 1030}) {
      for (const int of_tokens : {0, 1, 2}) {
        Case c = plain({3, 5, vocab}, kind);
        c.bias = c.teacher_bias = true, c.bias_dtype = DType::f32;
        c.no_target = of_tokens == 0, c.logprob = of_tokens != 0;
        c.divergence.label_weight = of_tokens == 2 ? 0.3f : 0;
        const Problem<Both> p = build<Both>(c);
        for (const TensorView& weight : {p.op.weight, p.op.teacher.weight}) {
          set(weight, [](int64_t, double) { return 0.0; });
        }
        if (of_tokens != 0) set(p.op.target, [](int64_t, double) { return 0.0; });
        for (const bool of_teacher : {false, true}) {  // which head has the -inf
          const auto& [masked, other] = of_teacher ? std::tie(p.op.teacher.bias, p.op.bias)
                                                   : std::tie(p.op.bias, p.op.teacher.bias);
          for (const double power : {120.0, 130.0, 140.0, 200.0}) {
            const double tiny = std::log(static_cast<double>(vocab)) - power * std::log(2.0);
            set(masked, [&](int64_t j, double) { return j == vocab - 1 ? -kInf : j % 2 * 0.5; });
            set(other, [&](int64_t j, double) { return j == vocab - 1 ? tiny : 0.0; });
            const std::string what = name_of(kind) + " of 2^-" + std::to_string(power) +
                                     (of_teacher ? ", the teacher's -inf" : ", the student's -inf");
            const Outcome got = judged(p, what);
            const bool infinite = power < 126 && kind == (of_teacher ? reverse_kl : forward_kl);
            for (const double loss : got.fields.at("loss").value) {
              EXPECT_EQ(std::isinf(loss), infinite) << what;
            }
          }
        }
      }
    }
  }
}

TEST_P(Divergences, WhatIsNotFiniteStaysInItsRow) {
  constexpr int64_t row = 4;
  for (const DivergenceKind kind : kDivergenceKinds) {
    const Case c = plain({9, 19, 130}, kind);
    Problem<Both> p = build<Both>(c);
    const Outcome before = judged(p, name_of(kind));
    for (const bool of_teacher : {false, true}) {
      const TensorView& view = of_teacher ? p.op.teacher.input : p.op.input;
      const std::vector<double> old = read(view);
      for (const double value : {kNan, kInf}) {
        set_row(view, row, value);
        const Outcome after = judged(p, name_of(kind) + " of a row that is not finite");
        EXPECT_TRUE(std::isnan(after.fields.at("loss").value[row]));
        for (int64_t i = 0; i < c.shape.tokens; ++i) {
          if (i == row) continue;
          EXPECT_EQ(after.fields.at("loss").value[i], before.fields.at("loss").value[i]);
        }
      }
      write(view, old);
    }
  }
}

// A row that several blocks of a GPU share: masked columns, maps of logits, a row of NaN.
TEST_P(Divergences, RowsOfManyColumns) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const int64_t vocab : {5003, 9000, 20011}) {
      for (const int maps : {0, 1, 2}) {
        Case c = plain({5, 16, vocab}, kind);
        if (maps == 1) c.options.temperature = c.divergence.teacher_temperature = 1.5f;
        c.temperatures = c.teacher_temperatures = c.bias = c.teacher_bias = maps == 2;
        c.divergence.label_weight = maps == 1 ? 0.3f : 0;
        Problem<Both> p = build<Both>(c);
        if (maps == 2) {
          set(p.op.bias, [](int64_t j, double x) { return j % 97 == 4 ? -kInf : x; });
          set(p.op.teacher.bias, [](int64_t j, double x) { return j % 89 == 4 ? -kInf : x; });
          set(p.op.target, [](int64_t i, double) { return static_cast<double>(97 * i); });
        }
        set_row(p.op.teacher.input, 2, kNan);
        judged(p, name_of(kind) + " of " + std::to_string(vocab), Memory::recommended);
      }
    }
  }
}

TEST_P(Divergences, IgnoredRowsAreNotRead) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain({37, 19, 130}, kind);
    c.ignored = 0.4;
    c.token_weight = true;
    Problem<Both> p = build<Both>(c);
    const Outcome before = judged(p, name_of(kind));
    const std::vector<double> target = read(p.op.target);
    for (int64_t i = 0; i < c.shape.tokens; ++i) {
      if (target[i] != -100) continue;
      set_row(p.op.input, i, kNan);
      set_row(p.op.teacher.input, i, kInf);
    }
    EXPECT_EQ(differing_bits(before.fields, judged(p, "ignored rows of NaN").fields), "");
  }
}

// No tokens, or none that counts.
TEST_P(Divergences, NoTokenThatCounts) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const Reduction reduction : {Reduction::none, Reduction::sum, Reduction::mean}) {
      for (const int64_t tokens : {0, 5}) {
        Case c = plain({tokens, 19, 130}, kind);
        c.options.reduction = reduction;
        c.ignored = 1;
        c.bias = true;
        const Outcome got = judged(build<Both>(c), name_of(kind));
        for (const auto& [name, field] : got.fields) {
          for (const double x : field.value) ASSERT_EQ(x, 0) << name_of(kind) << " " << name;
        }
        c.accumulate = true;
        judged(build<Both>(c), name_of(kind) + ", which adds");
      }
    }
  }
}

TEST_P(Divergences, InactiveRowsAreNotRead) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain({37, 19, 130}, kind);
    c.inactive = 0.4;
    c.grad_loss = true;
    Problem<Backward> p = build<Backward>(c);
    const Outcome before = judged(p, name_of(kind));
    const std::vector<double> weight = read(p.op.weights.token);
    for (int64_t i = 0; i < c.shape.tokens; ++i) {
      if (weight[i] == 0) set_row(p.op.input, i, kNan);
    }
    EXPECT_EQ(differing_bits(before.fields, judged(p, "inactive rows of NaN").fields), "");
  }
}

// At the ends of beta a mixture is one of the two heads.
TEST_P(Divergences, EndsOfBeta) {
  const auto run = [&](DivergenceKind kind, float beta) {
    Case c = plain({33, 24, 300}, kind);
    c.divergence.beta = beta;
    const Problem<Both> p = build<Both>(c);
    return execute(device_, p.op, p.pool).fields;
  };
  using enum DivergenceKind;
  EXPECT_EQ(differing_bits(run(forward_kl, 0.5f), run(jsd, 0)), "");
  EXPECT_EQ(differing_bits(run(forward_kl, 0.5f), run(skew_kl, 0)), "");
  EXPECT_EQ(differing_bits(run(reverse_kl, 0.5f), run(jsd, 1)), "");
  const Fields none = run(skew_kl, 1);
  for (const char* name : {"loss", "grad_input", "grad_weight"}) {
    for (const double x : none.at(name).value) ASSERT_EQ(x, 0) << name;
  }
}

// The code must not compute beta as 1 - (1 - beta), which loses digits.
TEST_P(Divergences, BetaNearItsEnds) {
  for (const DivergenceKind kind : {DivergenceKind::jsd, DivergenceKind::skew_kl}) {
    for (const float beta : {1e-8f, 1e-4f, 0.01f, 0.999f}) {
      for (const float scale : {1.0f, 8.0f}) {  // the larger, the farther apart the heads
        Case c = plain({33, 24, 300}, kind);
        c.divergence.beta = beta;
        c.options.logit_scale = c.divergence.teacher_logit_scale = scale;
        judged(build<Both>(c), name_of(kind) + " " + std::to_string(beta), Memory::recommended);
      }
    }
  }
}

// p and q are so far apart that their ratio has no digits left, but a column's gradient must be as
// accurate as its p. The smallest nonzero beta must not be lost in rounding against such a ratio.
TEST_P(Divergences, OfHeadsThatAreEightyNatsApart) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    const bool mixes = kind == DivergenceKind::jsd || kind == DivergenceKind::skew_kl;
    for (const float beta : {0x1p-90f, 1e-12f, 0.3f, 0.5f, 1 - 0x1p-24f}) {
      if (!mixes && beta != 0.5f) continue;
      for (const double apart : {60.0, 79.5, 81.0, 83.0, 85.0, 86.5, 120.0}) {
        Case c = plain({3, 5, 2}, kind);
        c.divergence.beta = beta;
        c.bias = c.teacher_bias = true;
        const Problem<Both> p = build<Both>(c);
        for (const TensorView& weight : {p.op.weight, p.op.teacher.weight}) {
          set(weight, [](int64_t, double) { return 0.0; });
        }
        set(p.op.bias, [&](int64_t j, double) { return j == 0 ? 0 : -apart; });
        set(p.op.teacher.bias, [&](int64_t j, double) { return j == 0 ? -apart / 2 : 0; });
        judged(p, name_of(kind) + ", beta 2^" + std::to_string(std::log2(beta)) + ", apart " +
                      std::to_string(apart));
      }
    }
  }
}

// Forward alone writes the same bits as ForwardBackward.
TEST_P(Divergences, ForwardHasTheBitsOfBoth) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain({33, 24, 1030}, kind);
    c.ignored = 0.2;
    const Problem<Both> both = build<Both>(c);
    const Problem<Forward> forward = build<Forward>(c);
    const Fields whole = execute(device_, both.op, both.pool).fields;
    for (const auto& [name, field] : execute(device_, forward.op, forward.pool).fields) {
      EXPECT_EQ(field.bits, whole.at(name).bits) << name_of(kind) << " " << name;
    }
  }
}

TEST_P(Divergences, OfATokenDoNotDependOnItsBatch) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    const Case c = plain({70, 33, 1030}, kind);
    if (!device_.batch_invariant(c)) return;
    const Problem<Forward> p = build<Forward>(c);
    const Fields whole = execute(device_, p.op, p.pool).fields;
    for (const std::vector<int64_t>& rows :
         {std::vector<int64_t>{0}, {69}, {3, 2, 1}, {5, 5, 9, 60, 61, 62, 63, 64, 65}}) {
      const Problem<Forward> part = gather(p, rows);
      for (const Memory memory : {Memory::minimum, Memory::recommended}) {
        for (const auto& [name, field] :
             execute(device_, part.op, part.pool, {.memory = memory}).fields) {
          for (size_t k = 0; k < rows.size(); ++k) {
            EXPECT_EQ(std::memcmp(&field.bits[k * 4], &whole.at(name).bits[rows[k] * 4], 4), 0)
                << name_of(kind) << " " << name << " of token " << rows[k];
          }
        }
      }
    }
  }
}

TEST_P(Divergences, BackwardsRunInParts) {
  if (std::string("reference") == device_.name()) return;  // which has no plans
  for (const DivergenceKind kind : {DivergenceKind::forward_kl, DivergenceKind::jsd}) {
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      Case c = plain({70, 24, 2421}, kind);
      c.ignored = 0.2, c.inactive = 0.3;
      c.bias = c.token_weight = c.grad_loss = true;
      const RunPlan plan{.memory = memory};
      const Problem<Backward> p = build<Backward>(c);
      expect_parts(device_, p.op, p.pool, plan, execute(device_, p.op, p.pool, plan).fields,
                   name_of(kind));
      KeptDivergence k(device_, c);
      k.take(execute(device_, k.forward, k.p.pool, plan));
      const Backward kept = k.without_teacher();
      expect_parts(device_, kept, k.p.pool, plan, execute(device_, kept, k.p.pool, plan).fields,
                   name_of(kind) + ", kept");
    }
  }
}

TEST_P(Divergences, KeptStateServesAnyBackward) {
  if (std::string("reference") == device_.name()) return;  // which keeps no state
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      Case c = plain({70, 24, 421}, kind);
      c.ignored = 0.2, c.inactive = 0.3;
      c.bias = c.token_weight = c.grad_loss = c.fault = true;
      c.options.softcap = kind == DivergenceKind::jsd ? 4 : 0;
      c.divergence.label_weight = 0.3f;
      KeptDivergence k(device_, c);
      const Outcome kept = execute(device_, k.forward, k.p.pool, {.memory = memory});
      ASSERT_TRUE(kept.status.ok()) << kept.status.message();
      for (const std::string& violation : kept.violations) ADD_FAILURE() << violation;
      k.take(kept);
      const reference::Result want = expected(device_, k.p.op, k.p.model);
      for (const int use : {1, 2}) {
        const Outcome got = execute(device_, k.without_teacher(), k.p.pool,
                                    {.memory = memory, .fill = std::byte{0xFF}});
        const Comparison result = compare(want, got);
        EXPECT_TRUE(result.ok()) << name_of(kind) << " use " << use << "\n" << result.report;
        EXPECT_EQ(got.kept.at("kept").bits, kept.kept.at("kept").bits);
      }
      // A second Backward from the same state, with other inactive tokens.
      set(k.p.op.grad_loss, [](int64_t i, double x) { return i % 3 == 0 ? 0 : x - 0.5; });
      const Comparison other = compare(expected(device_, k.p.op, k.p.model),
                                       execute(device_, k.without_teacher(), k.p.pool));
      EXPECT_TRUE(other.ok()) << name_of(kind) << " other tokens\n" << other.report;
    }
  }
}

// dz of reverse_kl has no bound: rows whose dz exceeds 16 bits' range are kept together with
// ordinary rows, and serve a Backward with any upstream gradients.
TEST_P(Divergences, KeptStateOfRowsFarFromTheirTeacher) {
  if (std::string("reference") == device_.name()) return;
  for (const int64_t vocab : {5, 421, 20011}) {
    for (const int upstream : {0, 1, 2}) {
      for (const float teacher_scale : {1.0f, 4096.0f}) {
        Case c = plain({20, 24, vocab}, DivergenceKind::reverse_kl);
        c.bias = c.wants_grad_bias = true, c.bias_dtype = DType::f32;
        c.grad_loss = c.token_weight = upstream == 1;
        c.divergence.label_weight = upstream == 1 ? 0.3f : 0;
        c.divergence.teacher_logit_scale = teacher_scale;
        if (upstream == 2) c.options.reduction = Reduction::mean;
        KeptDivergence k(device_, c);
        set(k.p.op.bias, [](int64_t j, double) { return j < 2 ? 10.0 : 0.0; });
        set(k.p.op.teacher.input, [&](int64_t i, double x) {
          const int64_t row = i / 24;
          return x * (row == 3 ? 4000 : row == 11 ? 9000 : 1.0);
        });
        if (upstream == 1) {
          set(k.p.op.grad_loss, [](int64_t i, double x) { return i == 11 ? 1e-3 : x; });
        }
        const std::string what = std::to_string(vocab) + " columns, upstream " +
                                 std::to_string(upstream) + ", scale " +
                                 std::to_string(teacher_scale);
        if (upstream == 2) k.forward.loss = {};  // dz needs the divergence even so
        k.take(execute(device_, k.forward, k.p.pool));
        const reference::Result want = expected(device_, k.p.op, k.p.model);
        const std::vector<double>& dz = want.outputs.at("grad_bias").value;
        const double most = std::fabs(*std::max_element(dz.begin(), dz.end()));
        EXPECT_GT(most, upstream == 0 ? 1100 : 0) << what;
        const Outcome got = execute(device_, k.without_teacher(), k.p.pool);
        const Comparison result = compare(want, got);
        EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
      }
    }
  }
}

// A row of NaN gives NaN in Backward if the row is active, and only in that row.
TEST_P(Divergences, KeptStateOfARowOfNaN) {
  if (std::string("reference") == device_.name()) return;
  for (const int64_t vocab : {131, 20011}) {  // several blocks of a GPU share a row
    Case c = plain({20, 24, vocab}, DivergenceKind::reverse_kl);
    c.grad_loss = true;
    KeptDivergence k(device_, c);
    set_row(k.p.op.input, 7, kNan);
    k.take(execute(device_, k.forward, k.p.pool));
    for (const double upstream : {0.0, 1.5}) {
      set(k.p.op.grad_loss, [&](int64_t i, double x) { return i == 7 ? upstream : x; });
      const Outcome got = execute(device_, k.without_teacher(), k.p.pool);
      const Comparison result = compare(expected(device_, k.p.op, k.p.model), got);
      EXPECT_TRUE(result.ok()) << upstream << "\n" << result.report;
      EXPECT_EQ(std::isnan(got.fields.at("grad_weight").value[0]), upstream != 0);
    }
  }
}

// Rows that no Forward has written give NaN and set the fault word.
TEST_P(Divergences, KeptStateOfNobody) {
  if (std::string("reference") == device_.name()) return;
  for (const double garbage : {0.0, 1.0, kNan}) {
    Case c = plain({20, 24, 131}, DivergenceKind::forward_kl);
    c.fault = true;
    KeptDivergence k(device_, c);
    k.take(execute(device_, k.forward, k.p.pool));
    set(k.p.op.kept_rows, [&](int64_t i, double x) { return i / 8 == 5 ? garbage : x; });
    const Outcome got = execute(device_, k.without_teacher(), k.p.pool);
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    EXPECT_EQ(got.fault & 2, 2) << garbage;
    const std::vector<double>& grad = got.fields.at("grad_input").value;
    for (int64_t i = 0; i < 20 * 24; ++i) EXPECT_EQ(std::isnan(grad[i]), i / 24 == 5) << i;
  }
}

constexpr OpKind kBoth[] = {OpKind::divergence_forward_backward};
LOGITLESS_CONFORMANCE_SUITE_OF(Divergences, kBoth, inputs());

}  // namespace
}  // namespace logitless::conformance
