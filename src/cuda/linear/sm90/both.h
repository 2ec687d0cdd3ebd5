// SPDX-License-Identifier: Apache-2.0
// For functions of headers that the host's compiler reads as well as the device's.
#pragma once

#if defined(__CUDACC__)
#define LOGITLESS_BOTH __host__ __device__
#else
#define LOGITLESS_BOTH
#endif
