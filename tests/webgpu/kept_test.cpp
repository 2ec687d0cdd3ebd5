// SPDX-License-Identifier: Apache-2.0
// WebGPU's promises about kept state beyond the contract: it changes no bit of Forward or Backward,
// for any kept share and any chunks and windows; and Backward does read it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/webgpu/native.h"
#include "tests/support/fixture.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

using Forward = LinearCrossEntropyForward;
using Backward = LinearCrossEntropyBackward;

constexpr int64_t kTokens = 130, kRows = 192;  // two chunks in the minimum workspace
constexpr int64_t kVocab = 4301;               // five windows, and two slabs of what is kept
constexpr int64_t kSlab = 4096;

Case two_slabs(DType dtype) {
  Case c{.op = OpKind::linear_backward, .shape = {kTokens, 12, kVocab}, .dtype = dtype};
  c.options.reduction = Reduction::none;
  c.options.softcap = 20;
  c.grad_loss = c.grad_lse = c.fault = c.bias = true;
  c.ignored = 0.2;
  return c;
}

void copy_bits(const TensorView& view, const Field& field) {
  std::memcpy(view.as<std::byte>(), field.bits.data(), field.bits.size());
}

std::vector<int64_t> rows_of_nan(const Field& field) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < field.shape[0]; ++row) {
    if (std::isnan(field.value[static_cast<size_t>(row * field.shape[1])])) rows.push_back(row);
  }
  return rows;
}

class WebGpuKept : public testing::Test {
 protected:
  WebGpuKept() {
    Status status;
    native_ = webgpu::find_device(0, &status);
    limits_ = native_->limits();
  }
  ~WebGpuKept() override { native_->set_limits(limits_); }

  // Builds a Forward that keeps `blocks` blocks of 64 columns (0: all), and its Backward.
  void begin(const Case& c, int64_t blocks) {
    problem_ = build<Backward>(c);
    Backward& op = problem_.op;
    forward_ = {.input = op.input, .weight = op.weight, .bias = op.bias, .target = op.target};
    forward_.options = op.options;
    Pool& pool = problem_.pool;
    const std::vector<int64_t> tokens{c.shape.tokens};
    const bool none = c.options.reduction == Reduction::none;
    if (c.options.vocab_total == 0) {
      forward_.loss = pool.reserve(DType::f32, none ? tokens : std::vector<int64_t>{});
    }
    forward_.statistics.logprob = pool.reserve(DType::f32, tokens);
    forward_.statistics.row_reference = op.row_reference = pool.reserve(DType::f32, tokens);
    forward_.statistics.row_log_sum = op.row_log_sum = pool.reserve(DType::f32, tokens);
    const uint64_t block = 64 * kRows * static_cast<uint64_t>(size_of(c.dtype));
    const uint64_t bytes = blocks == 0 ? std::numeric_limits<uint64_t>::max()
                                       : 32 * kTokens + static_cast<uint64_t>(blocks) * block;
    Forward asked = forward_;
    place(asked, device_.tensors());
    Kept kept;
    const Status status = kept_size(asked, device_.execution(), bytes, &kept);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_GT(kept.columns, 0);
    forward_.kept = op.kept = pool.reserve(c.dtype, {kept.shape[0], kept.shape[1]});
    forward_.kept_rows = op.kept_rows =
        pool.reserve(DType::f32, {kept.rows_shape[0], kept.rows_shape[1]});
    op.kept_key = kept.key;
  }
  template <class Op>
  Outcome execute_in(const Op& op, const RunPlan& plan) {
    Outcome outcome = execute(device_, op, problem_.pool, plan);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    EXPECT_TRUE(outcome.violations.empty()) << outcome.violations[0];
    return outcome;
  }
  // Runs Forward and gives Backward the state that it wrote.
  Outcome keep(Memory memory) {
    Outcome outcome = execute_in(forward_, {memory});
    Backward& op = problem_.op;
    copy_bits(op.row_reference, outcome.fields.at("row_reference"));
    copy_bits(op.row_log_sum, outcome.fields.at("row_log_sum"));
    copy_bits(op.kept, outcome.kept.at("kept"));
    copy_bits(op.kept_rows, outcome.kept.at("kept_rows"));
    return outcome;
  }
  template <class Op>
  static Op without_kept(Op op) {
    op.kept = op.kept_rows = {};
    if constexpr (std::is_same_v<Op, Backward>) op.kept_key = 0, op.consume_kept = false;
    return op;
  }
  // Returns a word of kept_rows for each token that counts.
  std::vector<double> of_rows(const Outcome& outcome, size_t word) const {
    const std::vector<double> target = read(problem_.op.target);
    std::vector<double> all;
    for (size_t i = 0; i < target.size(); ++i) {
      if (target[i] >= 0) all.push_back(outcome.kept.at("kept_rows").value[i * 8 + word]);
    }
    return all;
  }
  void expect_rows(const Outcome& outcome, double layout, double columns) const {
    for (const double x : of_rows(outcome, 5)) ASSERT_EQ(x, layout);
    for (const double x : of_rows(outcome, 6)) ASSERT_EQ(x, columns);
  }

