// SPDX-License-Identifier: Apache-2.0
// A tile on Hopper is a cluster's: two blocks with 256 rows each (docs/kernels/hopper.md).
#pragma once

namespace logitless::cuda::sm90 {

constexpr int cluster_rows = 512, tile_rows = cluster_rows / 2, tile_columns = 192, tile_depth = 64;
// Row clusters per group of grad_weight's Schedule, as measured in
// docs/experiments/2026-11-hopper-kernels.md.
constexpr int weight_group = 2;

}  // namespace logitless::cuda::sm90
