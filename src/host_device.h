// SPDX-License-Identifier: Apache-2.0
// Marks a function that kernels call too; other compilers than nvcc read nothing there.
#pragma once

#ifdef __CUDACC__
#define LOGITLESS_HOST_DEVICE __host__ __device__
#else
#define LOGITLESS_HOST_DEVICE
#endif
