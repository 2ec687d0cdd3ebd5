// SPDX-License-Identifier: Apache-2.0
// Special cases of CUDA's linear ops: rows that are recomputed, accumulation without a token,
// softcaps near their limit, panels in grad_weight's memory.
#include <cmath>

#include "resident.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

constexpr OpKind kGradientOps[] = {OpKind::linear_backward, OpKind::linear_forward_backward};

class CudaLinear : public ConformanceTest {
 protected:
  // Calls f(problem, its WorkspaceSize) for ops with gradients.
  template <class F>
  void with_problem(const Case& c, F&& f) {
    with_op(op_, [&](auto op) {
      using Op = decltype(op);
      if constexpr (LinearOp<Op> && GradientOp<Op>) {
        auto p = build<Op>(c);
        f(p, workspace_of(device_, c));
      }
    });
  }
  // Compares a call with the reference, in the minimum workspace plus `share` of the distance to
  // the recommended one.
  template <class Op>
  Comparison compared(const Problem<Op>& p, const WorkspaceSize& size, double share,
                      const reference::Result& want) const {
    return compare(want, execute(device_, p.op, p.pool,
                                 {.memory = Memory::exact, .bytes = bytes_of(size, share)}));
  }
};

// Gives token `row` a weight of 1e-22 and a target 50 nats below its largest logit: P p_t is below
// 1e-45, f32's smallest number, while E alone would serve any loss below 60.
template <class Op>
void make_faint(const Op& op, int64_t row) {
  const auto [tokens, hidden, vocab] =
      Shape{op.input.shape[0], op.input.shape[1], op.weight.shape[0]};
  std::vector<double> input = read(op.input), weight = read(op.weight), target = read(op.target);
  std::vector<double> token_weight(static_cast<size_t>(tokens), 1);
  for (int64_t i = 0; i < tokens; ++i) input[i * hidden] = i == row ? 1 : 0;
  for (int64_t j = 0; j < vocab; ++j) weight[j * hidden] = 0;
  const auto t = static_cast<int64_t>(target[row]);
  for (int64_t d = 1; d < hidden; ++d) weight[t * hidden + d] = 0;
  double largest = 0;
  for (int64_t j = 0; j < vocab; ++j) {
    double logit = 0;
    for (int64_t d = 0; d < hidden; ++d) logit += input[row * hidden + d] * weight[j * hidden + d];
    largest = std::fmax(largest, logit);
  }
  weight[t * hidden] = round_to(op.weight.dtype, largest - 50);
  token_weight[row] = 1e-22;
  write(op.input, input);
  write(op.weight, weight);
  write(op.weights.token, token_weight);
}

// Not for f16, where this row's dz, 1e-22 of the others', is below the dtype's range.
TEST_P(CudaLinear, ARowOfAVanishingFactorIsMadeAgain) {
  if (dtype_ == DType::f16) return;
  constexpr int64_t row = 5, hidden = 64;
  const Case c{.op = op_, .shape = {70, hidden, 515}, .dtype = dtype_, .token_weight = true};
  with_problem(c, [&](auto& p, const WorkspaceSize& size) {
    make_faint(p.op, row);
    const reference::Result want = expected(device_, p.op, p.model);
    const std::vector<double>& value = want.outputs.at("grad_input").value;
    double largest = 0;
    for (int64_t d = 0; d < hidden; ++d) {
      largest = std::fmax(largest, std::fabs(value[row * hidden + d]));
    }
    ASSERT_GT(largest, 1e-26);
    for (const double share : {0.0, 0.5, 1.0}) {
      const Outcome got =
          execute(device_, p.op, p.pool, {.memory = Memory::exact, .bytes = bytes_of(size, share)});
      const Comparison result = compare(want, got);
      EXPECT_TRUE(result.ok()) << result.report;
      for (int64_t d = 0; got.status.ok() && d < hidden; ++d) {
        EXPECT_NEAR(got.fields.at("grad_input").value[row * hidden + d], value[row * hidden + d],
                    0.02 * largest)
            << d << ", share " << share;
      }
    }
  });
}

