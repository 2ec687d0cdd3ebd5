// SPDX-License-Identifier: Apache-2.0
// Marks a function that kernels call too; empty for compilers other than nvcc.
#pragma once

#ifdef __CUDACC__
#define LOGITLESS_HOST_DEVICE __host__ __device__
#else
#define LOGITLESS_HOST_DEVICE
#endif
