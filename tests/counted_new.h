// SPDX-License-Identifier: Apache-2.0
// How often operator new was called, in a program that counted_new.cpp is part of.
#pragma once

#include <cstdint>

namespace logitless::conformance {

int64_t allocations();

}  // namespace logitless::conformance
