// SPDX-License-Identifier: Apache-2.0
// The native WebGPU device over a fake wgpu-native (paper_wgpu.h): a failure is not remembered, a
// late callback writes nowhere, and work that could not be recorded completely is never submitted.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <cstdlib>
#include <string>

#include "logitless/webgpu.h"
#include "paper_wgpu.h"
#include "src/webgpu/library.h"
#include "src/webgpu/native.h"

namespace logitless::webgpu {
namespace {

// Answers that main() recorded: before and after the library is named, and an adapter exists.
Status without_library, with_library, without_adapter, with_adapter;

bool mentions(const Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

bool is_on_the_stack(const void* address) {
  pthread_attr_t attributes;
  void* low = nullptr;
  size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &bytes);
  pthread_attr_destroy(&attributes);
  const auto at = reinterpret_cast<uintptr_t>(address), first = reinterpret_cast<uintptr_t>(low);
  return at >= first && at - first < bytes;
}

class WebGpuLibrary : public testing::Test {
 protected:
  WebGpuLibrary() {
    Status status;
    device_ = find_device(0, &status);
    paper_.userdata.clear();
    paper_.userdata.reserve(64);
  }
  ~WebGpuLibrary() override {
    paper_.answers = true;
    paper_.fails_scopes = false;
    (void)device_->error();
  }
  void answer_late() {
    paper_.answers = true;
    for (const auto& answer : paper_.late) answer();
    paper_.late.clear();
  }
  void expect_nothing_open() {
    EXPECT_EQ(paper_.scopes, 0);
    EXPECT_EQ(paper_.encoders, 0);
  }