// Most rows' losses exceed the exponent's range, as with a weight of too large an initialization.
// They are recomputed 128 at a time; a few rows are ordinary. A row's place in the list of such
// rows differs from run to run, and must not change a bit.
TEST_P(CudaLinear, MoreThanATileOfRowsIsMadeAgain) {
  enum class With { nothing, weights, maps };
  for (const auto& [shape, placement] : {std::pair{Shape{150, 72, 450}, Placement::dense},
                                         {Shape{148, 200, 391}, Placement::dense},
                                         {Shape{140, 9, 300}, Placement::unaligned},
                                         {Shape{136, 131, 200}, Placement::transposed}}) {
    for (const With with : {With::nothing, With::weights, With::maps}) {
      Case c{.op = op_, .shape = shape, .dtype = dtype_, .placement = placement};
      c.bias = c.token_weight = with == With::weights;
      c.options.label_smoothing = with == With::weights ? 0.1f : 0;
      c.temperatures = with == With::maps;
      c.options.softcap = with == With::maps ? 400 : 0;
      with_problem(c, [&](auto& p, const WorkspaceSize& size) {
        std::vector<double> input = read(p.op.input);
        for (size_t k = 0; k < input.size(); ++k) {
          const bool near = k / static_cast<size_t>(p.op.input.shape[1]) % 37 == 5;
          input[k] = round_to(dtype_, input[k] * (near ? 1 : 400));
        }
        write(p.op.input, input);
        // The target's term is in the hundreds; the smoothing's terms of the other tokens are small
        // compared with it.
        p.model.structured = with == With::weights;
        const reference::Result want = expected(device_, p.op, p.model);
        if (want.outputs.contains("loss")) {
          EXPECT_GT(want.outputs.at("loss").value[0], 100);
        }
        for (const double share : {0.0, 1.0}) {
          const RunPlan how{.memory = Memory::exact, .bytes = bytes_of(size, share)};
          const Outcome first = execute(device_, p.op, p.pool, how),
                        second = execute(device_, p.op, p.pool, how);
          const Comparison result = compare(want, first);
          EXPECT_TRUE(result.ok()) << result.report << ", share " << share << ", " << describe(c);
          for (const auto& [name, field] : first.fields) {
            EXPECT_EQ(field.value, second.fields.at(name).value) << name << ", " << describe(c);
          }
        }
      });
    }
  }
}

// Without a token, accumulation leaves grad_weight as it is, even subnormal numbers, which an
// addition might flush.
TEST_P(CudaLinear, AddingOverNoTokenLeavesWhatIsThere) {
  for (const int64_t hidden : {9, 64, 200}) {
    Case c{.op = op_, .shape = {33, hidden, 300}, .dtype = dtype_, .bias_dtype = dtype_};
    c.ignored = 1;
    c.bias = c.accumulate = true;
    with_problem(c, [&](auto& p, const WorkspaceSize& size) {
      std::vector<double> weight = read(p.op.grad_weight), bias = read(p.op.grad_bias);
      for (size_t k = 0; k < weight.size(); k += 7)
        weight[k] = std::ldexp(k % 2 ? -3.0 : 5.0, -149);
      for (size_t k = 0; k < bias.size(); k += 7) bias[k] = std::ldexp(1.0, -149);
      write(p.op.grad_weight, weight);
      write(p.op.grad_bias, bias);
      for (const double share : {0.0, 0.5, 1.0}) {
        const Outcome got = execute(device_, p.op, p.pool,
                                    {.memory = Memory::exact, .bytes = bytes_of(size, share)});
        ASSERT_TRUE(got.status.ok()) << got.status.message();
        // Doubles hold every f32, and neither tensor holds a zero, so equal values are equal bits.
        EXPECT_EQ(got.fields.at("grad_weight").value, weight) << hidden << ", share " << share;
        EXPECT_EQ(got.fields.at("grad_bias").value, bias) << hidden << ", share " << share;
      }
    });
  }
}

