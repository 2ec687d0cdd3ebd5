// SPDX-License-Identifier: Apache-2.0
// These tell how often memory was asked for, in a program that allocation_count.cpp is part of.
#pragma once

#include <cstdint>

namespace logitless::conformance {

// Counts calls of operator new and, where counts_malloc(), of malloc, calloc and realloc.
int64_t allocations();

// Returns whether this C library lets a program put its own malloc in place; sanitizers do not.
bool counts_malloc();

}  // namespace logitless::conformance
