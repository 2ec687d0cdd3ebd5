// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace logitless {

// For values >= 0.
constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return divide_up(value, multiple) * multiple;
}

}  // namespace logitless
