// SPDX-License-Identifier: Apache-2.0
// The CPU kernels are compiled for these instruction sets. Every file with Highway kernels includes
// this before any Highway header, so that all of them offer the same list and a forced target
// exists everywhere.
#pragma once

// SSE2 is what every x86-64 runs and stays as the baseline. SSSE3 is no faster than it here, and
// AVX3_DL adds only integer instructions to AVX3; leaving both out saves a quarter of the build.
#ifndef HWY_DISABLED_TARGETS  // a quick build may ask for fewer
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#endif
