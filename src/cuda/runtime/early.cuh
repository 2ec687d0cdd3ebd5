// SPDX-License-Identifier: Apache-2.0
// Kernels that are launched early (LaunchShape) may start while the kernel in front of them in the
// stream runs, and wait for it themselves. In a kernel launched otherwise, or before sm_90, both
// functions do nothing.
#pragma once

namespace logitless::cuda {

// Once every block has called it, a kernel launched early behind this one may start.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel in front has ended and all that it wrote can be read. Every block of a
// kernel launched early must call it, even if it reads nothing of that, because the kernel behind
// waits for this one alone.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace logitless::cuda
