// SPDX-License-Identifier: Apache-2.0
// The backends on host memory.
#include "device.h"

#include <cstring>
#include <new>
#include <sstream>
#include <stdexcept>

#include "src/cpu/dispatch.h"

namespace logitless::conformance {
namespace {

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

 private:
  const char* name_;
  DeviceType type_;
};

class CpuDevice final : public HostDevice {
 public:
  CpuDevice() : HostDevice("cpu", DeviceType::cpu) {}
  bool has_threads() const override { return true; }
  std::vector<std::string> instruction_sets() const override {
    std::istringstream names(cpu::target_names());
    std::vector<std::string> sets;
    for (std::string name; names >> name;) sets.push_back(name);
    return sets;
  }
  bool force_instruction_set(const std::string& name) const override {
    return cpu::force_target(name.empty() ? nullptr : name.c_str());
  }
};

}  // namespace

const std::vector<const TestDevice*>& devices() {
  static const HostDevice reference("reference", DeviceType::reference);
  static const CpuDevice cpu;
  static const std::vector<const TestDevice*> all{&reference, &cpu};
  return all;
}

const TestDevice& device(const std::string& name) {
  for (const TestDevice* d : devices()) {
    if (name == d->name()) return *d;
  }
  throw std::invalid_argument("no backend named " + name);
}

}  // namespace logitless::conformance
