// SPDX-License-Identifier: Apache-2.0
// Compares our declarations of cuBLASLt with NVIDIA's header, if installed. Compiled, never run.
#include <cublasLt.h>

#include <cstddef>
#include <type_traits>

#include "src/cuda/runtime/cublaslt.h"

namespace logitless::cuda::lt {

#define SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))
SAME(success, CUBLAS_STATUS_SUCCESS);
SAME(not_supported, CUBLAS_STATUS_NOT_SUPPORTED);
SAME(type_f32, CUDA_R_32F);
SAME(type_f16, CUDA_R_16F);
SAME(type_bf16, CUDA_R_16BF);
SAME(compute_f32, CUBLAS_COMPUTE_32F);
SAME(compute_tf32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME(description_pointer_mode, CUBLASLT_MATMUL_DESC_POINTER_MODE);
SAME(description_transpose_a, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(description_transpose_b, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(pointers_on_device, CUBLASLT_POINTER_MODE_DEVICE);
SAME(preference_workspace_bytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(preference_reduction_mask, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(preference_alignment_a, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(preference_alignment_b, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(preference_alignment_c, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(preference_alignment_d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(reduction_in_compute_type, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME(algorithm_tile, CUBLASLT_ALGO_CONFIG_TILE_ID);
SAME(algorithm_split, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
SAME(tile_128x128, CUBLASLT_MATMUL_TILE_128x128);
SAME(tile_128x256, CUBLASLT_MATMUL_TILE_128x256);
SAME(tile_256x128, CUBLASLT_MATMUL_TILE_256x128);

using Theirs = cublasLtMatmulHeuristicResult_t;
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(HeuristicResult) == sizeof(Theirs));
static_assert(offsetof(HeuristicResult, algorithm) == offsetof(Theirs, algo));
static_assert(offsetof(HeuristicResult, workspace_bytes) == offsetof(Theirs, workspaceSize));
static_assert(offsetof(HeuristicResult, state) == offsetof(Theirs, state));
static_assert(offsetof(HeuristicResult, waves) == offsetof(Theirs, wavesCount));

// Calls are compared by their number of arguments: enums and handles differ in type, not in size.
template <class>
inline constexpr int arguments = -1;
template <class Result, class... Arguments>
inline constexpr int arguments<Result (*)(Arguments...)> = sizeof...(Arguments);
#define SAME_CALL(ours, theirs) \
  static_assert(arguments<decltype(Functions::ours)> == arguments<decltype(&theirs)>)
SAME_CALL(create, cublasLtCreate);
SAME_CALL(version, cublasLtGetVersion);
SAME_CALL(layout_create, cublasLtMatrixLayoutCreate);
SAME_CALL(layout_destroy, cublasLtMatrixLayoutDestroy);
SAME_CALL(description_create, cublasLtMatmulDescCreate);
SAME_CALL(description_destroy, cublasLtMatmulDescDestroy);
SAME_CALL(description_set, cublasLtMatmulDescSetAttribute);
SAME_CALL(preference_create, cublasLtMatmulPreferenceCreate);
SAME_CALL(preference_destroy, cublasLtMatmulPreferenceDestroy);
SAME_CALL(preference_set, cublasLtMatmulPreferenceSetAttribute);
SAME_CALL(heuristic, cublasLtMatmulAlgoGetHeuristic);
SAME_CALL(check, cublasLtMatmulAlgoCheck);
SAME_CALL(algorithm_get, cublasLtMatmulAlgoConfigGetAttribute);
SAME_CALL(multiply, cublasLtMatmul);

}  // namespace logitless::cuda::lt
