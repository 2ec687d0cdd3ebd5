// SPDX-License-Identifier: Apache-2.0
// The backends on host memory, and the choice of the backends that a program's tests run on.
#include "device.h"

#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "device_host.h"
#include "src/cpu/dispatch.h"

namespace logitless::conformance {
namespace {

class CpuDevice final : public HostDevice {
 public:
  CpuDevice() : HostDevice("cpu", DeviceType::cpu) {}
  bool has_threads() const override { return true; }
  bool keeps_state(DType dtype) const override { return dtype != DType::f16; }
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
