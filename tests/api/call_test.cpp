// SPDX-License-Identifier: Apache-2.0
// An op of the C++ interface becomes a Call: every tensor arrives under its name, and no other.
#include "src/call.h"

#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>

#include "src/row/statistics.h"

namespace logitless {
namespace {

template <class Op>
class OpCall : public testing::Test {};
using Ops = testing::Types<Softmax, CrossEntropyForward, CrossEntropyBackward,
                           CrossEntropyForwardBackward, LinearCrossEntropyForward,
                           LinearCrossEntropyBackward, LinearCrossEntropyForwardBackward, Combine>;
TYPED_TEST_SUITE(OpCall, Ops);

TYPED_TEST(OpCall, HasTheTensorsOfItsOp) {
  for (const bool accumulate : {false, true}) {
    TypeParam op;
    if constexpr (LinearOp<TypeParam> && GradientOp<TypeParam>) {
      op.accumulate_grad_weight = accumulate;
    }
    char memory[32];
    const logitless_op unused{};
    int count = 0;
    for_each_tensor(op, unused, [&](const char*, Access, TensorView& view, const auto*) {
      view = vector_view(memory + count++, DType::f32, 1);
    });
    const Call call(op);
    const Fields fields = call.fields();
    ASSERT_EQ(fields.size(), static_cast<size_t>(count));
    std::set<std::string> names;
    size_t i = 0;
    for_each_tensor(op, unused, [&](const char* name, Access access, TensorView& view, auto*) {
      EXPECT_EQ(fields[i].name, name);
      EXPECT_EQ(fields[i].access, access) << name;
      EXPECT_EQ(fields[i].view->data, view.data) << name;
      EXPECT_EQ(call[name].data, view.data) << name;
      names.insert(name);
      ++i;
    });
    for (int32_t kind = 0; kind < kinds; ++kind) {
      for (const TensorField& field : tensor_fields(kind)) {
        const bool has = names.contains(field.name);
        EXPECT_EQ(static_cast<bool>(call[field.name]), has) << field.name;
      }
    }
  }
}

TYPED_TEST(OpCall, SaysWhatItsOpDoes) {
  const Call call{TypeParam{}};
  EXPECT_EQ(call.kind, kind_of<TypeParam>);
  EXPECT_EQ(call.linear, LinearOp<TypeParam>);
  EXPECT_EQ(call.combines, CombiningOp<TypeParam>);
  EXPECT_EQ(call.loss_op, LossOp<TypeParam>);
  EXPECT_EQ(call.gradients, GradientOp<TypeParam>);
  EXPECT_EQ(call.forward, ForwardOp<TypeParam>);
}

// A Forward's state fields are outputs, whose contents nothing may read; a Backward's are inputs.
TEST(Call, StateIsGivenToBackwardAlone) {
  float value = 0;
  CrossEntropyForward forward;
  forward.statistics.row_reference = vector_view(&value, DType::f32, 1);
  EXPECT_FALSE(Call(forward).state_given());
  EXPECT_TRUE(Call(forward).statistics().row_reference);
  CrossEntropyBackward backward;
  backward.row_reference = vector_view(&value, DType::f32, 1);
  EXPECT_TRUE(Call(backward).state_given());
  EXPECT_FALSE(Call(backward).statistics().row_reference);
}

TEST(Call, TheTableHasEveryStatistic) {
  float value = 0;
  TokenStatistics all;
  const logitless_op unused{};
  size_t count = 0;
  const auto look = [&](const char* name, Access, TensorView& view, const auto*) {
    ASSERT_LT(count, std::size(kStatistics));
    const Statistic& statistic = kStatistics[count++];
    EXPECT_EQ(statistic.name, name);
    EXPECT_NE(statistic.number == nullptr, statistic.index == nullptr) << name;
    CrossEntropyForward op;
    view = vector_view(&value, DType::f32, 1);
    op.statistics = all;
    view = {};
    const Call call(op);
    EXPECT_TRUE(call.*statistic.tensor) << name;
    EXPECT_EQ(call.sums(), statistic.needs) << name;
  };
  for_each_statistic(all, unused, look);
  EXPECT_EQ(count, std::size(kStatistics));
}

TEST(Call, AsksForTheSumsOfWhatItWrites) {
  float value = 0;
  const TensorView one = vector_view(&value, DType::f32, 1);
  LinearCrossEntropyForward op;
  EXPECT_TRUE(Call(op).sums().empty());
  op.options.label_smoothing = 0.1f;
  EXPECT_EQ(Call(op).sums(), SumKind::weighted);
  op.statistics.target_logit = one;
  EXPECT_TRUE(Call(op).targets_only());
  op.statistics.rank = one;
  EXPECT_EQ(Call(op).sums(), SumKind::weighted | SumKind::above);
  EXPECT_FALSE(Call(op).targets_only());
  LinearCrossEntropyBackward backward;
  backward.entropy = one;
  backward.options.label_smoothing = 0.1f;
  EXPECT_TRUE(Call(backward).sums().empty());
}

// Plans read a tensor's alignment, never its address. A null address has no known alignment.
TEST(Call, ATensorCarriesItsAlignment) {
  alignas(32) char memory[64];
  Softmax op;
  const auto alignment = [&](void* data, uint64_t offset) {
    op.logits = vector_view(data, DType::f32, 1);
    op.logits.byte_offset = offset;
    return Call(op).logits.alignment;
  };
  EXPECT_EQ(alignment(nullptr, 0), 0u);
  EXPECT_EQ(alignment(nullptr, 2), 0u);
  EXPECT_EQ(alignment(memory, 0), 16u);
  EXPECT_EQ(alignment(memory + 16, 16), 16u);
  for (const uint64_t offset : {1, 2, 4, 8, 16}) {
    EXPECT_EQ(alignment(memory, offset), offset);
    EXPECT_EQ(alignment(memory + offset, 0), offset);
  }
  EXPECT_EQ(alignment(memory + 4, 12), 16u);
  EXPECT_EQ(alignment(memory + 4, 10), 2u);
  EXPECT_EQ(Call(op).probabilities.alignment, 0u);
}

}  // namespace
}  // namespace logitless
