// SPDX-License-Identifier: Apache-2.0
// The device interface on wgpu-native, loaded at run time, for the library's own device or one of
// the caller's.
#pragma once

#include <webgpu.h>
#include <wgpu.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "logitless/status.h"
#include "src/webgpu/awaited.h"
#include "src/webgpu/device.h"

namespace logitless::webgpu {

// The functions of webgpu.h; nullptr, with the reason in *status, if they are not found.
const Library* find_library(Status* status);

// Copies as much of a text as fits into `to`.
template <size_t kRoom>
void copy_text(WGPUStringView text, char (&to)[kRoom]) {
  if (text.data == nullptr) return;
  const size_t length = text.length == WGPU_STRLEN ? std::strlen(text.data) : text.length;
  std::snprintf(to, kRoom, "%.*s", static_cast<int>(length), text.data);
}

// Written by the device-lost callback. Never destroyed, because the callback may come at any time
// until the process ends.
struct Loss {
  std::atomic<bool> is{false};
  std::atomic<bool> told{false};  // a status has reported it
  char why[160] = {};             // written before `is`
};

class NativeDevice final : public Device {
 public:
  // `loss` is that of our device-lost callback; nullptr for a caller's device, whose loss the
  // caller watches.
  NativeDevice(const Library& library, WGPUInstance instance, WGPUAdapter adapter,
               WGPUDevice device, WGPUQueue queue, Loss* loss = nullptr);
  ~NativeDevice() override;
  NativeDevice(const NativeDevice&) = delete;
  NativeDevice& operator=(const NativeDevice&) = delete;

  const Limits& limits() const override { return limits_; }
  Buffer create_buffer(uint64_t bytes) override;
  void destroy_buffer(Buffer buffer) override;
  void write(Buffer buffer, uint64_t offset, const void* data, uint64_t bytes) override;
  Pipeline pipeline(const char* shader, const char* entry, const Constant* constants,
                    uint32_t count) override;
  void dispatch(Pipeline pipeline, const Binding* bindings, uint32_t count, uint32_t x, uint32_t y,
                uint32_t z) override;
  void copy(Buffer source, uint64_t source_offset, Buffer target, uint64_t target_offset,
            uint64_t bytes) override;
  bool submit() override;
  void abandon() override;
  const char* error() override;

  // Not available to pages: these wait for submitted work.
  bool read(Buffer buffer, uint64_t offset, void* data, uint64_t bytes);
  void wait();
  // Creates a pipeline from any text, without caching it.
  Pipeline pipeline_of_text(const char* text, const char* entry, const Constant* constants,
                            uint32_t count);
  const std::string& description() const { return description_; }
  uint64_t allocated() const { return allocated_; }  // current bytes of all buffers
  uint64_t most_allocated() const { return most_; }  // peak since forget_most_allocated()
  void forget_most_allocated() { most_ = allocated_; }
  WGPUInstance instance() const { return instance_; }
  WGPUDevice wgpu_device() const { return device_; }
  WGPUQueue queue() const { return queue_; }
  // The error of a lost device, which then counts as reported, or ok. After a failure,
  // loss_after_failure() polls the device first, because wgpu-native calls back only during calls.
  Status loss();
  Status loss_after_failure();
  bool is_lost() const { return loss_ != nullptr && loss_->is; }
  bool is_loss_told() const { return is_lost() && loss_->told; }
  // For tests: smaller limits than the device has.
  void set_limits(const Limits& limits) { limits_ = limits; }
  // Hold it while recording with the functions above.
  std::mutex& mutex() { return mutex_; }

 private:
  struct Caught {
    bool is = false;
    char text[1024] = {};
  };
  struct Kernel {
    WGPUComputePipeline pipeline = nullptr;
    WGPUBindGroupLayout layout = nullptr;
  };
  void begin_pass();
  void end_pass();
  void push_scope();
  bool pop_scope();  // false: it caught an error, or got no answer
  void fail(const char* what, const char* why);

  const Library& call_;
  WGPUInstance instance_;
  WGPUDevice device_;
  WGPUQueue queue_;
  Loss* const loss_;
  Limits limits_;
  std::string description_;
  char error_[512] = {}, told_[512] = {};
  Awaited<Caught> caught_;
  std::map<std::string, Pipeline> by_name_;
  std::map<Pipeline, Kernel> kernels_;
  std::map<Buffer, uint64_t> sizes_;
  uint64_t allocated_ = 0, most_ = 0;
  WGPUCommandEncoder encoder_ = nullptr;
  WGPUComputePassEncoder pass_ = nullptr;
  bool broken_ = false;  // recording failed since the last submit
  std::mutex mutex_;
};

// Device 0 is the library's own, created at the first call. After it was lost, the first call
// returns the error and the second creates it again. Other devices are as registered.
NativeDevice* find_device(int32_t index, Status* status);
bool has_registered_device();
// Returns an index, always the same for the same device.
int32_t register_device(WGPUInstance instance, WGPUDevice device, WGPUQueue queue, Status* status);

}  // namespace logitless::webgpu
