// SPDX-License-Identifier: Apache-2.0
// The instruction sets that the CPU kernels are compiled for. Their .cpp files include this before
// any Highway header: if lists differed, a forced target would be missing in some files.
#pragma once

// SSE2 runs on every x86-64 and is the baseline. SSSE3 is no faster here, and AVX3_DL adds only
// integer instructions to AVX3; leaving both out saves a quarter of the build.
#ifndef HWY_DISABLED_TARGETS  // cmake/highway.cmake may define fewer targets
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
