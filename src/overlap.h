// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace logitless {

// The bytes of a strided view: element (i, j) is [address + i stride[0] + j stride[1], + element).
// Dimensions of one element have stride 0.
struct Footprint {
  uint64_t address = 0;
  uint64_t bytes = 0;  // from the first to the last; 0 for an empty view
  uint64_t element = 1;
  std::array<uint64_t, 2> last{};    // size - 1
  std::array<uint64_t, 2> stride{};  // bytes
  bool operator==(const Footprint&) const = default;
};

// Whether the two share a byte. May return true for disjoint large interleaved views whose strides
// have no common divisor that separates them.
bool may_overlap(const Footprint& a, const Footprint& b);

}  // namespace logitless
