// SPDX-License-Identifier: Apache-2.0
// This is the device interface on webgpu.h of wgpu-native, found at run time: the library's own
// device, or one of the caller's.
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

// Returns the functions of webgpu.h, or nullptr and the reason why there are none.
const Library* find_library(Status* status);

// Copies what of a text has room in `to`.
template <size_t kRoom>
void copy_text(WGPUStringView text, char (&to)[kRoom]) {
  if (text.data == nullptr) return;
  const size_t length = text.length == WGPU_STRLEN ? std::strlen(text.data) : text.length;
  std::snprintf(to, kRoom, "%.*s", static_cast<int>(length), text.data);
}

// The device-lost callback leaves this; it may come as long as the process lives, so this lives as
// long.
struct Loss {
  std::atomic<bool> is{false};
  std::atomic<bool> told{false};  // a caller has been told, in a status
  char why[160] = {};             // it is written before `is`
};

class NativeDevice final : public Device {
 public:
  // `loss` belongs to a device with our callback; it is nullptr for a caller's device, which is
  // theirs to watch.
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

  // These do what a page has no call for: wait for what was submitted and read.
  bool read(Buffer buffer, uint64_t offset, void* data, uint64_t bytes);
  void wait();
  // Makes a pipeline of any text, which is not kept.
  Pipeline pipeline_of_text(const char* text, const char* entry, const Constant* constants,
                            uint32_t count);
  const std::string& description() const { return description_; }
  uint64_t allocated() const { return allocated_; }  // the buffers have so many bytes now
  uint64_t most_allocated() const { return most_; }  // they had at most so many since the next call
  void forget_most_allocated() { most_ = allocated_; }  // the count of the most begins anew
  WGPUInstance instance() const { return instance_; }
  WGPUDevice wgpu_device() const { return device_; }
  WGPUQueue queue() const { return queue_; }
  // Returns the status of a lost device, which from now on counts as told, or ok of a living one.
  // After something failed it asks the device first, since wgpu-native calls back only when it is
  // called.
  Status loss();
  Status loss_after_failure();
  bool is_lost() const { return loss_ != nullptr && loss_->is; }
  bool is_loss_told() const { return is_lost() && loss_->told; }
  // Sets smaller limits than the device has, for tests of what is beyond one binding.
  void set_limits(const Limits& limits) { limits_ = limits; }
  // A caller of the functions above holds it for as long as it records.
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
  bool pop_scope();  // it returns false where it caught something, or was not answered
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
  bool broken_ = false;  // something recorded since the last submit could not be
  std::mutex mutex_;
};

// Returns a device. 0 is the library's own, made at the first call; if it was lost the first call
// is told, and the second makes it again. The others are as registered.
NativeDevice* find_device(int32_t index, Status* status);
bool has_registered_device();
// Returns the index of a caller's device, which is the same for the same device.
int32_t register_device(WGPUInstance instance, WGPUDevice device, WGPUQueue queue, Status* status);

}  // namespace logitless::webgpu
