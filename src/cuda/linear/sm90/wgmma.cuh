// SPDX-License-Identifier: Apache-2.0
// The tensor cores' product of a warpgroup (wgmma, sm_90a), with operands in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "src/cuda/linear/sm90/pipeline.cuh"

namespace logitless::cuda::sm90 {

// The axis of an operand [rows, depth] that is contiguous in memory: K-major and MN-major in PTX.
enum class Along { depth, rows };

// The layout of an operand in shared memory, as TMA writes it: 64 deep, swizzled in groups of 8
// lines of 128 bytes (1024 bytes):
//   along depth  a line is a row's 64 of the depth axis
//   along rows   a line is 64 rows at one depth; the next 64 rows are `next_rows` bytes on
// Fields as in PTX ISA, "matrix descriptor": address / 16, offset of the next 64 rows / 16 (along
// rows alone), offset of 8 lines / 16, mode.
__device__ inline uint64_t descriptor(const void* p, int next_rows) {
  const uint64_t address = shared_address(p), next = static_cast<uint64_t>(next_rows >> 4);
  return ((address & 0x3FFFF) >> 4) | (next << 16) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{1} << 62);
}

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all but the last kLeft groups of products are done.
template <int kLeft>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// The text of an instruction must be a literal, and only the type differs.
#define LOGITLESS_PRODUCT_64X192(type)                                                             \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      ".reg .pred add;\n"                                                                          \
      "setp.ne.b32 add, %98, 0;\n"                                                                 \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                                 \
      " {"                                                                                         \
      "%0, %1, %2, %3, %4, %5, %6, %7, "                                                           \
      "%8, %9, %10, %11, %12, %13, %14, %15, "                                                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, "                                                   \
      "%24, %25, %26, %27, %28, %29, %30, %31, "                                                   \
      "%32, %33, %34, %35, %36, %37, %38, %39, "                                                   \
      "%40, %41, %42, %43, %44, %45, %46, %47, "                                                   \
      "%48, %49, %50, %51, %52, %53, %54, %55, "                                                   \
      "%56, %57, %58, %59, %60, %61, %62, %63, "                                                   \
      "%64, %65, %66, %67, %68, %69, %70, %71, "                                                   \
      "%72, %73, %74, %75, %76, %77, %78, %79, "                                                   \
      "%80, %81, %82, %83, %84, %85, %86, %87, "                                                   \
      "%88, %89, %90, %91, %92, %93, %94, %95}, "                                                  \
      "%96, %97, add, 1, 1, %99, %100;\n"                                                          \
      "}\n"                                                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])                            \
      : "l"(a), "l"(b), "r"(add), "n"(kA == Along::rows), "n"(kB == Along::rows))

// Starts d [64, 192] (+)= a [64, 16] b [192, 16]^T. Thread t of the warpgroup holds rows 16 (t /
// 32) + (t % 32) / 4 and 8 below; d[4 i + {0, 1}] and d[4 i + {2, 3}] are their columns 8 i + 2 (t
// % 4) + {0, 1}.
template <class T, Along kA, Along kB>
__device__ inline void product_64x192(float (&d)[96], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    LOGITLESS_PRODUCT_64X192("bf16");
  } else {
    LOGITLESS_PRODUCT_64X192("f16");
  }
}
#undef LOGITLESS_PRODUCT_64X192

// Stores four 8 x 8 matrices of 16-bit elements from a warp's registers; each lane gives the
// address of a line.
__device__ inline void store_matrices(uint32_t line, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace logitless::cuda::sm90
