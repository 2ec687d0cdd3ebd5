// SPDX-License-Identifier: Apache-2.0
// The engines, in the order in which a call tries them. A new family of GPUs needs a folder next to
// portable/ and sm90/, and a line in this list.
#include <cstdio>
#include <cstring>

#include "src/cuda/linear/engines.h"
#include "src/cuda/linear/portable/engine.h"
#include "src/cuda/linear/sm90/engine.h"

namespace logitless::cuda {
namespace {

std::span<const Engine* const> replaced;

bool may_serve(const Engine& engine, const DeviceInfo& device) {
  const bool named = device.kernels[0] != 0;
  const bool asked = named ? std::strcmp(device.kernels, engine.name()) == 0 : engine.is_default();
  return asked && engine.serves(device);
}

}  // namespace

void replace_engines(std::span<const Engine* const> replacement) { replaced = replacement; }

std::span<const Engine* const> engines() {
  if (!replaced.empty()) return replaced;
  static const sm90::HopperEngine hopper;
  static const Sm80Engine sm80;
  static const PortableEngine portable;
  static const Engine* const all[] = {&hopper, &sm80, &portable};
  return all;
}

Status check_named_engine(const DeviceInfo& device) {
  for (const Engine* engine : engines()) {
    if (may_serve(*engine, device)) return {};
  }
  char served[96] = {};
  for (const bool is_default : {true, false}) {
    for (const Engine* engine : engines()) {
      if (engine->is_default() != is_default || !engine->serves(device)) continue;
      const size_t used = std::strlen(served);
      std::snprintf(served + used, sizeof(served) - used, "%s%s", used > 0 ? ", " : "",
                    engine->name());
    }
  }
  return error(StatusCode::invalid_argument,
               "cuda: LOGITLESS_CUDA_KERNELS is \"%s\"; allowed on device %d (%s): %s",
               device.kernels, device.index, device.name, served);
}

const Engine& engine_for(const DeviceInfo& device) {
  for (const Engine* engine : engines()) {
    if (may_serve(*engine, device)) return *engine;
  }
  return *engines().back();
}

const Engine& engine_for(std::span<const Engine* const> engines, const Call& op,
                         const LinearShape& shape, const DeviceInfo& device) {
  for (const Engine* engine : engines) {
    if (op.top_logits && !engine->lists_logits()) continue;
    if (may_serve(*engine, device) && engine->serves(op, shape)) return *engine;
  }
  return *engines.back();
}

}  // namespace logitless::cuda