  const TestDevice& device_ = device("webgpu");
  webgpu::NativeDevice* native_ = nullptr;
  webgpu::Limits limits_;
  Problem<Backward> problem_;
  Forward forward_{};
};

struct Share {
  DType dtype;
  int64_t blocks, columns;  // room for these blocks keeps these columns
};

TEST_F(WebGpuKept, ChangesNoBit) {
  for (const Share& share : {Share{DType::f32, 0, kVocab}, Share{DType::f32, 3, 192},
                             Share{DType::f32, 66, 4224}, Share{DType::bf16, 0, 2176}}) {
    begin(two_slabs(share.dtype), share.blocks);
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      SCOPED_TRACE(std::to_string(share.columns) + " columns");
      const Outcome kept = keep(memory), plain = execute_in(without_kept(forward_), {memory});
      EXPECT_EQ(differing_bits(kept.fields, plain.fields), "");
      EXPECT_EQ(kept.given, plain.given);
      expect_rows(kept, 3, static_cast<double>(share.columns));
      // Backward may use other chunks and windows than Forward.
      for (const Memory other : {Memory::minimum, Memory::recommended}) {
        const Outcome used = execute_in(problem_.op, {other});
        const Outcome again = execute_in(without_kept(problem_.op), {other});
        EXPECT_EQ(differing_bits(used.fields, again.fields), "");
        EXPECT_EQ(used.given, again.given);
        EXPECT_EQ(used.fault, 0);
        expect_rows(used, 3, static_cast<double>(share.columns));
      }
    }
  }
}

// With a workspace for everything, both calls have one chunk, one window and equal slices.
TEST_F(WebGpuKept, TheSameBitsAsInOneCall) {
  for (const float upstream : {1.0f, -0.3f}) {
    Case c = two_slabs(DType::f32);
    c.grad_lse = false;
    c.options.reduction = Reduction::sum;
    begin(c, 0);
    keep(Memory::minimum);
    Backward& op = problem_.op;
    write(op.grad_loss, {upstream});
    LinearCrossEntropyForwardBackward both{.input = op.input, .weight = op.weight, .bias = op.bias};
    both.target = op.target, both.options = op.options, both.grad_loss = op.grad_loss;
    both.grad_input = op.grad_input, both.grad_weight = op.grad_weight;
    both.grad_bias = op.grad_bias, both.loss = problem_.pool.reserve(DType::f32, {1});
    const RunPlan ample{.memory = Memory::exact, .bytes = uint64_t{64} << 20};
    Outcome one = execute_in(both, ample);
    one.fields.erase("loss");
    EXPECT_EQ(differing_bits(one.fields, execute_in(op, ample).fields), "");
  }
}

// NaN in kept logits shows in the gradients of their tokens and columns, and nowhere else.
TEST_F(WebGpuKept, AreReadWhereTheyLie) {
  for (const int64_t blocks : {0, 66}) {
    Case c = two_slabs(DType::f32);
    c.ignored = 0;
    begin(c, blocks);
    keep(Memory::recommended);
    const int64_t columns = blocks == 0 ? kVocab : 64 * blocks;
    const std::vector<int64_t> of_tokens{0, 1, 3, 127, 128},
        of_columns{0, 1023, kSlab - 1, kSlab, columns - 1};
    std::vector<double> kept = read(problem_.op.kept);
    for (size_t i = 0; i < of_tokens.size(); ++i) {
      const int64_t slab = of_columns[i] / kSlab * kSlab;
      const int64_t width = std::min(kSlab, (columns - slab + 31) / 32 * 32);
      const int64_t at = slab * kRows + of_tokens[i] * width + of_columns[i] - slab;
      kept[static_cast<size_t>(at)] = std::nan("");
    }
    write(problem_.op.kept, kept);
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome outcome = execute_in(problem_.op, {memory});
      EXPECT_EQ(rows_of_nan(outcome.fields.at("grad_input")), of_tokens);
      EXPECT_EQ(rows_of_nan(outcome.fields.at("grad_weight")), of_columns);
    }
  }
}

