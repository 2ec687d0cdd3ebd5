// SPDX-License-Identifier: Apache-2.0
// error(code, format, ...) returns a Status with a printf-style message.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "logitless/status.h"

namespace logitless {

// printf prints the sign of a NaN, which is meaningless.
inline double unsigned_nan(double value) { return value == value ? value : __builtin_nan(""); }

[[gnu::format(printf, 2, 3)]] inline Status error(StatusCode code, const char* format, ...) {
  Status status(code, "");
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(status.c()->message, sizeof(status.c()->message), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace logitless
