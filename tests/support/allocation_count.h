// SPDX-License-Identifier: Apache-2.0
// How often memory was asked for, in a program that allocation_count.cpp is part of.
#pragma once

#include <cstdint>

namespace logitless::conformance {

// Calls of operator new and, if counts_malloc(), of malloc, calloc and realloc.
int64_t allocations();

// Whether this C library lets a program replace malloc; sanitizers do not.
bool counts_malloc();

}  // namespace logitless::conformance
