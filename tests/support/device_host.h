// SPDX-License-Identifier: Apache-2.0
// The suite's memory for a backend that runs on the host.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "device.h"

namespace logitless::conformance {

class HostDevice : public TestDevice {
 public:
  HostDevice(const char* name, DeviceType type) : name_(name), type_(type) {}
  const char* name() const override { return name_; }
  Device tensors() const override { return {DeviceType::cpu, 0}; }
  Execution execution() const override { return {.device = {type_, 0}}; }
  void* allocate(size_t bytes) const override {
    return ::operator new(bytes, std::align_val_t{128});
  }
  void release(void* data) const override { ::operator delete(data, std::align_val_t{128}); }
  void upload(void* device, const std::byte* host, size_t bytes) const override {
    std::memcpy(device, host, bytes);
  }
  void download(std::byte* host, const void* device, size_t bytes) const override {
    std::memcpy(host, device, bytes);
  }
  // Every page exists once it is written, so the ranges are ignored.
  void* reserve(size_t bytes, const Ranges&) const override {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    return data;
  }
  void unreserve(void* data, size_t bytes) const override { munmap(data, bytes); }

 private:
  const char* name_;
  DeviceType type_;
};

}  // namespace logitless::conformance
