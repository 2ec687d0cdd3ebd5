// SPDX-License-Identifier: Apache-2.0
// The host launches every kernel on the tile of tile.cuh through this.
#pragma once

#include "src/cuda/linear/sm90/tile.cuh"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda::sm90 {

// Launches one block a multiprocessor, since a block takes all of its shared memory.
inline LaunchShape whole_chip(const DeviceInfo& device) {
  return {static_cast<unsigned>(device.multiprocessors / 2 * 2), block_threads, shared_bytes, 2};
}

}  // namespace logitless::cuda::sm90
