// SPDX-License-Identifier: Apache-2.0
// WebGPU's promises beyond the contract's common part: limits are respected, memory is as
// predicted, errors of the device become statuses with its message, and the caller may bring the
// device and buffers.
#include "logitless/webgpu.h"

#include <cmath>
#include <limits>

#include "src/webgpu/native.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class WebGpu : public testing::Test {
 protected:
  WebGpu() {
    Status status;
    native_ = webgpu::find_device(0, &status);
    limits_ = native_->limits();
  }
  ~WebGpu() override { native_->set_limits(limits_); }
  Case everything(OpKind op, DType dtype, Shape shape) const {
    Case c{.op = op, .shape = shape, .dtype = dtype};
    apply_everything(c);
    return c;
  }
  // Gives every tensor its own buffer.
  static LinearCrossEntropyForward in_buffers(LinearCrossEntropyForward op, DeviceCopy* copy) {
    logitless_op unused{};
    for_each_tensor(op, unused, [&](const char*, Access, TensorView& view, auto&&) {
      if (view) view = copy->input(view);
    });
    return op;
  }
  static void expect_ok(const Comparison& c) { EXPECT_TRUE(c.ok()) << c.report; }

  const TestDevice& device_ = device("webgpu");
  webgpu::NativeDevice* native_ = nullptr;
  webgpu::Limits limits_;
};

TEST_F(WebGpu, TokensAndVocabularyBeyondOneBinding) {
  webgpu::Limits small = limits_;
  small.storage_binding_bytes = 40 << 10;
  small.buffer_bytes = 1 << 22;
  native_->set_limits(small);
  for (const OpKind op :
       {OpKind::softmax, OpKind::forward_backward, OpKind::linear_forward_backward}) {
    for (const Placement placement : {Placement::dense, Placement::transposed}) {
      Case c = everything(op, DType::f32, {60, 5, 2100});
      c.placement = placement;
      c.options.reduction = Reduction::mean;
      // Class weights would all have to fit one binding.
      c.vocab_weight = false;
      expect_ok(judge(device_, c));
    }
  }
}

TEST_F(WebGpu, AWindowMakesTheSameLossesAsTheWhole) {
  Case c{.op = OpKind::linear_forward, .shape = {9, 20, 5000}, .statistics = true};
  c.options.reduction = Reduction::none;
  const Outcome whole = run_case(device_, c);
  webgpu::Limits small = limits_;
  small.storage_binding_bytes = 1 << 17;
  native_->set_limits(small);
  EXPECT_EQ(differing_bits(whole.fields, run_case(device_, c).fields), "");
}

// Products large enough for every tile (webgpu_plan_test shows which tiles these shapes take), with
// ragged ends, grad_input in slices of the vocabulary, and ignored tokens that leave rows of a tile
// empty.
TEST_F(WebGpu, LargeTilesAndSlices) {
  const RunPlan ample{.memory = Memory::exact, .bytes = uint64_t{64} << 20};
  for (const Shape shape :
       {Shape{131, 40, 16801}, Shape{61, 263, 4501}, Shape{133, 131, 4098}, Shape{40, 24, 3000}}) {
    Case c{.op = OpKind::linear_forward_backward, .shape = shape, .bias = true};
    c.wants_grad_bias = true;
    c.options.reduction = Reduction::mean;
    expect_ok(judge(device_, c, ample));
    c.bias = c.wants_grad_bias = false;
    c.ignored = 0.5;
    expect_ok(judge(device_, c, {}));
  }
}

// A class that is the target of one token gets a large term and hundreds of small terms of one
// sign, each of which could lose as much as the sum is rounded by. Both kinds of tiles add it up,
// in one chunk and in several.
TEST_F(WebGpu, ManySmallTermsAfterALargeOne) {
  for (const Shape shape : {Shape{261, 17, 17001}, Shape{200, 4, 17001}}) {
    Case c{.op = OpKind::linear_forward_backward, .shape = shape, .data = Data::constant};
    c.wants_grad_input = false;
    c.wants_grad_bias = true;
    expect_ok(judge(device_, c, {.memory = Memory::exact, .bytes = uint64_t{64} << 20}));
    expect_ok(judge(device_, c));
    c.ignored = 0.5;
    expect_ok(judge(device_, c));
  }
}

