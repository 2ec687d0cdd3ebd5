// SPDX-License-Identifier: Apache-2.0
// The engines there are, best first. A new family of GPUs is a folder beside these two and a line
// in this list.
#include "src/cuda/linear/engine.h"
#include "src/cuda/linear/portable/engine.h"
#include "src/cuda/linear/sm90/engine.h"

namespace logitless::cuda {

std::span<const Engine* const> engines() {
  static const sm90::HopperEngine hopper;
  static const PortableEngine portable;
  static const Engine* const all[] = {&hopper, &portable};
  return all;
}

const Engine& engine_for(const DeviceInfo& device) {
  for (const Engine* engine : engines()) {
    if (engine->serves(device)) return *engine;
  }
  return *engines().back();
}

const Engine& engine_for(std::span<const Engine* const> engines, const LinearCall& call,
                         const DeviceInfo& device) {
  for (const Engine* engine : engines) {
    if (engine->serves(device) && engine->serves(call)) return *engine;
  }
  return *engines.back();
}

}  // namespace logitless::cuda
