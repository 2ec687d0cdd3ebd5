// SPDX-License-Identifier: Apache-2.0
// A tile on Hopper is a cluster's: two blocks with 256 rows each (docs/kernels/hopper.md).
#pragma once

namespace logitless::cuda::sm90 {

constexpr int cluster_rows = 512, tile_rows = cluster_rows / 2, tile_columns = 192, tile_depth = 64;

}  // namespace logitless::cuda::sm90
