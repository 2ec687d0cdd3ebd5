// SPDX-License-Identifier: Apache-2.0
// TMA, the copy engine: moves boxes of a matrix to shared memory and back, 128-byte swizzled.
#pragma once

#include <cuda.h>

#include "src/cuda/linear/sm90/pipeline.cuh"

namespace logitless::cuda::sm90 {

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Loads the box at (column, row) of the map; `barrier` counts its bytes.
__device__ inline void load_box(const CUtensorMap* map, uint64_t* barrier, void* to, int32_t column,
                                int32_t row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}
// Loads a box of a map of columns in blocks of 64, at (column, row, block).
__device__ inline void load_blocks(const CUtensorMap* map, uint64_t* barrier, void* to,
                                   int32_t column, int32_t row, int32_t block) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(block)
      : "memory");
}
__device__ inline void load_blocks_to(const CUtensorMap* map, uint64_t* barrier, void* to,
                                      int32_t column, int32_t row, int32_t block, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(block), "h"(mask)
      : "memory");
}
// Loads a box to the same address in every block of `mask`; each one's barrier counts its bytes.
__device__ inline void load_box_to(const CUtensorMap* map, uint64_t* barrier, void* to,
                                   int32_t column, int32_t row, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "h"(mask)
      : "memory");
}

// Makes this thread's writes to shared memory visible to copies that start after a barrier.
__device__ inline void fence_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Stores a box of a map in blocks from shared memory; elements outside the map are not written. The
// box is read once, much later, so it is marked to leave the L2 cache first.
__device__ inline void store_box(const CUtensorMap* map, const void* from, int32_t row,
                                 int32_t block) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4}], [%1], policy;\n"
      "cp.async.bulk.commit_group;\n"
      "}\n" ::"l"(map),
      "r"(shared_address(from)), "r"(0), "r"(row), "r"(block)
      : "memory");
}
// Stores the box at (column, row) of a map of rows.
__device__ inline void store_box_at(const CUtensorMap* map, const void* from, int32_t column,
                                    int32_t row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
      "cp.async.bulk.commit_group;\n" ::"l"(map),
      "r"(shared_address(from)), "r"(column), "r"(row)
      : "memory");
}
// Waits until the boxes that this thread has stored have been read, except the last kLeft, so that
// their memory is free.
template <int kLeft = 0>
__device__ inline void stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

}  // namespace logitless::cuda::sm90