// With products of 0, nothing hides the error of tanh: the row's reference and lse depend on one
// column's bias. The bias covers all ranges of tanh, most densely where a formula by exp would
// exceed the bound in one case of fifty.
TEST_P(CudaLinear, ACappedLogitThatItsBiasCarries) {
  if (op_ != OpKind::linear_forward_backward || dtype_ == DType::f16) return;
  Case c{.op = op_, .shape = {3, 64, 40}, .dtype = dtype_, .bias_dtype = DType::f32};
  c.bias = c.statistics = true;
  c.wants_grad_input = c.wants_grad_weight = false;
  c.options.softcap = 30;
  std::vector<double> sizes;
  for (int i = 1; i <= 40; ++i) sizes.push_back(2.1 * i);  // tanh's argument up to 2.8
  // Arguments of tanh from 0.6, where the short polynomial ends (sm90/options.cuh), to 0.68.
  for (int i = 0; i < 600; ++i) sizes.push_back(18.001 + 0.0041 * i);
  with_problem(c, [&](auto& p, const WorkspaceSize& size) {
    write(p.op.input, std::vector<double>(3 * 64, 0));
    write(p.op.target, std::vector<double>(3, 1));
    std::vector<double> bias(40, -1e6);
    for (const double carried : sizes) {
      bias[7] = round_to(DType::f32, carried);
      write(p.op.bias, bias);
      const Comparison result = compared(p, size, 1, expected(device_, p.op, p.model));
      ASSERT_TRUE(result.ok()) << result.report << ", bias " << bias[7];
    }
  });
}

// All logits of a row are equal and a little above -cap, with smoothing. The rounding errors of E,
// just above 1, and of dz are as large as possible and equal in all columns, so grad_input shows
// the error of a softcap's slope computed from E (sm90/near_cap.cuh). If near_cap were 0.9375, an
// eleventh of these rows would exceed the bound.
TEST_P(CudaLinear, RowsOfLogitsNearTheCap) {
  if (op_ != OpKind::linear_forward_backward || dtype_ != DType::bf16) return;
  constexpr int64_t tokens = 512, hidden = 64, vocab = 500;
  for (const float cap : {15.0f, 22.0f, 30.0f, 36.0f}) {
    Case c{.op = op_, .shape = {tokens, hidden, vocab}, .dtype = dtype_, .grad_input = DType::f32};
    c.options.reduction = Reduction::sum;
    c.options.softcap = cap;
    c.options.label_smoothing = 1e-3f;
    with_problem(c, [&](auto& p, const WorkspaceSize& size) {
      std::vector<double> input(tokens * hidden, 0), weight(vocab * hidden, 0);
      for (int64_t i = 0; i < tokens; ++i) {
        const double share = 0.925 + 0.0125 * static_cast<double>(i) / tokens;
        double* row = &input[i * hidden];
        row[0] = round_to(dtype_, cap * std::atanh(share));
        row[1] = round_to(dtype_, cap * std::atanh(share) - row[0]);
        row[2] = 0.5 * static_cast<double>(i * 37 % 64) / 64;
      }
      for (int64_t j = 0; j < vocab; ++j) {
        double* row = &weight[j * hidden];
        row[0] = row[1] = -1;
        // Element 2 lowers the target's logit; element 3 of grad_input sums the other columns' dz.
        row[j == 0 ? 2 : 3] = j == 0 ? -1 : 1;
      }
      write(p.op.input, input);
      write(p.op.weight, weight);
      write(p.op.target, std::vector<double>(tokens, 0));
      const Comparison result = compared(p, size, 1, expected(device_, p.op, p.model));
      EXPECT_TRUE(result.ok()) << cap << "\n" << result.report;
    });
  }
}

// With a softcap and smoothing dz overwrites E, and grad_bias sums its columns: over several slabs
// of rows, and more columns than the slabs' sums have room for at a time.
TEST_P(CudaLinear, BiasGradientOfLogitsUnderACapAndSmoothing) {
  if (op_ != OpKind::linear_forward_backward || dtype_ != DType::bf16) return;
  Case c{.op = op_,
         .shape = {1500, 24, 16700},
         .dtype = dtype_,
         .grad_input = DType::f32,
         .grad_weight = DType::f32,
         .ignored = 0.2,
         .bias = true,
         .vocab_weight = true,
         .wants_grad_bias = true};
  c.options.softcap = 20;
  c.options.label_smoothing = 0.1f;
  for (const Data data : {Data::normal, Data::large}) {  // usual logits, and near the cap
    c.data = data;
    with_problem(c, [&](auto& p, const WorkspaceSize& size) {
      const reference::Result want = expected(device_, p.op, p.model);
      // One share leads to chunks of one slab, the other to all rows at once.
      for (const double share : {1.0, 3.0}) {
        const Comparison result = compared(p, size, share, want);
        EXPECT_TRUE(result.ok()) << result.report << share;
      }
    });
  }
}

