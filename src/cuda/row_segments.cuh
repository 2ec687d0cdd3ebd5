// SPDX-License-Identifier: Apache-2.0
// A row's partial sums, whichever kernel has left them.
#pragma once

#include "src/cuda/linear.cuh"
#include "src/cuda/sm90/units.cuh"

namespace logitless::cuda {

// The sums of a row a segment at a time; of plain logits on Hopper a unit at a time, whoever was
// the one to add its tiles.
class RowSegments {
 public:
  // tiles, clusters: how units were shared out.
  __device__ RowSegments(const Partials& partials, int row, int valid, int tiles, int clusters)
      : p_(partials), row_(row), base_(row * p_.segments), count_(static_cast<int>(p_.segments)) {
    if (p_.unit_width == 0) return;
    units_ = sm90::Units::make((valid + 511) / 512, tiles, sm90::unit_tiles, clusters);
    count_ = units_.columns();
  }
  __device__ int count() const { return count_; }
  __device__ sm90::PartialSum operator()(int b) const {
    if (p_.unit_width == 1) return of_tiles(p_.maximum, p_.sum, b, base_ + b * sm90::unit_tiles, 1);
    if (p_.unit_width > 1) {
      const int cluster = row_ / 512, single = units_.single(cluster, b, 0);
      if (single >= 0) {
        const int64_t first = int64_t{single} * p_.single_rows + row_ % 512;
        const int step = b < units_.full ? units_.rest : units_.row_clusters;
        return of_tiles(p_.single_maximum, p_.single_sum, b, first, int64_t{step} * p_.single_rows);
      }
    }
    return {p_.maximum[base_ + b], p_.sum[base_ + b]};
  }

 private:
  // The tiles of unit b lie `step` elements apart.
  __device__ sm90::PartialSum of_tiles(const float* maximum, const float* sum, int b, int64_t first,
                                       int64_t step) const {
    const int count = min(sm90::unit_tiles, units_.column_tiles - b * sm90::unit_tiles);
    sm90::PartialSum tile[sm90::unit_tiles], all;
#pragma unroll
    for (int j = 0; j < sm90::unit_tiles; ++j) {
      if (j < count) tile[j] = {maximum[first + j * step], sum[first + j * step]};
    }
#pragma unroll
    for (int j = 0; j < sm90::unit_tiles; ++j) all = sm90::combine(all, tile[j]);
    return all;
  }

  const Partials& p_;
  int row_;
  int64_t base_;
  int count_;
  sm90::Units units_{};
};

}  // namespace logitless::cuda
