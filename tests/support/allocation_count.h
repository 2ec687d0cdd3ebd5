// SPDX-License-Identifier: Apache-2.0
// Counts allocations, in programs that allocation_count.cpp is linked into.
#pragma once

#include <cstdint>

namespace logitless::conformance {

// Calls of operator new and, if counts_malloc(), of malloc, calloc and realloc.
int64_t allocations();

// Whether this C library lets a program replace malloc; sanitizers do not.
bool counts_malloc();

}  // namespace logitless::conformance
