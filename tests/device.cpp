// SPDX-License-Identifier: Apache-2.0
// The backends on host memory, and which backends a program's tests run on.
#include "device.h"

#include <sys/mman.h>

#include <cstdlib>
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
  // A page exists once it is written.
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

std::vector<Found> find_devices() {
  static const HostDevice reference("reference", DeviceType::reference);
  static const CpuDevice cpu;
  std::vector<Found> all{{"reference", &reference, ""}, {"cpu", &cpu, ""}};
#ifdef LOGITLESS_WITH_CUDA
  all.push_back(find_cuda_device());
#endif
#ifdef LOGITLESS_WITH_WEBGPU
  if (asked_for("webgpu")) all.push_back(find_webgpu_device());
#endif
  return all;
}

std::string names_asked_for() {
  const char* names = std::getenv("LOGITLESS_TEST_DEVICES");
  return names == nullptr ? "reference,cpu" : names;
}

}  // namespace

const std::vector<Found>& all_devices() {
  static const std::vector<Found> all = find_devices();
  return all;
}

bool asked_for(const std::string& name) {
  std::istringstream names(names_asked_for());
  for (std::string one; std::getline(names, one, ',');) {
    if (one == name) return true;
  }
  return false;
}

const std::vector<const TestDevice*>& devices() {
  static const std::vector<const TestDevice*> chosen = [] {
    std::vector<const TestDevice*> present;
    for (const Found& found : all_devices()) {
      if (found.device != nullptr && asked_for(found.name)) present.push_back(found.device);
    }
    return present;
  }();
  return chosen;
}

const TestDevice& device(const std::string& name) {
  for (const Found& found : all_devices()) {
    if (name == found.name && found.device != nullptr) return *found.device;
  }
  throw std::invalid_argument("no backend named " + name);
}

}  // namespace logitless::conformance
