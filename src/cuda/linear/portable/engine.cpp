// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/portable/engine.h"

namespace logitless::cuda {

void PortableEngine::describe(const Call&, LinearCall* call, const DeviceInfo&) const {
  LinearShape& s = call->shape;
  // The smoothing's term has, under a softcap, a slope of its own in every element.
  if (s.smoothing && call->map.capped) s.can_store = false;
}

DeviceSpeed PortableEngine::speed(const DeviceInfo& device) const {
  DeviceSpeed speed;
  speed.multiprocessors = device.multiprocessors;
  const double share = device.multiprocessors / 132.0;
  if (device.major != 9) {  // half of an H200's, a multiprocessor: not measured
    speed.products *= share / 2;
    speed.memory *= share / 2;
  }
  return speed;
}

}  // namespace logitless::cuda
