// SPDX-License-Identifier: Apache-2.0
// What holds on a CUDA device, for `info` to say: the oldest driver, whether a token's bits depend
// on its batch, and how near to the row's maximum its row_reference is.
#pragma once

#include "src/cuda/linear/engines.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// CUDA's version as cudart counts it; any driver of the same major version serves. Before 12.4's
// driver warmup loads less, before 12.3's launches are not early.
inline constexpr int driver_floor = CUDART_VERSION / 1000 * 1000;

// In ops of given logits a token's loss and statistics never depend on its batch. In the linear ops
// they do if cuBLASLt makes the logits, which it so far does for f32 on every device.
inline bool linear_ops_are_batch_invariant(const DeviceInfo&) { return false; }
// For linear ops of 16-bit inputs, whose logits an engine's own kernel makes.
inline bool half_linear_ops_are_batch_invariant(const DeviceInfo& device) {
  return engine_for(device).is_batch_invariant();
}

// row_reference is the row's maximum where a statistic needs it (SumKind::maximum), and in ops of
// given logits. In other linear forwards of such inputs it is the maximum if this returns true,
// whatever the weight's layout; else it is near the maximum.
inline bool reference_is_maximum(const DeviceInfo& device, DType inputs) {
  LinearShape shape;
  shape.dtype = inputs;
  shape.copies_weight = true;  // so that the weight's layout decides nothing
  return engine_for(engines(), {}, shape, device).finds_maximum(shape);
}

}  // namespace logitless::cuda
