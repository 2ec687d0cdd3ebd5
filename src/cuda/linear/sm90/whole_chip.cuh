// SPDX-License-Identifier: Apache-2.0
// The launch shape of every kernel that uses the tile of tile.cuh.
#pragma once

#include "src/cuda/linear/sm90/tile.cuh"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda::sm90 {

// One block per multiprocessor: a block takes all of its shared memory.
inline LaunchShape whole_chip(const DeviceInfo& device) {
  return {static_cast<unsigned>(device.multiprocessors / 2 * 2), block_threads, shared_bytes, 2};
}

}  // namespace logitless::cuda::sm90
