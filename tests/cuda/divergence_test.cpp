// SPDX-License-Identifier: Apache-2.0
// Divergences on the GPU, in workspaces that lead to several DivergenceWays
// (src/cuda/divergence/divergence.h), compared with the reference; and Backward from kept dz.
#include <algorithm>
#include <cmath>
#include <map>

#include "planned.h"
#include "src/cuda/divergence/plan.h"
#include "src/cuda/linear/engines.h"
#include "tests/support/divergences.h"

namespace logitless::conformance {
namespace {

using Both = LinearDivergenceForwardBackward;

constexpr Case kPlain{.op = OpKind::divergence_forward_backward, .shape = {515, 72, 3001}};

class CudaDivergence : public ConformanceTest {
 protected:
  Case plain() const {
    Case c = kPlain;
    c.dtype = c.grad_input = c.grad_weight = dtype_;
    c.grad_loss = true;
    return c;
  }
  static void add_options(Case* c) {
    c->bias = c->teacher_bias = c->token_weight = c->statistics = c->logprob = true;
    c->temperatures = c->teacher_temperatures = true;
    c->options.softcap = 20;
    c->divergence.teacher_softcap = 15;
    c->divergence.label_weight = 0.4f;
    c->options.reduction = Reduction::none;
    c->ignored = 0.2;
    c->teacher_hidden = 40;
  }
  // Compares the case with the reference once or twice for each way that these workspaces lead to.
  void judge_ways(const Case& c) const {
    const Problem<Both> p = build<Both>(c);
    const cuda::DeviceInfo* info = nullptr;
    ASSERT_TRUE(cuda::find_device(0, &info).ok());
    const WorkspaceSize size = workspace_of(device_, c);
    // The key is the way and whether dz of some columns is stored.
    std::map<std::pair<cuda::DivergenceWay, bool>, std::vector<uint64_t>> bytes;
    for (const double share : {0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 4.0}) {
      const uint64_t some = bytes_of(size, share);
      const cuda::DivergencePlan plan = cuda::divergence_plan(Call(p.op), some, *info);
      auto& of_way = bytes[{plan.way, plan.stored > 0}];
      if (of_way.size() < 2) of_way.push_back(some);
    }
    EXPECT_GE(bytes.size(), 2u);
    const reference::Result want = expected(device_, p.op, p.model);
    for (const auto& [sort, sizes] : bytes) {
      for (const uint64_t some : sizes) {
        const Comparison result =
            compare(want, execute(device_, p.op, p.pool, {.memory = Memory::exact, .bytes = some}));
        EXPECT_TRUE(result.ok()) << result.report << ", " << cuda::name_of(sort.first)
                                 << (sort.second ? ", some stored: " : ": ") << describe(c);
      }
    }
  }
};

TEST_P(CudaDivergence, EveryWayIsWithinTheBound) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const bool options : {false, true}) {
      Case c = plain();
      c.divergence.kind = kind;
      if (options) add_options(&c);
      judge_ways(c);
    }
  }
}

TEST_P(CudaDivergence, InGradientsOfF32ThatAccumulate) {
  Case c = plain();
  c.grad_weight = DType::f32;
  c.accumulate = c.wants_grad_bias = c.no_target = true;
  c.shape.vocab = 3000;
  judge_ways(c);
}

TEST_P(CudaDivergence, OfATeacherNearBy) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = plain();
    c.divergence.kind = kind;
    c.near = true;
    judge_ways(c);
  }
}

// Heads large enough that an engine stores the logits and adds up the sums of the states.
class StoredLogits : public CudaDivergence {
 protected:
  Case large() const {
    Case c = plain();
    c.shape = {1000, 72, 4117};
    c.statistics = c.logprob = true;
    c.teacher_hidden = 40;
    return c;
  }
  // Compares the case with the reference, and expects stored logits if the engine can store them.
  void judge_stored(const Case& c) const {
    const Problem<Both> p = build<Both>(c);
    const cuda::DeviceInfo* info = nullptr;
    ASSERT_TRUE(cuda::find_device(0, &info).ok());
    const uint64_t bytes = workspace_of(device_, c).recommended;
    const bool stores = dtype_ != DType::f32 && cuda::engine_for(*info).columns_of_sums() > 0;
    EXPECT_EQ(cuda::divergence_plan(Call(p.op), bytes, *info).sum_columns > 0, stores);
    judge_ways(c);
  }
};

TEST_P(StoredLogits, AreWithinTheBound) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const int maps : {0, 1, 2}) {
      Case c = large();
      c.divergence.kind = kind;
      if (maps == 1) {
        c.options.temperature = 1.5f;
        c.divergence.teacher_logit_scale = 0.6f;
        c.divergence.label_weight = 0.3f;
      }
      c.temperatures = c.teacher_temperatures = maps == 2;
      c.ignored = maps == 2 ? 0.4 : 0;
      judge_stored(c);
    }
  }
}

