// SPDX-License-Identifier: Apache-2.0
// This says in words what an older C++ would say in errors about concepts. A compiler that had a
// part of C++20 when it was new calls that a number between C++17's and C++20's.
#pragma once

#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) <= 201703L
#error "Logitless: the C++ headers need C++20 (CMAKE_CXX_STANDARD 20 or -std=c++20); c.h does not"
#endif