// The target's term of grad_input is large, and hundreds of small terms after it each lose as much
// as the sum is rounded by. For these values a single running sum exceeds the bound; a sum in
// blocks does not.
TEST_F(WebGpu, ManySmallClassesAfterALargeTarget) {
  int found = 0;
  for (const Pair& pair : feature_pairs(OpKind::linear_backward, DType::f32)) {
    Case c = case_of(OpKind::linear_backward, DType::f32, pair);
    const bool alone = c.grad_loss || c.grad_lse || c.grad_entropy || c.token_weight;
    if (!c.bias || !c.grad_target_logit || alone || c.vocab_weight) continue;
    c.shape = {67, 19, 453};
    c.saved_state = true;
    expect_ok(judge(device_, c));
    ++found;
  }
  EXPECT_GT(found, 0);
}

// Row lengths around what each number of threads reads once, and longer rows, for the kernel of
// plain calls and the others.
TEST_F(WebGpu, RowsOfEveryLength) {
  for (const int64_t vocab : {255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 12287}) {
    for (const OpKind op : {OpKind::forward_backward, OpKind::softmax}) {
      Case c{.op = op, .shape = {19, 1, vocab}, .in_place = true};
      c.ignored = op == OpKind::softmax ? 0 : 0.2;
      expect_ok(judge(device_, c));
      c.statistics = op != OpKind::softmax;
      expect_ok(judge(device_, c));
    }
    Case scaled{.op = OpKind::backward, .shape = {19, 1, vocab}};
    scaled.options.logit_scale = -0.5f;
    scaled.options.z_loss = 0.1f;
    scaled.outside = 0.2;
    expect_ok(judge(device_, scaled));
    scaled.op = OpKind::forward_backward;
    expect_ok(judge(device_, scaled));
  }
}

// More normalizer terms and losses than one workgroup sums.
TEST_F(WebGpu, SumsOfManyTokens) {
  for (const int64_t tokens : {1024, 1025, 5003}) {
    for (const bool weighted : {false, true}) {
      Case c{.op = OpKind::forward_backward, .shape = {tokens, 1, 3}, .vocab_weight = weighted};
      c.ignored = 0.3;
      expect_ok(judge(device_, c));
      c.options.reduction = Reduction::sum;
      expect_ok(judge(device_, c));
    }
  }
  // The last sum has 264 values; a workgroup adds 256 at a time.
  Case c{.op = OpKind::forward_backward, .shape = {270000, 1, 3}, .vocab_weight = true};
  c.ignored = 0.3;
  expect_ok(judge(device_, c));
}

// With 16, 4 or 1 rows per workgroup, there are more workgroups than a grid's x dimension allows.
TEST_F(WebGpu, PlainRowsInTwoDimensionsOfAGrid) {
  webgpu::Limits small = limits_;
  small.groups = 20;
  native_->set_limits(small);
  for (const Shape shape : {Shape{500, 1, 70}, Shape{131, 1, 700}, Shape{41, 1, 4099}}) {
    Case c{.op = OpKind::forward_backward, .shape = shape, .in_place = true};
    c.ignored = 0.2;
    expect_ok(judge(device_, c));
  }
}

// Masks, infinities and NaN in rows of plain calls, and in a row that does not count.
TEST_F(WebGpu, PlainRowsOfWhatIsNoNumber) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kLowest = std::numeric_limits<float>::lowest();
  for (const int64_t vocab : {70, 700, 4096, 4099}) {
    Case c{.op = OpKind::forward_backward, .shape = {9, 1, vocab}};
    c.options.reduction = Reduction::sum;
    auto p = build<CrossEntropyForwardBackward>(c);
    std::vector<double> z = read(p.op.logits), target = read(p.op.target);
    const auto row = [&](int64_t i) { return z.data() + i * vocab; };
    row(0)[vocab - 1] = std::nan("");
    row(1)[3] = kInf;
    std::fill_n(row(2), vocab, -kInf);
    std::fill_n(row(3), vocab / 2, -kInf);
    row(4)[static_cast<size_t>(target[4])] = -kInf;
    std::fill_n(row(5), vocab, kLowest);
    std::fill_n(row(6), vocab, kLowest);
    row(6)[vocab - 1] = 1;
    target[7] = static_cast<double>(c.options.ignore_index);
    row(7)[5] = std::nan("");
    write(p.op.logits, z);
    write(p.op.target, target);
    const Comparison all =
        compare(expected(device_, p.op, p.model), execute(device_, p.op, p.pool));
    EXPECT_TRUE(all.ok()) << vocab << "\n" << all.report;
    for (int64_t i : {0, 1, 2, 4}) row(i)[0] = 0, std::fill_n(row(i), vocab, 0.5);
    write(p.op.logits, z);
    const Comparison finite =
        compare(expected(device_, p.op, p.model), execute(device_, p.op, p.pool));
    EXPECT_TRUE(finite.ok()) << vocab << "\n" << finite.report;
  }
}

