// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies to shared memory (cp.async of PTX).
#pragma once

#include "src/cuda/numbers.cuh"

namespace logitless::cuda {

// Starts a copy of 16 bytes.
__device__ inline void copy_word(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
// Starts a copy of 16 bytes, of which those after the first `bytes` become zeros and are not read.
__device__ inline void copy_part(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}
// Starts a copy of 4 bytes, or zeros if `bytes` is 0.
__device__ inline void copy_four(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes)
               : "memory");
}
// Ends a group of copies, which may be empty.
__device__ inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of this thread except the last kLeft.
template <int kLeft>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// Waits for all copies of this thread.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace logitless::cuda
