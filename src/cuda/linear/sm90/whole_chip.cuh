// SPDX-License-Identifier: Apache-2.0
// How the host launches a kernel on the tile of tile.cuh.
#pragma once

#include "src/cuda/linear/sm90/tile.cuh"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda::sm90 {

// A block a multiprocessor, of every kernel on this tile.
inline LaunchShape whole_chip(const DeviceInfo& device) {
  return {static_cast<unsigned>(device.multiprocessors / 2 * 2), block_threads, shared_bytes, 2};
}

}  // namespace logitless::cuda::sm90
