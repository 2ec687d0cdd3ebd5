// SPDX-License-Identifier: Apache-2.0
// Properties of a CUDA device that `info` reports: whether a token's bits depend on its batch, and
// whether row_reference is the row's maximum.
#pragma once

#include "src/cuda/linear/engines.h"
#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// In ops on given logits a token's loss and statistics never depend on its batch. In linear ops
// they do if cuBLASLt computes the logits, as it does for f32 on every device. Returns whether
// they do not in linear ops with 16-bit inputs, whose logits an engine's own kernel may compute.
inline bool half_linear_ops_are_batch_invariant(const DeviceInfo& device) {
  return engine_for(device).is_batch_invariant();
}

// row_reference is the row's maximum where a statistic needs it (SumKind::maximum), and in ops of
// given logits. In other linear forwards with inputs of this dtype, whatever the weight's layout,
// it is the maximum if this returns true; else it is near the maximum.
inline bool reference_is_maximum(const DeviceInfo& device, DType inputs) {
  LinearShape shape;
  shape.dtype = inputs;
  shape.copies_weight = true;  // so that the weight's layout does not matter
  return engine_for(engines(), {}, shape, device).finds_maximum(shape);
}

}  // namespace logitless::cuda