// Neither kept logits nor states of tokens without a gradient are read.
TEST_F(WebGpuKept, NothingOfTokensWithoutAGradient) {
  for (const int64_t blocks : {0, 66}) {
    begin(two_slabs(DType::f32), blocks);
    keep(Memory::recommended);
    Backward& op = problem_.op;
    std::vector<double> loss = read(op.grad_loss), lse = read(op.grad_lse);
    for (size_t i = 0; i < loss.size(); i += 3) loss[i] = lse[i] = 0;
    write(op.grad_loss, loss), write(op.grad_lse, lse);
    const Outcome before = execute_in(op, {Memory::recommended});
    std::vector<double> kept = read(op.kept), rows = read(op.kept_rows), input = read(op.input);
    const auto put_nan = [](std::vector<double>* values, size_t row, size_t columns) {
      std::fill_n(values->begin() + static_cast<int64_t>(row * columns), columns, std::nan(""));
    };
    for (size_t i = 0; i < loss.size(); i += 3) {
      put_nan(&kept, i, static_cast<size_t>(kSlab));
      put_nan(&rows, i, 8);
      put_nan(&input, i, 12);
    }
    write(op.kept, kept), write(op.kept_rows, rows), write(op.input, input);
    for (const Memory memory : {Memory::minimum, Memory::recommended}) {
      const Outcome after = execute_in(op, {memory});
      EXPECT_EQ(after.fault, 0);
      EXPECT_EQ(rows_of_nan(after.fields.at("grad_weight")), std::vector<int64_t>{});
      if (memory == Memory::minimum) continue;
      EXPECT_EQ(differing_bits(before.fields, after.fields), "");
    }
  }
}

// The state of a row of NaN is compared by its bits.
TEST_F(WebGpuKept, RowsOfNoNumberAreTheirOwn) {
  Case c = two_slabs(DType::f32);
  c.ignored = 0;
  begin(c, 3);
  std::vector<double> input = read(problem_.op.input);
  for (size_t d = 0; d < 12; ++d) {
    input[5 * 12 + d] = std::nan("");
    input[6 * 12 + d] = std::numeric_limits<double>::infinity();
  }
  write(problem_.op.input, input);
  problem_.op.grad_weight = {};
  keep(Memory::minimum);
  const Outcome used = execute_in(problem_.op, {Memory::minimum});
  EXPECT_EQ(used.fault, 0);
  EXPECT_EQ(
      differing_bits(used.fields, execute_in(without_kept(problem_.op), {Memory::minimum}).fields),
      "");
}

TEST_F(WebGpuKept, ConsumedRowsSaySo) {
  begin(two_slabs(DType::f32), 3);
  keep(Memory::minimum);
  problem_.op.consume_kept = true;
  expect_rows(execute_in(problem_.op, {Memory::minimum}), 0, 192);
}

// A device below the default limits keeps nothing, and rejects what another device kept.
TEST_F(WebGpuKept, SmallerLimitsKeepNothing) {
  begin(two_slabs(DType::f32), 66);
  keep(Memory::recommended);
  webgpu::Limits small = limits_;
  small.storage_binding_bytes = 1 << 20;
  native_->set_limits(small);
  EXPECT_EQ(execute_in(problem_.op, {Memory::recommended}).fault, 2);
  expect_rows(keep(Memory::recommended), 3, 0);
  const Outcome used = execute_in(problem_.op, {Memory::recommended});
  const Outcome again = execute_in(without_kept(problem_.op), {Memory::recommended});
  EXPECT_EQ(differing_bits(used.fields, again.fields), "");
  EXPECT_EQ(used.fault, 0);
}

}  // namespace
}  // namespace logitless::conformance
