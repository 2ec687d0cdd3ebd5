// SPDX-License-Identifier: Apache-2.0
// How a row's partial sums are read, whichever kernel wrote them.
#pragma once

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/units.cuh"

namespace logitless::cuda {

// A row's sums, one segment at a time, or for plain logits on Hopper one unit at a time, whether or
// not the unit's tiles have been added already.
class RowSegments {
 public:
  // `tiles` and `teams`: UnitShares.
  __device__ RowSegments(const Partials& partials, int row, int valid, int tiles, int teams)
      : p_(partials), row_(row), base_(row * p_.segments), count_(static_cast<int>(p_.segments)) {
    if (p_.unit_width == 0) return;
    units_.column_tiles = tiles;
    if (p_.unit_width > 1) {
      units_ = Units::make((valid + unit_rows - 1) / unit_rows, tiles, unit_tiles, teams);
    }
    count_ = (tiles + unit_tiles - 1) / unit_tiles;
  }
  __device__ int count() const { return count_; }
  // Whether every segment is in memory.
  __device__ bool are_in_place() const { return p_.unit_width == 0; }
  // Segment b as it is in memory, except that a unit may have to be added up first.
  __device__ PartialSum operator()(int b) const {
    if (are_in_place()) return in_place(b);
    PartialSum unit[1];
    of_tiles(b, unit);
    return unit[0];
  }

  // Adds up units b, b + 32, ... of segments that are tiles, up to the last. A loop, because short
  // code is fetched quickly, and what the first tile brings into the L1 cache serves the others.
  template <int kUnits>
  __device__ void of_tiles(int b, PartialSum (&unit)[kUnits]) const {
    PartialSum next[kUnits];
    const auto load = [&](int j) {
#pragma unroll
      for (int n = 0; n < kUnits; ++n) {
        next[n] = {};
        if (j < tiles_of(b + 32 * n)) {
          next[n] = in_place((b + 32 * n) * unit_tiles + j);
        }
      }
    };
    load(0);
#pragma unroll 1
    for (int j = 0; j < tiles_of(b); ++j) {
      PartialSum tile[kUnits];
#pragma unroll
      for (int n = 0; n < kUnits; ++n) tile[n] = next[n];
      load(j + 1);
#pragma unroll
      for (int n = 0; n < kUnits; ++n) unit[n] = combine(unit[n], tile[n]);
    }
  }

  // If segments are units, the units before the first single tile are in memory.
  __device__ int first_single() const { return units_.first_single(row_ / unit_rows); }
  __device__ PartialSum in_place(int b) const { return {p_.maximum[base_ + b], p_.sum[base_ + b]}; }
  __device__ PartialSum single(int b) const {
    const int64_t step =
        int64_t{b < units_.full ? units_.rest : units_.row_clusters} * p_.single_rows;
    const int64_t first =
        int64_t{units_.single(row_ / unit_rows, b, 0)} * p_.single_rows + row_ % unit_rows;
    const int count = tiles_of(b);
    PartialSum tile[unit_tiles], all;
#pragma unroll
    for (int j = 0; j < unit_tiles; ++j) {
      const int64_t at = first + j * step;
      if (j < count) tile[j] = {p_.single_maximum[at], p_.single_sum[at]};
    }
#pragma unroll
    for (int j = 0; j < unit_tiles; ++j) all = combine(all, tile[j]);
    return all;
  }

 private:
  __device__ int tiles_of(int b) const {
    return min(unit_tiles, units_.column_tiles - b * unit_tiles);
  }

  const Partials& p_;
  int row_;
  int64_t base_;
  int count_;
  Units units_{};
};

}  // namespace logitless::cuda