TEST_P(StoredLogits, OfATeacherNearBy) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    Case c = large();
    c.teacher_hidden = 0;
    c.divergence.kind = kind;
    c.near = true;
    judge_stored(c);
  }
}

// Equal heads give exactly 0. Very close heads stay accurate: the states are more exact than f32.
TEST_P(StoredLogits, OfATeacherAlike) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const float temperature : {1.0f, 1.001f}) {
      Case c = large();
      c.teacher_hidden = 0;
      c.equal = true;
      c.divergence.kind = kind;
      c.divergence.teacher_temperature = temperature;
      c.options.reduction = Reduction::none;
      judge_stored(c);
      const Problem<Both> p = build<Both>(c);
      const Outcome made = execute(device_, p.op, p.pool);
      ASSERT_TRUE(made.status.ok()) << made.status.message();
      const reference::Result want = expected(device_, p.op, p.model);
      const std::vector<double>& exact = want.outputs.at("loss").value;
      for (size_t i = 0; i < exact.size(); ++i) {
        ASSERT_NEAR(made.fields.at("loss").value[i], exact[i], 0.1 * exact[i]) << i;
      }
    }
  }
}

// Logits of any size: each tile's rows have their own maximum, and its sums are relative to it.
TEST_P(StoredLogits, OfAnySize) {
  for (const float scale : {1e-3f, 30.0f, 3000.0f, 1e10f, 1e25f}) {
    Case c = large();
    c.options.logit_scale = c.divergence.teacher_logit_scale = scale;
    c.divergence.kind = DivergenceKind::jsd;
    judge_stored(c);
  }
}

// A NaN stays in its row. The second vocabulary's last tile is a single column, far below all
// others, which contributes nothing.
TEST_P(StoredLogits, OfRowsWithNaN) {
  for (const int64_t vocab : {4117, 192 * 22 + 1}) {
    Case c = large();
    c.shape.vocab = vocab;
    c.divergence.kind = DivergenceKind::reverse_kl;
    c.options.reduction = Reduction::none;
    Problem<Both> p = build<Both>(c);
    const auto fill_row = [](const TensorView& view, int64_t row, double value) {
      std::vector<double> values = read(view);
      std::fill_n(values.begin() + row * view.shape[1], view.shape[1], value);
      write(view, values);
    };
    fill_row(p.op.input, 3, NAN);
    fill_row(p.op.teacher.input, 700, INFINITY);
    const double far = dtype_ == DType::f16 ? -3e4 : -1e12;
    fill_row(p.op.weight, vocab - 1, far);
    fill_row(p.op.teacher.weight, vocab - 1, far);
    fill_row(p.op.input, 5, 1);
    fill_row(p.op.teacher.input, 5, 1);
    const Comparison result =
        compare(expected(device_, p.op, p.model), execute(device_, p.op, p.pool, {}));
    EXPECT_TRUE(result.ok()) << result.report << ": " << describe(c);
  }
}

// Kept dz serves Backwards with other upstream gradients, without a teacher, and twice.
TEST_P(CudaDivergence, KeptDzIsWithinTheBound) {
  for (const DivergenceKind kind : kDivergenceKinds) {
    for (const int variant : {0, 1, 2, 3}) {
      Case c = plain();
      c.op = OpKind::divergence_backward;
      c.divergence.kind = kind;
      if (variant == 1) c.shape = {12, 24, 20011};   // several blocks share a row
      if (variant == 3) c.shape = {1000, 24, 4117};  // large enough for stored logits
      if (variant == 2) {
        add_options(&c);
        c.inactive = 0.3;
      }
      KeptDivergence k(device_, c);
      const Outcome made = execute(device_, k.forward, k.p.pool,
                                   {.memory = Memory::recommended, .fill = std::byte{0xFF}});
      ASSERT_TRUE(made.status.ok()) << made.status.message();
      const reference::Result want = expected(device_, k.p.op, k.p.model);
      k.take(made);
      for (const Memory memory : {Memory::recommended, Memory::minimum}) {
        const Comparison result =
            compare(want, execute(device_, k.without_teacher(), k.p.pool, {.memory = memory}));
        EXPECT_TRUE(result.ok()) << result.report << ": " << describe(c);
      }
    }
  }
}

const auto all_dtypes =
    testing::Combine(testing::ValuesIn(cuda_devices()), testing::Values(kPlain.op),
                     testing::Values(DType::f32, DType::f16, DType::bf16));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaDivergence);
INSTANTIATE_TEST_SUITE_P(All, CudaDivergence, all_dtypes, parameter_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(StoredLogits);
INSTANTIATE_TEST_SUITE_P(Divergence, StoredLogits, all_dtypes, parameter_name);

}  // namespace
}  // namespace logitless::conformance