// The vocabulary has more panels than the workspace holds. On Hopper, rows of grad_weight that are
// not yet written hold E and dz of earlier columns, and the scaled input.
TEST_P(CudaLinear, PanelsInGradWeightsMemory) {
  if (dtype_ == DType::f32) return;
  const Case plain{.op = op_,
                   .shape = {140, 64, 12001},
                   .dtype = dtype_,
                   .grad_input = dtype_,
                   .grad_weight = dtype_};
  Case sums = plain, smoothed = plain;
  sums.grad_weight = DType::f32;
  smoothed.options.label_smoothing = 0.1;
  smoothed.vocab_weight = smoothed.bias = true;
  smoothed.bias_dtype = dtype_;
  smoothed.ignored = 0.3;
  Case capped = smoothed;
  capped.options.softcap = 20;  // dz overwrites E
  Case full = smoothed;         // no one-hot term: smoothing alone balances p
  full.options.label_smoothing = 1;
  Case at_cap = capped;  // most logits are the cap
  at_cap.data = Data::large;
  Case wide = smoothed;  // more than one piece of a panel for grad_bias
  wide.shape = {66, 64, 17000};
  for (const Case& c : {plain, sums, smoothed, full, capped, at_cap, wide}) {
    with_problem(c, [&](auto& p, const WorkspaceSize& size) {
      const reference::Result want = expected(device_, p.op, p.model);
      for (const double share : {0.0, 0.2, 0.7, 1.0}) {
        const Comparison result = compared(p, size, share, want);
        EXPECT_TRUE(result.ok()) << result.report << ", share " << share;
      }
    });
  }
}

// On Hopper a warpgroup has 128 rows and a block 256. With so few tokens the other blocks of a
// cluster work on other columns.
TEST_P(CudaLinear, TokensAboutAWarpgroupsAndABlocks) {
  if (dtype_ == DType::f32) return;
  for (const int64_t tokens : {1, 63, 64, 128, 129, 255, 256, 257}) {
    Case plain{.op = op_,
               .shape = {tokens, 200, 1201},
               .dtype = dtype_,
               .grad_input = dtype_,
               .grad_weight = dtype_};
    Case all = plain;
    all.options.label_smoothing = 0.1;
    all.options.softcap = 20;
    all.vocab_weight = all.bias = true;
    for (const Case& c : {plain, all}) {
      with_problem(c, [&](auto& p, const WorkspaceSize& size) {
        const reference::Result want = expected(device_, p.op, p.model);
        for (const double share : {0.0, 1.0}) {
          const Comparison result = compared(p, size, share, want);
          EXPECT_TRUE(result.ok()) << result.report << ", " << tokens << " tokens";
        }
      });
    }
  }
}

std::vector<std::string> cuda_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}

// Few tokens of a large vocabulary: cuBLASLt may split the depth of grad_input in f32, because the
// call lends it the block of logits (recorded_test.cpp). It adds the parts in a fixed order; the
// previous contents of their memory do not matter.
TEST_P(CudaLinear, ProductsOfASplitDepthRepeatTheirBits) {
  if (dtype_ != DType::f32) return;
  const Case c{.op = op_, .shape = {130, 64, 30000}, .dtype = dtype_};
  with_problem(c, [&](auto& p, const WorkspaceSize& size) {
    const reference::Result want = expected(device_, p.op, p.model);
    RunPlan how{.memory = Memory::exact, .bytes = size.recommended, .fill = std::byte{0}};
    const Outcome first = execute(device_, p.op, p.pool, how);
    const Comparison result = compare(want, first);
    EXPECT_TRUE(result.ok()) << result.report;
    how.fill = std::byte{0xFF};
    for (int i = 0; i < 20 && first.status.ok(); ++i) {
      const Outcome again = execute(device_, p.op, p.pool, how);
      EXPECT_EQ(differing_bits(first.fields, again.fields), "") << "run " << i;
    }
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaLinear);
INSTANTIATE_TEST_SUITE_P(All, CudaLinear,
                         testing::Combine(testing::ValuesIn(cuda_alone()),
                                          testing::ValuesIn(kGradientOps),
                                          testing::ValuesIn(inputs())),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
