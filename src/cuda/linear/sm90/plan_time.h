// SPDX-License-Identifier: Apache-2.0
// The cost model of Hopper's plans: seconds on a device, from its measured speed.
#pragma once

#include "src/cuda/linear/plan.h"

namespace logitless::cuda::sm90 {

// Slots of slices (cut.h) that the products of a plan can use.
int32_t slots_of(const LinearShape& shape, const LinearPlan& plan, const DeviceSpeed& speed);

// Says whether both products of a chunk run at once, and on how many clusters grad_input's then.
bool runs_both(const LinearShape& shape, const LinearPlan& plan);
int32_t input_clusters_of(const LinearShape& shape, const LinearPlan& plan,
                          const DeviceSpeed& speed);

}  // namespace logitless::cuda::sm90
