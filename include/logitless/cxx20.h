// SPDX-License-Identifier: Apache-2.0
// Replaces an older C++'s many errors about concepts by one clear error. Compilers that knew a part
// of C++20 give a __cplusplus between those of C++17 and C++20.
#pragma once

#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) <= 201703L
#error "Logitless: the C++ headers need C++20 (CMAKE_CXX_STANDARD 20 or -std=c++20); c.h does not"
#endif
