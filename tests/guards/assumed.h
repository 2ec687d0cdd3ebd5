// SPDX-License-Identifier: Apache-2.0
// The devices and memory sizes that the guards assume; none needs to exist.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "src/cuda/promises.h"
#include "tests/cuda/recorded.h"

namespace logitless::guards {

struct Assumed {
  std::string name;
  Device device;
  const char* kernels = "";  // LOGITLESS_CUDA_KERNELS
  bool well_known = true;    // gets the named calls too, not only random ones
};

struct AssumedCuda {
  const char* name;
  cuda::RecordedCuda::Device device;
};
inline const std::vector<AssumedCuda>& assumed_cuda() {
  static const std::vector<AssumedCuda> all{{"sm90x132", {"H100", 9, 0, true, 132, 232448}},
                                            {"sm90x114", {"H100", 9, 0, true, 114, 232448}},
                                            {"sm90x78", {"H20", 9, 0, true, 78, 232448}},
                                            {"sm80x108", {"A100", 8, 0, true, 108, 166912}},
                                            {"sm100x148", {"B200", 10, 0, true, 148, 232448}}};
  return all;
}

inline std::vector<Assumed> assumed_cuda_devices() {
  std::vector<Assumed> all;
  for (const AssumedCuda& one : assumed_cuda()) {
    all.push_back({one.name, {DeviceType::cuda, static_cast<int32_t>(all.size())}});
  }
  all.push_back({"portable90x132", {DeviceType::cuda, 0}, "portable"});
  all.push_back({"sm80kernels80x108", {DeviceType::cuda, 3}, "sm80"});
  return all;
}

// While it lives, CUDA has the assumed devices, with their own kernels or with those named.
class AssumedMachine {
 public:
  explicit AssumedMachine(const char* kernels) : cuda_((choose(kernels), devices())) {}
  cuda::RecordedCuda* operator->() { return &cuda_; }

 private:
  // Sets the variables that are read when the devices are first listed.
  static void choose(const char* kernels) { setenv("LOGITLESS_CUDA_KERNELS", kernels, 1); }
  static std::vector<cuda::RecordedCuda::Device> devices() {
    std::vector<cuda::RecordedCuda::Device> all;
    for (const AssumedCuda& one : assumed_cuda()) all.push_back(one.device);
    return all;
  }
  cuda::RecordedCuda cuda_;
};

// Returns whether this build has Hopper's own kernels; without them plans differ.
inline bool has_hoppers_kernels() {
  return cuda::half_linear_ops_are_batch_invariant({.major = 9});
}

struct MemorySize {
  const char* name;
  uint64_t (*bytes)(uint64_t minimum, uint64_t recommended);
};
inline constexpr MemorySize kMemories[] = {
    {"min", [](uint64_t minimum, uint64_t) { return minimum; }},
    {"min+1", [](uint64_t minimum, uint64_t) { return minimum + 1; }},
    {"64M", [](uint64_t, uint64_t) { return uint64_t{64} << 20; }},
    {"128M", [](uint64_t, uint64_t) { return uint64_t{128} << 20; }},
    {"192M", [](uint64_t, uint64_t) { return uint64_t{192} << 20; }},
    {"256M", [](uint64_t, uint64_t) { return uint64_t{256} << 20; }},
    {"1024M", [](uint64_t, uint64_t) { return uint64_t{1024} << 20; }},
    {"rec", [](uint64_t, uint64_t recommended) { return recommended; }},
    {"4rec", [](uint64_t, uint64_t recommended) { return 4 * recommended; }},
};

}  // namespace logitless::guards
