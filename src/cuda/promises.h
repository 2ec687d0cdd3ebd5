// SPDX-License-Identifier: Apache-2.0
// What holds on a CUDA device and `info` says: the oldest driver, and whether a token's bits depend
// on its batch.
#pragma once

#include "src/cuda/runtime.h"

namespace logitless::cuda {

// CUDA's version as cudart counts it: any driver of the same major version serves.
inline constexpr int driver_floor = CUDART_VERSION / 1000 * 1000;

// Loss and statistics of a token, of ops of given logits: always. Of the linear ops: not where
// cuBLASLt makes their logits, which on every device so far it does for some options (on Hopper:
// all but plain ones of 16-bit inputs, see sm90/forward.h).
inline bool linear_ops_are_batch_invariant(const DeviceInfo&) { return false; }

}  // namespace logitless::cuda
