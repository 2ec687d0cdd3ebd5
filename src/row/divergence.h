// SPDX-License-Identifier: Apache-2.0
// The kinds of divergence, for host and device. What a column adds to each is in
// src/cuda/divergence/column.cuh, src/cpu/divergence_kernels.cpp and WebGPU's divergence.wgsl.
#pragma once

#include <type_traits>

#include "logitless/ops.h"
#include "src/host_device.h"

namespace logitless {

// Returns the kind whose formulas apply at this beta.
LOGITLESS_HOST_DEVICE constexpr DivergenceKind effective_kind(const DivergenceOptions& o) {
  const bool mixes = o.kind == DivergenceKind::jsd || o.kind == DivergenceKind::skew_kl;
  if (mixes && o.beta == 0) return DivergenceKind::forward_kl;
  return o.kind == DivergenceKind::jsd && o.beta == 1 ? DivergenceKind::reverse_kl : o.kind;
}

// Calls f(kind) with the kind as a constant.
template <class F>
void with_kind(DivergenceKind kind, F&& f) {
  using enum DivergenceKind;
  switch (kind) {
    case forward_kl:
      return f(std::integral_constant<DivergenceKind, forward_kl>());
    case reverse_kl:
      return f(std::integral_constant<DivergenceKind, reverse_kl>());
    case jsd:
      return f(std::integral_constant<DivergenceKind, jsd>());
    case skew_kl:
      return f(std::integral_constant<DivergenceKind, skew_kl>());
    case tv:
      return f(std::integral_constant<DivergenceKind, tv>());
  }
}

}  // namespace logitless
