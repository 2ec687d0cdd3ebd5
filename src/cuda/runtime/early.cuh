// SPDX-License-Identifier: Apache-2.0
// Kernels that are launched early (LaunchShape) may start while the previous kernel of the stream
// runs, and wait for it themselves (programmatic dependent launch). In other kernels there is
// nothing to wait for; before sm_90 both functions do nothing.
#pragma once

namespace logitless::cuda {

// Once every block has called it, the next kernel may start if it is launched early.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the previous kernel has ended and its writes can be read. Every block of a kernel
// launched early must call this, even if the block reads none of these writes, because the next
// kernel waits for this kernel only.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace logitless::cuda
