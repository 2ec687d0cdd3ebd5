// SPDX-License-Identifier: Apache-2.0
// may_overlap tells whether two strided views of host memory share a byte.
#pragma once

#include <array>
#include <cstdint>

namespace logitless {

// These are the bytes of a strided view: element (i, j) is [address + i stride[0] + j stride[1], +
// element). Dimensions of one element have stride 0.
struct Footprint {
  uint64_t address = 0;
  uint64_t bytes = 0;  // it counts bytes from the first to the last; 0 says that the view is empty
  uint64_t element = 1;
  std::array<uint64_t, 2> last{};    // it is size - 1
  std::array<uint64_t, 2> stride{};  // it counts bytes
  bool operator==(const Footprint&) const = default;
};

// Returns false only where no byte is shared. It returns true only where one is, but for large
// interleaved views whose strides have no common divisor that keeps them apart.
bool may_overlap(const Footprint& a, const Footprint& b);

}  // namespace logitless