// A long row is written starting at a 32-column boundary in memory, which is another column in
// every row.
TEST_F(WebGpu, TheBitsOfALongRowDoNotDependOnItsPlace) {
  for (const int64_t vocab : {4099, 9001}) {
    Case c{.op = OpKind::forward_backward, .shape = {33, 1, vocab}};
    auto p = build<CrossEntropyForwardBackward>(c);
    std::vector<double> z = read(p.op.logits), target(33, 17);
    for (int64_t i = 1; i < 33; ++i) std::copy_n(z.begin(), vocab, z.begin() + i * vocab);
    write(p.op.logits, z);
    write(p.op.target, target);
    const Outcome outcome = execute(device_, p.op, p.pool);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
    const std::vector<std::byte>& bits = outcome.fields.at("grad_logits").bits;
    const auto bytes = static_cast<ptrdiff_t>(4 * vocab);
    for (int64_t i = 1; i < 33; ++i) {
      EXPECT_TRUE(std::equal(bits.begin(), bits.begin() + bytes, bits.begin() + i * bytes)) << i;
    }
  }
}

// Counts buffers at creation.
TEST_F(WebGpu, TheMemoryOfACallIsThePredictedOne) {
  for (const OpKind op : {OpKind::linear_forward, OpKind::linear_forward_backward}) {
    const Case c{.op = op, .shape = {130, 33, 2100}, .bias = true, .wants_grad_bias = true};
    with_op(op, [&](auto typed) {
      const auto p = build<decltype(typed)>(c);
      const WorkspaceSize size = workspace_of(device_, c);
      for (const uint64_t bytes : {size.minimum, size.recommended}) {
        (void)execute(device_, p.op, p.pool, {.memory = Memory::exact, .bytes = bytes});
        const uint64_t before = native_->allocated();
        native_->forget_most_allocated();
        const Outcome outcome =
            execute(device_, p.op, p.pool, {.memory = Memory::exact, .bytes = bytes});
        ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
        EXPECT_EQ(native_->most_allocated() - before, bytes);
        EXPECT_EQ(native_->allocated(), before);
      }
    });
  }
}

TEST_F(WebGpu, AnInvalidShaderIsAnErrorInItsOwnWords) {
  const std::lock_guard lock(native_->mutex());
  EXPECT_EQ(native_->pipeline_of_text("@compute @workgroup_size(1) fn f() { let x: u32 = 1.5; }",
                                      "f", nullptr, 0),
            0u);
  const char* why = native_->error();
  ASSERT_NE(why, nullptr);
  EXPECT_NE(std::string(why).find("x: u32"), std::string::npos) << why;
  EXPECT_EQ(native_->pipeline("no such shader", "f", nullptr, 0), 0u);
  EXPECT_NE(native_->error(), nullptr);
  // Work recorded together with it is not submitted; later work is.
  native_->dispatch(0, nullptr, 0, 1, 1, 1);
  EXPECT_FALSE(native_->submit());
  EXPECT_TRUE(native_->submit());
}

TEST_F(WebGpu, AViewBeyondItsBufferIsAStatusAndNothingIsLost) {
  const Case c{.op = OpKind::linear_forward, .shape = {4, 8, 50}};
  auto p = build<LinearCrossEntropyForward>(c);
  DeviceCopy copy(device_, p.pool);
  LinearCrossEntropyForward op = in_buffers(p.op, &copy);
  place(op, device_.tensors());
  op.weight.byte_offset += 1 << 20;
  WorkspaceSize size;
  ASSERT_TRUE(workspace(op, device_.execution(), &size).ok());
  const WebGpuWorkspace scratch(0, size.recommended);
  ASSERT_TRUE(scratch.status().ok());
  const Status status = run(op, scratch.workspace(), device_.execution());
  EXPECT_EQ(status.code(), StatusCode::device_error);
  EXPECT_NE(std::string(status.message()).find("webgpu"), std::string::npos) << status.message();
  expect_ok(judge(device_, c));
}

TEST_F(WebGpu, ABufferTooLargeIsAnErrorInItsOwnWords) {
  const std::lock_guard lock(native_->mutex());
  EXPECT_EQ(native_->create_buffer(uint64_t{1} << 50), 0u);
  EXPECT_NE(native_->error(), nullptr);
}

