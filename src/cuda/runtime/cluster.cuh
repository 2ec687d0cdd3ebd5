// SPDX-License-Identifier: Apache-2.0
// How a block of a cluster writes into another block's shared memory, and how that block knows,
// without a fence, that everything has arrived. Before sm_90 a cluster is one block, and none of
// this is called.
#pragma once

#include <cstdint>

#include "src/cuda/numbers.cuh"

namespace logitless::cuda {

// All threads of all blocks of the cluster arrive once and then wait once. Arriving does not make
// earlier writes visible, except an mbarrier initialized through init_expecting.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Called by one thread: `barrier`, in shared memory, completes when `bytes` have been sent to it.
__device__ inline void init_expecting(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// The address of the same variable in block `rank`, for `send`.
template <class T>
__device__ uint32_t address_in_block(const T* shared, int rank) {
  uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(shared)), "r"(rank));
#endif
  return address;
}

// Sends 4 bytes to another block, whose barrier counts them once they can be read there.
__device__ inline void send(uint32_t to, uint32_t bits, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(bits), "r"(barrier)
      : "memory");
#endif
}

__device__ inline void wait_for_bytes(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier))
      : "memory");
#endif
}

}  // namespace logitless::cuda
