// SPDX-License-Identifier: Apache-2.0
// The barriers of shared memory, of a warpgroup and of a cluster, and the registers of a warpgroup,
// in PTX (sm_90a).
#pragma once

#include <cstdint>

#include "src/cuda/numbers.cuh"

namespace logitless::cuda::sm90 {

__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals));
}
// Makes the barriers visible to TMA and to the cluster's other block.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni over;\n"
      "bra.uni again;\n"
      "over:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Arrives on the same barrier of block `rank` of the cluster. It releases memory that tensor cores
// have read, so no stores need be visible; with .release.cluster every call would wait for all
// earlier stores (MEMBAR.ALL.GPU).
__device__ inline void arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// Waits for a warpgroup's 128 threads. Their warps may arrive from different places in the code,
// which bar.sync does not allow.
__device__ inline void group_sync(int warpgroup) {
  asm volatile("barrier.sync %0, 128;" ::"r"(warpgroup) : "memory");
}

template <int kRegisters>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace logitless::cuda::sm90