  PaperWgpu& paper_ = paper_wgpu();
  NativeDevice* device_ = nullptr;
};

TEST_F(WebGpuLibrary, ALibraryThatWasNotThereIsLookedForAgain) {
  EXPECT_EQ(without_library.code(), StatusCode::backend_unavailable);
  EXPECT_TRUE(mentions(without_library, "no wgpu-native was found")) << without_library.message();
  EXPECT_TRUE(with_library.ok()) << with_library.message();
}

TEST_F(WebGpuLibrary, AnAdapterThatWasNotThereIsAskedForAgain) {
  EXPECT_EQ(without_adapter.code(), StatusCode::backend_unavailable);
  EXPECT_TRUE(mentions(without_adapter, "no adapter: none on paper")) << without_adapter.message();
  EXPECT_TRUE(with_adapter.ok()) << with_adapter.message();
  EXPECT_EQ(paper_.instances, 1);  // the instance that failed was released
  EXPECT_EQ(paper_.adapters, 0);
}

TEST_F(WebGpuLibrary, AnErrorScopeThatIsNotAnsweredIsAnError) {
  paper_.answers = false;
  EXPECT_EQ(device_->create_buffer(16), 0u);
  const char* why = device_->error();
  ASSERT_NE(why, nullptr);
  EXPECT_NE(std::string(why).find("not answered"), std::string::npos) << why;
  // The late answer belongs to a call that has returned, so no later call reports it.
  paper_.fails_scopes = true;
  answer_late();
  paper_.fails_scopes = false;
  EXPECT_EQ(device_->error(), nullptr);
  EXPECT_NE(device_->create_buffer(16), 0u);
  expect_nothing_open();
}

TEST_F(WebGpuLibrary, AScopesWordsAreOneLine) {
  paper_.fails_scopes = true;
  EXPECT_EQ(device_->create_buffer(16), 0u);
  EXPECT_STREQ(device_->error(), "webgpu: In wgpuPaper refused on paper");
  EXPECT_EQ(device_->error(), nullptr);
}

TEST_F(WebGpuLibrary, ABufferThatIsNotAnsweredIsNotRead) {
  const Buffer buffer = device_->create_buffer(16);
  float value = 7;
  EXPECT_TRUE(device_->read(buffer, 0, &value, 4));
  paper_.answers = false;
  value = 7;
  EXPECT_FALSE(device_->read(buffer, 0, &value, 4));
  EXPECT_NE(device_->error(), nullptr);
  EXPECT_EQ(value, 7);
  answer_late();
  EXPECT_TRUE(device_->read(buffer, 0, &value, 4));
  expect_nothing_open();
}

// A callback may arrive after the call that waited for it has returned.
TEST_F(WebGpuLibrary, NoCallbackWritesToTheStack) {
  const Buffer buffer = device_->create_buffer(16);
  float value = 0;
  EXPECT_TRUE(device_->read(buffer, 0, &value, 4));
  ASSERT_GT(paper_.userdata.size(), 4u);
  for (const void* userdata : paper_.userdata) EXPECT_FALSE(is_on_the_stack(userdata));
}

TEST_F(WebGpuLibrary, ARecordingThatRunsOutOfMemoryIsNoPartOfTheNext) {
  constexpr int64_t tokens = 6, vocab = 50, hidden = 8;
  const auto buffer = [&](int64_t elements) {
    return reinterpret_cast<void*>(device_->create_buffer(static_cast<uint64_t>(elements) * 4));
  };
  LinearCrossEntropyForwardBackward op;
  op.input = matrix_view(buffer(tokens * hidden), DType::f32, tokens, hidden);
  op.weight = matrix_view(buffer(vocab * hidden), DType::f32, vocab, hidden);
  op.target = vector_view(buffer(tokens), DType::i32, tokens);
  op.loss = scalar_view(buffer(1), DType::f32);
  op.grad_input = matrix_view(buffer(tokens * hidden), DType::f32, tokens, hidden);
  for (TensorView* view : {&op.input, &op.weight, &op.target, &op.loss, &op.grad_input}) {
    view->device = {DeviceType::webgpu, 0};
  }
  const Execution execution{.device = {DeviceType::webgpu, 0}};
  WorkspaceSize size;
  ASSERT_TRUE(workspace(op, execution, &size).ok());
  const WebGpuWorkspace scratch(0, size.recommended);
  const auto dispatches_of_a_call = [&] {
    const int before = paper_.submitted;
    const Status status = run(op, scratch.workspace(), execution);
    EXPECT_TRUE(status.ok()) << status.message();
    return paper_.submitted - before;
  };
  const int whole = dispatches_of_a_call();
  ASSERT_GT(whole, 3);
  int failures = 0;
  for (int left = 0; left < 10000; ++left) {
    const int before = paper_.submitted;
    paper_.allocations_left = left;
    const Status status = run(op, scratch.workspace(), execution);
    paper_.allocations_left = -1;
    if (status.ok()) break;
    ++failures;
    ASSERT_EQ(status.code(), StatusCode::internal) << left << ": " << status.message();
    ASSERT_EQ(paper_.submitted, before) << left;
    expect_nothing_open();
    ASSERT_EQ(dispatches_of_a_call(), whole) << left;
    ASSERT_EQ(device_->error(), nullptr);
  }
  EXPECT_GT(failures, whole);
}

TEST_F(WebGpuLibrary, AnUnknownDeviceIsToldWhichFunctionMakesOne) {
  Status status;
  EXPECT_EQ(find_device(99, &status), nullptr);
  EXPECT_TRUE(mentions(status, "logitless_webgpu_use_device")) << status.message();
}

}  // namespace
}  // namespace logitless::webgpu

int main(int argc, char** argv) {
  using namespace logitless::webgpu;  // NOLINT
  testing::InitGoogleTest(&argc, argv);
  setenv("LOGITLESS_WEBGPU_LIBRARY", "/nowhere/libwgpu_native.so", 1);
  (void)find_library(&without_library);
  unsetenv("LOGITLESS_WEBGPU_LIBRARY");
  (void)find_library(&with_library);
  paper_wgpu().has_adapter = false;
  (void)find_device(0, &without_adapter);
  paper_wgpu().has_adapter = true;
  (void)find_device(0, &with_adapter);
  return RUN_ALL_TESTS();
}
