// SPDX-License-Identifier: Apache-2.0
// The plan that a problem's call would run on CUDA, so that tests can try each plan.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "resident.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/runtime/runtime.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {

using ForwardBackward = LinearCrossEntropyForwardBackward;

struct CudaPlanned {
  cuda::LinearShape shape;
  cuda::LinearPlan plan;
};
// Returns the plan for a workspace of `bytes`.
inline CudaPlanned cuda_plan_of(const ForwardBackward& op, uint64_t bytes) {
  ForwardBackward asked = op;
  logitless_op unused{};
  for_each_tensor(asked, unused, [](const char*, Access, TensorView& view, auto&&) {
    // an unknown address counts as aligned, which the device's allocations are
    if (view) view.data = nullptr, view.byte_offset = 0;
  });
  const cuda::DeviceInfo* device = nullptr;
  EXPECT_TRUE(cuda::find_device(0, &device).ok());
  const cuda::Asked planned = cuda::asked_of(asked, *device);
  return {planned.shape, planned.plan(bytes)};
}

// Returns {"cuda"} if there is such a device, else {}.
inline std::vector<std::string> cuda_devices() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}

// Returns {"cuda"} if its engine is sm90's, else {}.
inline std::vector<std::string> hopper_devices() {
  const cuda::DeviceInfo* device = nullptr;
  const bool is = cuda::find_device(0, &device).ok() &&
                  std::string_view(cuda::engine_for(*device).name()) == "sm90";
  return is ? cuda_devices() : std::vector<std::string>{};
}

// Compares the problem with the reference once for each plan that `name` distinguishes (except ""),
// in workspaces of these shares (0: the minimum, 1: the recommended one). The plans named in
// `wanted` must be among them.
template <class F>
void judge_plans(const TestDevice& device, const Case& c, const Problem<ForwardBackward>& p,
                 const std::vector<double>& shares, F&& name,
                 const std::vector<std::string>& wanted) {
  const WorkspaceSize size = workspace_of(device, c);
  const reference::Result want = expected(device, p.op, p.model);
  std::set<std::string> seen;
  std::string all;
  for (const double share : shares) {
    const uint64_t bytes = bytes_of(size, share);
    const std::string plan = name(cuda_plan_of(p.op, bytes));
    if (plan.empty() || !seen.insert(plan).second) continue;
    all += plan + "; ";
    const Outcome got = execute(device, p.op, p.pool, {.memory = Memory::exact, .bytes = bytes});
    const Comparison result = compare(want, got);
    EXPECT_TRUE(result.ok()) << result.report << ", " << plan;
  }
  for (const std::string& plan : wanted) EXPECT_TRUE(seen.contains(plan)) << plan << " of " << all;
}

}  // namespace logitless::conformance
