// SPDX-License-Identifier: Apache-2.0
// A thread has sums of 64 rows of a tile; this makes of them a row's sums of a tile, or of a unit,
// in memory, for the forward modes without options (plain.cuh).
#pragma once

#include "src/cuda/linear/sm90/forward.cuh"
#include "src/cuda/linear/units.cuh"

namespace logitless::cuda::sm90 {

static_assert(unit_rows == cluster_rows);

// These are the sums of a thread's two rows, relative to the anchor, or to `maximum` where that is
// no NaN.
struct RowSums {
  float sum[2], maximum[2];
};

// Writes a row's sums of a unit, or of a tile.
__device__ inline void write_sums(const PartialSum& sums, const UnitItem& item, int row,
                                  const Arguments& a, int valid) {
  if (row >= valid) return;
  const Partials& p = a.partials;
  if (item.single >= 0) {
    const int64_t to = int64_t{item.single} * p.single_rows + row % cluster_rows;
    p.single_maximum[to] = sums.reference;
    p.single_sum[to] = sums.sum;
  } else {
    const int64_t to = row * p.segments + item.tile / p.unit_width;
    p.maximum[to] = sums.reference;
    p.sum[to] = sums.sum;
  }
}

// Writes, under the next products, a tile's sums of 64 rows. Each lane takes those of one of its
// quad's four rows, whose data it has. Beside E they go to memory, else they are added to the
// unit's, which are written with its last tile.
template <Mode kMode>
__device__ inline void add_sums(const RowSums& sums, const RowData& data, const UnitItem& item,
                                bool ends, int row0, int part, const Arguments& a, int valid,
                                PartialSum* unit) {
  PartialSum own;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const PartialSum row{sums.maximum[h], quad_sum(sums.sum[h])};
    if (h == 0 || threadIdx.x % 2 != 0) own = row;
  }
  if (own.reference != own.reference) {
    // The exponentials are relative to the anchor but for a rounding, which is made good here.
    own.reference = fabsf(data.anchor) < most_anchor ? data.anchor : 0.0f;
    own.sum *= exp2_fast(-fmaf(own.reference, log2e, -(own.reference * log2e)));
  }
  const int quad = threadIdx.x % 4, row = row0 + 8 * (quad % 2) + 64 * part;
  if (quad / 2 != part) return;
  if constexpr (kMode == Mode::sums) {
    *unit = combine(*unit, own);
    if (!ends) return;
    own = *unit;
    *unit = PartialSum{};
  }
  write_sums(own, item, row, a, valid);
}

}  // namespace logitless::cuda::sm90
