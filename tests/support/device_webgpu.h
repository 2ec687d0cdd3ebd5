// SPDX-License-Identifier: Apache-2.0
// The WebGPU backend's memory for the suite; later cases reuse its buffers.
#pragma once

#include <map>
#include <stdexcept>

#include "device.h"
#include "logitless/webgpu.h"
#include "src/webgpu/native.h"

namespace logitless::conformance {

class WebGpuTestDevice : public TestDevice {
 public:
  explicit WebGpuTestDevice(webgpu::NativeDevice* device) : device_(device) {}
  const char* name() const override { return "webgpu"; }
  Device tensors() const override { return {DeviceType::webgpu, 0}; }
  Execution execution() const override { return {.device = {DeviceType::webgpu, 0}}; }
  void* allocate(size_t bytes) const override {
    const size_t size = (bytes + 3) / 4 * 4;
    const std::lock_guard lock(device_->mutex());
    std::vector<webgpu::Buffer>& free = free_[size];
    webgpu::Buffer buffer = 0;
    if (!free.empty()) {
      buffer = free.back();
      free.pop_back();
    } else {
      buffer = device_->create_buffer(size);
    }
    if (buffer == 0) throw std::runtime_error("no buffer");
    sizes_[buffer] = size;
    return reinterpret_cast<void*>(buffer);
  }
  void release(void* data) const override {
    const std::lock_guard lock(device_->mutex());
    const auto buffer = reinterpret_cast<webgpu::Buffer>(data);
    free_[sizes_[buffer]].push_back(buffer);
  }
  void upload(void* data, const std::byte* host, size_t bytes) const override {
    const std::lock_guard lock(device_->mutex());
    std::vector<std::byte> padded(host, host + bytes);
    padded.resize((bytes + 3) / 4 * 4);
    device_->write(reinterpret_cast<webgpu::Buffer>(data), 0, padded.data(), padded.size());
  }
  void download(std::byte* host, const void* data, size_t bytes) const override {
    const std::lock_guard lock(device_->mutex());
    if (!device_->read(reinterpret_cast<webgpu::Buffer>(data), 0, host, bytes)) {
      const char* why = device_->error();
      throw std::runtime_error(std::string("download: ") + (why != nullptr ? why : "?"));
    }
  }
  void* reserve(size_t, const Ranges&) const override {
    throw std::runtime_error("webgpu has no address space without memory");
  }
  void unreserve(void*, size_t) const override {}
  bool has_addresses() const override { return false; }
  void* make_workspace(uint64_t bytes) const override {
    void* workspace = nullptr;
    Status status;
    logitless_webgpu_create_workspace(0, bytes, &workspace, status.c());
    if (!status.ok()) throw std::runtime_error(status.message());
    return workspace;
  }
  void destroy_workspace(void* workspace) const override {
    logitless_webgpu_destroy_workspace(workspace);
  }
  bool synchronous() const override { return false; }
  bool keeps_state(DType) const override { return true; }
  int64_t most_chosen() const override { return 64; }
  bool has_id_lists() const override { return false; }
  bool has_top() const override { return false; }

 private:
  webgpu::NativeDevice* const device_;
  mutable std::map<size_t, std::vector<webgpu::Buffer>> free_;
  mutable std::map<webgpu::Buffer, size_t> sizes_;
};

}  // namespace logitless::conformance
