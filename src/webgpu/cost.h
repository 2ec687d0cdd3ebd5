// SPDX-License-Identifier: Apache-2.0
// A product is cut into tiles, and a plan's time predicted, by pure arithmetic on shapes. The
// figures are those of one H200 through Vulkan (docs/kernels/webgpu.md); another device is another
// factor on all of them, so they choose well there too. Nothing is measured at run time, so that
// the same call has the same plan.
#pragma once

#include "src/webgpu/plan.h"

namespace logitless::webgpu {

struct Tile {
  bool small = false;    // product_small.wgsl makes it
  int64_t m = 0, n = 0;  // they are the rows and columns of the result
  int64_t threads() const { return small ? 64 : m * n / 64; }
  int64_t count(int64_t rows, int64_t columns) const {
    return ((rows + m - 1) / m) * ((columns + n - 1) / n);
  }
};
// Tiles change no bit of a product: its sums are added along k in order.
Tile tile_of(int64_t rows, int64_t columns, int64_t depth, bool logits);

// Returns how many slices of the window make enough workgroups of grad_input's few tiles.
int64_t most_slices(const Problem& problem, int64_t chunk, int64_t window);

double predicted_microseconds(const Problem& problem, const Plan& plan);

}  // namespace logitless::webgpu
