// SPDX-License-Identifier: Apache-2.0
// What a problem's call would run on CUDA, for tests that each plan has had its turn.
#pragma once

#include <string>
#include <vector>

#include "problem.h"
#include "src/cuda/linear.h"
#include "src/cuda/runtime.h"
#include "suite.h"

namespace logitless::conformance {

using ForwardBackward = LinearCrossEntropyForwardBackward;

struct CudaPlanned {
  cuda::LinearShape shape;
  cuda::LinearPlan plan;
};
// In so many bytes.
inline CudaPlanned cuda_plan_of(const ForwardBackward& op, uint64_t bytes) {
  ForwardBackward asked = op;
  logitless_op unused{};
  for_each_tensor(asked, unused, [](const char*, Access, TensorView& view, auto&&) {
    if (view) view.data = nullptr, view.byte_offset = 0;  // aligned, as on the device
  });
  const cuda::DeviceInfo* device = nullptr;
  EXPECT_TRUE(cuda::find_device(0, &device).ok());
  const cuda::LinearShape shape = cuda::shape_of(asked, *device);
  return {shape, plan_linear(shape, cuda::planned_speed(*device), bytes)};
}

// The CUDA device, where Hopper's own kernels serve it.
inline std::vector<std::string> hopper_devices() {
  const cuda::DeviceInfo* device = nullptr;
  const bool is = cuda::find_device(0, &device).ok() && device->major == 9 && !device->portable;
  std::vector<std::string> names = device_names();
  std::erase_if(names, [&](const std::string& name) { return !is || name != "cuda"; });
  return names;
}

}  // namespace logitless::conformance
