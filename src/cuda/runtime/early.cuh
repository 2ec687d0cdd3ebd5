// SPDX-License-Identifier: Apache-2.0
// Kernels that are launched early (LaunchShape) may start while the kernel in front of them in the
// stream runs, and wait for it themselves. In a kernel launched otherwise, or before sm_90, both
// functions do nothing.
#pragma once

namespace logitless::cuda {

// Lets a kernel that is launched early behind this one start, once every block has called it.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel in front has ended and all that it wrote can be read. Every block of a
// kernel launched early calls it, even where it reads nothing of that, because what comes behind
// waits for this kernel alone.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace logitless::cuda
