// SPDX-License-Identifier: Apache-2.0
// Whether a double from a command line or from JavaScript can become an f32 or integer option
// without becoming another number, which would be an error (docs/semantics.md, "Bindings").
#pragma once

#include <cfloat>
#include <cstdint>

namespace logitless {

// Whether f32 holds the number, up to rounding, without making it 0 or infinite. Returns true for
// NaN and infinities: an option's own rule refuses them.
constexpr bool held_by_f32(double value) {
  const double size = value < 0 ? -value : value;
  const bool zero = size > 0 && size <= 0x1p-150;  // half of f32's least number rounds to 0
  const bool infinite = size >= 0x1.ffffffp127 && size <= DBL_MAX;
  return !zero && !infinite;
}
inline constexpr const char* what_f32_holds = "0, or 1.4e-45 to 3.4e+38 in size (f32)";

// Whether the number is an integer that no other integer rounds to: 2^53 + 1 becomes 2^53, so 2^53
// is excluded.
constexpr bool is_integer(double value) {
  return value > -0x1p53 && value < 0x1p53 &&
         value == static_cast<double>(static_cast<int64_t>(value));
}
inline constexpr const char* what_is_integer = "integers from -(2^53 - 1) to 2^53 - 1";

}  // namespace logitless
