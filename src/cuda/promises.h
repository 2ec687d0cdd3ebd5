// SPDX-License-Identifier: Apache-2.0
// What holds on a CUDA device and `info` says: the oldest driver, and whether a token's bits depend
// on its batch.
#pragma once

#include "src/cuda/linear/engine.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// CUDA's version as cudart counts it: any driver of the same major version serves. (Before that for
// 12.4 warmup loads less, before 12.3 launches are not early.)
inline constexpr int driver_floor = CUDART_VERSION / 1000 * 1000;

// Loss and statistics of a token do not depend on its batch in ops of given logits, always. In the
// linear ops not where cuBLASLt makes their logits, which on every device so far it does for f32.
inline bool linear_ops_are_batch_invariant(const DeviceInfo&) { return false; }
// In those of 16-bit inputs, whose logits an engine's own kernel makes.
inline bool half_linear_ops_are_batch_invariant(const DeviceInfo& device) {
  return engine_for(device).is_batch_invariant();
}

// row_reference of a linear forward of such inputs, of which neither entropy nor argmax is asked,
// is not the row's maximum but near it.
inline bool references_are_anchors(const DeviceInfo& device) {
  return half_linear_ops_are_batch_invariant(device);
}

}  // namespace logitless::cuda
