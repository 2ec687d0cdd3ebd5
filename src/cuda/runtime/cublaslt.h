// SPDX-License-Identifier: Apache-2.0
// The declarations of cuBLASLt's C interface that are used, so that building needs no header
// of it. The values are those that NVIDIA documents for CUDA 12 and 13 (cublasLt.h, cublas_api.h,
// library_types.h).
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace logitless::cuda::lt {

using Handle = void*;
using Layout = void*;
using Description = void*;
using Preference = void*;
struct Algorithm {
  uint64_t data[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

constexpr int success = 0, not_supported = 15;
constexpr int type_f32 = 0, type_f16 = 2, type_bf16 = 14;
constexpr int compute_f32 = 68, compute_tf32 = 77;
constexpr int description_pointer_mode = 2, description_transpose_a = 3,
              description_transpose_b = 4;
constexpr int pointers_on_device = 1;
constexpr int preference_workspace_bytes = 1, preference_reduction_mask = 3,
              preference_alignment_a = 5, preference_alignment_b = 6, preference_alignment_c = 7,
              preference_alignment_d = 8;
constexpr uint32_t reduction_in_compute_type = 2;  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
// CUBLASLT_ALGO_CONFIG_TILE_ID, CUBLASLT_ALGO_CONFIG_SPLITK_NUM
constexpr int algorithm_tile = 1, algorithm_split = 2;
constexpr int tile_128x128 = 20, tile_128x256 = 23, tile_256x128 = 24;

struct Functions {
  int (*create)(Handle*);
  size_t (*version)();
  int (*layout_create)(Layout*, int type, uint64_t rows, uint64_t columns, int64_t ld);
  int (*layout_destroy)(Layout);
  int (*description_create)(Description*, int compute_type, int scale_type);
  int (*description_destroy)(Description);
  int (*description_set)(Description, int attribute, const void* value, size_t bytes);
  int (*preference_create)(Preference*);
  int (*preference_destroy)(Preference);
  int (*preference_set)(Preference, int attribute, const void* value, size_t bytes);
  int (*heuristic)(Handle, Description, Layout a, Layout b, Layout c, Layout d, Preference,
                   int requested, HeuristicResult*, int* found);
  int (*check)(Handle, Description, Layout a, Layout b, Layout c, Layout d, const Algorithm*,
               HeuristicResult*);
  int (*algorithm_get)(const Algorithm*, int attribute, void* value, size_t bytes, size_t* written);
  int (*multiply)(Handle, Description, const void* alpha, const void* a, Layout, const void* b,
                  Layout, const void* beta, const void* c, Layout, void* d, Layout,
                  const Algorithm*, void* workspace, size_t workspace_bytes, cudaStream_t);
};

}  // namespace logitless::cuda::lt
