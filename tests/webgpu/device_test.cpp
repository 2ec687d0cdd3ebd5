// SPDX-License-Identifier: Apache-2.0
// The library's own WebGPU device when things go wrong: it is lost, out of memory, or refuses. A
// separate program, because it destroys the device.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <vector>

#include "logitless/webgpu.h"
#include "src/webgpu/library.h"
#include "src/webgpu/native.h"

namespace {
thread_local bool no_memory = false;  // read by operator new; the driver's threads have their own
}

// Not inlined: otherwise GCC warns that memory of `new` is given to free().
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* memory = no_memory ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace logitless {
namespace {

constexpr Execution kWebGpu{.device = {DeviceType::webgpu, 0}};

// A call on buffers of the current device.
struct Call {
  Call(int64_t n, int64_t v, int64_t d) : tokens(n), vocab(v), hidden(d) {
    Status status;
    device = webgpu::find_device(0, &status);
    if (device == nullptr) throw std::runtime_error(status.message());
    op.input = matrix_view(buffer(n * d), DType::f32, n, d);
    op.weight = matrix_view(buffer(v * d), DType::f32, v, d);
    op.target = vector_view(buffer(n), DType::i32, n);
    op.loss = scalar_view(buffer(1), DType::f32);
    op.grad_input = matrix_view(buffer(n * d), DType::f32, n, d);
    for (TensorView* view : {&op.input, &op.weight, &op.target, &op.loss, &op.grad_input}) {
      view->device = {DeviceType::webgpu, 0};
    }
    std::vector<float> numbers(static_cast<size_t>(std::max(n, v) * d));
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i % 17) * 0.1f - 1;
    write(op.input, numbers.data(), n * d);
    write(op.weight, numbers.data(), v * d);
  }
  void* buffer(int64_t elements) {
    return reinterpret_cast<void*>(device->create_buffer(static_cast<uint64_t>(elements) * 4));
  }
  void write(const TensorView& view, const void* data, int64_t elements) {
    device->write(reinterpret_cast<webgpu::Buffer>(view.data), 0, data,
                  static_cast<uint64_t>(elements) * 4);
  }
  Status run(const WebGpuWorkspace& workspace) const {
    if (!workspace.status().ok()) return workspace.status();
    return logitless::run(op, workspace.workspace(), kWebGpu);
  }
  WorkspaceSize size() const {
    WorkspaceSize size;
    EXPECT_TRUE(workspace(op, kWebGpu, &size).ok());
    return size;
  }
  float loss() const {
    float value = -1;
    EXPECT_TRUE(device->read(reinterpret_cast<webgpu::Buffer>(op.loss.data), 0, &value, 4));
    return value;
  }

  int64_t tokens, vocab, hidden;
  webgpu::NativeDevice* device = nullptr;
  LinearCrossEntropyForwardBackward op;
};

void expect_error(const Status& status, const std::string& text) {
  EXPECT_EQ(status.code(), StatusCode::device_error) << status.message();
  EXPECT_NE(std::string(status.message()).find(text), std::string::npos) << status.message();
}

class WebGpuDevice : public testing::Test {
 protected:
  // Destroys the device at a chosen moment, as a driver reset would.
  static void destroy(webgpu::NativeDevice* device) {
    void* library = dlopen(std::getenv("LOGITLESS_WEBGPU_LIBRARY"), RTLD_NOW);
    ASSERT_NE(library, nullptr);
    const auto call =
        reinterpret_cast<decltype(&wgpuDeviceDestroy)>(dlsym(library, "wgpuDeviceDestroy"));
    ASSERT_NE(call, nullptr);
    call(device->wgpu_device());
  }
};

TEST_F(WebGpuDevice, ALostOneIsAStatusAndTheNextCallMakesAnother) {
  const Call before(6, 50, 8);
  const WebGpuWorkspace scratch(0, before.size().recommended);
  ASSERT_TRUE(before.run(scratch).ok());
  const float loss = before.loss();
  destroy(before.device);
  expect_error(before.run(scratch), "lost");
  // An object of the lost device reports the loss and cannot be used on the next, working device.
  expect_error(before.run(scratch), "lost");
  const Call after(6, 50, 8);
  EXPECT_NE(after.device, before.device);
  const WebGpuWorkspace anew(0, after.size().recommended);
  ASSERT_TRUE(anew.status().ok());
  expect_error(before.run(anew), "webgpu");
  const Status status = after.run(anew);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(after.loss(), loss);
}

TEST_F(WebGpuDevice, ALossIsToldOnceToACallThatOnlyAsks) {
  const Call call(6, 50, 8);
  destroy(call.device);
  (void)call.device->loss_after_failure();  // wgpu-native reports it at the next call
  Status status;
  void *handle = nullptr, *old = call.device->wgpu_device();
  ASSERT_EQ(logitless_webgpu_device(0, nullptr, &handle, nullptr, status.c()), LOGITLESS_OK)
      << status.message();  // the loss was reported above, so no error here
  EXPECT_NE(handle, old);
  const Call second(6, 50, 8);
  const WebGpuWorkspace scratch(0, second.size().recommended);
  destroy(second.device);
  expect_error(second.run(scratch), "lost");
  WorkspaceSize size;
  EXPECT_TRUE(workspace(second.op, kWebGpu, &size).ok());
}

TEST_F(WebGpuDevice, OutOfMemoryIsAStatusAndPasses) {
  const Call call(256, 100000, 4);
  // Only a software device allocates in this process.
  if (call.device->description().find("llvmpipe") == std::string::npos) return;
  const WebGpuWorkspace scratch(0, UINT64_MAX);  // enough for all logits at once, 98 MiB
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = pages * 4096 + (uint64_t{32} << 20);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  const Status status = call.run(scratch);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  expect_error(status, "memory");
  expect_error(status, "workspace");
  const Status after = call.run(scratch);
  ASSERT_TRUE(after.ok()) << after.message();
  EXPECT_GT(call.loss(), 0);
}

TEST_F(WebGpuDevice, ABufferWithoutItsUsageIsAStatusInWebGpusWords) {
  Call call(6, 50, 8);
  const Call other(6, 50, 8);
  const WebGpuWorkspace scratch(0, call.size().recommended);
  void* library = dlopen(std::getenv("LOGITLESS_WEBGPU_LIBRARY"), RTLD_NOW);
  ASSERT_NE(library, nullptr);
  const auto create =
      reinterpret_cast<decltype(&wgpuDeviceCreateBuffer)>(dlsym(library, "wgpuDeviceCreateBuffer"));
  WGPUBufferDescriptor descriptor = WGPU_BUFFER_DESCRIPTOR_INIT;
  descriptor.size = 50 * 8 * 4;
  descriptor.usage = WGPUBufferUsage_CopySrc | WGPUBufferUsage_CopyDst;
  call.op.weight.data = create(call.device->wgpu_device(), &descriptor);
  expect_error(call.run(scratch), "usage");
  EXPECT_TRUE(other.run(scratch).ok());
}

TEST_F(WebGpuDevice, AnAllocationThatFailsIsAStatus) {
  (void)Call(1, 1, 1);  // creates the device
  void* workspace = nullptr;
  Status status;
  no_memory = true;
  const int32_t made = logitless_webgpu_create_workspace(0, 1 << 20, &workspace, status.c());
  no_memory = false;
  EXPECT_EQ(made, static_cast<int32_t>(StatusCode::internal)) << status.message();
  EXPECT_EQ(workspace, nullptr);
  void *instance, *device, *queue;
  ASSERT_EQ(logitless_webgpu_device(0, &instance, &device, &queue, nullptr), LOGITLESS_OK);
  int32_t index = -1;
  no_memory = true;
  const int32_t used = logitless_webgpu_use_device(instance, device, queue, &index, status.c());
  no_memory = false;
  EXPECT_EQ(used, static_cast<int32_t>(StatusCode::internal)) << status.message();
  EXPECT_EQ(index, -1);
  EXPECT_EQ(logitless_webgpu_use_device(instance, device, queue, &index, nullptr), LOGITLESS_OK);
}

// Needs a run without LOGITLESS_WEBGPU_LIMITS.
TEST_F(WebGpuDevice, ItHasTheAdaptersLimits) {
  Status status;
  const webgpu::Library* call = webgpu::find_library(&status);
  ASSERT_NE(call, nullptr);
  const Call subject(1, 1, 1);
  WGPUAdapter adapter = nullptr;
  WGPURequestAdapterCallbackInfo info = WGPU_REQUEST_ADAPTER_CALLBACK_INFO_INIT;
  info.mode = WGPUCallbackMode_AllowProcessEvents;
  info.userdata1 = &adapter;
  info.callback = [](WGPURequestAdapterStatus, WGPUAdapter made, WGPUStringView, void* userdata,
                     void*) { *static_cast<WGPUAdapter*>(userdata) = made; };
  call->InstanceRequestAdapter(subject.device->instance(), nullptr, info);
  for (int i = 0; adapter == nullptr && i < 1000; ++i) {
    call->InstanceProcessEvents(subject.device->instance());
  }
  ASSERT_NE(adapter, nullptr);
  WGPULimits limits = WGPU_LIMITS_INIT;
  ASSERT_EQ(call->AdapterGetLimits(adapter, &limits), WGPUStatus_Success);
  const webgpu::Limits& own = subject.device->limits();
  EXPECT_EQ(own.buffer_bytes, limits.maxBufferSize);
  EXPECT_EQ(own.workgroup_bytes, limits.maxComputeWorkgroupStorageSize);
  EXPECT_EQ(own.workgroup_invocations, limits.maxComputeInvocationsPerWorkgroup);
  EXPECT_GE(own.storage_binding_bytes, webgpu::Limits{}.storage_binding_bytes);
}

}  // namespace
}  // namespace logitless

// Ends without exit(): a software driver's threads may still work on the lost device while its
// statics are destroyed.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int code = RUN_ALL_TESTS();
  std::fflush(nullptr);
  std::_Exit(code);
}
