// SPDX-License-Identifier: Apache-2.0
// The status that a call must return, and when a value is correct.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "logitless/logitless.h"

namespace logitless::fuzz {

[[noreturn]] inline void fail(const char* what, const std::string& detail) {
  std::fprintf(stderr, "c_api_fuzz: %s: %s\n", what, detail.c_str());
  std::abort();
}

inline std::string text(const logitless_status& s) {
  return "status " + std::to_string(s.code) + " '" + s.message + "'";
}

inline void check_status(const logitless_status& s, int32_t returned) {
  if (s.code != returned) fail("the code returned is not the one written", text(s));
  if (s.code < LOGITLESS_OK || s.code > LOGITLESS_INTERNAL) fail("unknown code", text(s));
  if (s.code == LOGITLESS_INTERNAL) fail("internal error", text(s));
  if (std::memchr(s.message, 0, sizeof(s.message)) == nullptr) fail("message without end", "");
  if ((s.code == LOGITLESS_OK) != (s.message[0] == 0)) fail("message and code differ", text(s));
}

inline double most(DType dtype) {
  return dtype == DType::f16 ? 65504 : dtype == DType::bf16 ? 0x1.FEp127 : FLT_MAX;
}

// Whether an infinite result is NaN or inf is tested by the conformance suite; here it must only
// not be finite.
inline bool within(double got, double want, double bound, DType dtype) {
  if (!std::isfinite(want)) return !std::isfinite(got);
  if (std::isnan(bound)) return !std::isnan(got);  // the bound of a sum with infinities is NaN
  if (std::isinf(got)) return (got > 0) == (want > 0) && std::fabs(want) + bound >= most(dtype);
  return std::fabs(got - want) <= bound;
}

}  // namespace logitless::fuzz