TEST_F(WebGpu, AWorkspaceOfAnotherDeviceOrTooSmallABudgetIsRefused) {
  const Case c{.op = OpKind::linear_forward, .shape = {4, 8, 50}};
  const WorkspaceSize size = workspace_of(device_, c);
  const WebGpuWorkspace scratch(0, size.minimum - 1);
  auto p = build<LinearCrossEntropyForward>(c);
  DeviceCopy copy(device_, p.pool);
  LinearCrossEntropyForward op = in_buffers(p.op, &copy);
  place(op, device_.tensors());
  EXPECT_EQ(run(op, scratch.workspace(), device_.execution()).code(),
            StatusCode::workspace_too_small);
  Workspace lies = scratch.workspace();
  lies.bytes = size.minimum;
  EXPECT_EQ(run(op, lies, device_.execution()).code(), StatusCode::invalid_argument);
}

TEST_F(WebGpu, TwoTensorsInABufferAreRefusedWhereOneIsWritten) {
  const Case c{.op = OpKind::linear_forward, .shape = {4, 8, 50}};
  auto p = build<LinearCrossEntropyForward>(c);
  DeviceCopy copy(device_, p.pool);
  LinearCrossEntropyForward op = in_buffers(p.op, &copy);
  place(op, device_.tensors());
  WorkspaceSize size;
  ASSERT_TRUE(workspace(op, device_.execution(), &size).ok());
  const WebGpuWorkspace scratch(0, size.recommended);
  LinearCrossEntropyForward shared = op;
  shared.loss.data = op.weight.data;
  Status status = run(shared, scratch.workspace(), device_.execution());
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_NE(std::string(status.message()).find("loss and weight"), std::string::npos)
      << status.message();
  shared = op;
  shared.weight.byte_offset += 2;
  status = run(shared, scratch.workspace(), device_.execution());
  EXPECT_EQ(status.code(), StatusCode::misaligned);
}

// A program with its own device; the test uses the library's handles as that device.
TEST_F(WebGpu, TheCallersDeviceAndBuffers) {
  void *instance, *handle, *queue;
  Status status;
  ASSERT_EQ(logitless_webgpu_device(0, &instance, &handle, &queue, status.c()), LOGITLESS_OK);
  int32_t index = 0, again = 0;
  ASSERT_EQ(logitless_webgpu_use_device(instance, handle, queue, &index, status.c()), LOGITLESS_OK);
  ASSERT_EQ(logitless_webgpu_use_device(instance, handle, queue, &again, status.c()), LOGITLESS_OK);
  EXPECT_GT(index, 0);
  EXPECT_EQ(index, again);
  Case c{.op = OpKind::linear_forward, .shape = {4, 8, 50}};
  c.options.reduction = Reduction::none;
  auto p = build<LinearCrossEntropyForward>(c);
  DeviceCopy copy(device_, p.pool);
  LinearCrossEntropyForward op = in_buffers(p.op, &copy);
  const Device theirs{DeviceType::webgpu, index};
  place(op, theirs);
  WorkspaceSize size;
  ASSERT_TRUE(workspace(op, {.device = theirs}, &size).ok());
  const WebGpuWorkspace scratch(index, size.recommended);
  copy.upload();
  status = run(op, scratch.workspace(), {.device = theirs});
  ASSERT_TRUE(status.ok()) << status.message();
  copy.download();
  const reference::Result want = expected(device_, p.op, p.model);
  Fields got{{"loss", copy.field(p.op.loss)}};
  expect_ok(compare(want, got));
}

TEST_F(WebGpu, AnUnknownDeviceIsRefused) {
  const Case c{.op = OpKind::linear_forward, .shape = {4, 8, 50}};
  auto p = build<LinearCrossEntropyForward>(c);
  place(p.op, {DeviceType::webgpu, 99});
  WorkspaceSize size;
  const Status status = workspace(p.op, {.device = {DeviceType::webgpu, 99}}, &size);
  EXPECT_EQ(status.code(), StatusCode::wrong_device);
  for (const int32_t index : {-1, 99}) {
    void* made = nullptr;
    EXPECT_EQ(logitless_webgpu_create_workspace(index, 1 << 20, &made, nullptr),
              static_cast<int32_t>(StatusCode::wrong_device));
    EXPECT_EQ(made, nullptr);
  }
}

}  // namespace
}  // namespace logitless::conformance
