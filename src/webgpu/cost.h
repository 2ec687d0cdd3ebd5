// SPDX-License-Identifier: Apache-2.0
// Tiles of products and predicted times of plans, computed from shapes. The constants were measured
// on an H200 through Vulkan (docs/kernels/webgpu.md). Nothing is measured at run time, so that the
// same call has the same plan; other devices get the same choices.
#pragma once

#include "src/webgpu/plan.h"

namespace logitless::webgpu {

struct Tile {
  bool small = false;    // product_small.wgsl instead of product.wgsl
  int64_t m = 0, n = 0;  // rows and columns of the result
  int64_t threads() const { return small ? 64 : m * n / 64; }
  int64_t count(int64_t rows, int64_t columns) const {
    return ((rows + m - 1) / m) * ((columns + n - 1) / n);
  }
};
// The choice of the tile changes no bit of a product: its sums are added along k in order.
Tile tile_of(int64_t rows, int64_t columns, int64_t depth, bool logits);

// The number of slices of a window that turns grad_input's few tiles into enough workgroups.
int64_t most_slices(const Problem& problem, int64_t chunk, int64_t window);

double predicted_microseconds(const Problem& problem, const Plan& plan);

}  // namespace logitless::webgpu
