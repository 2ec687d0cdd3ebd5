// SPDX-License-Identifier: Apache-2.0
// The forward modes without options; only stored logits may have a scale. A tile's epilogue runs
// while the products of its other half and of the next tile are computed:
//   its last steps    the 64 upper rows' products, then the lower ones'; under these the upper
//                     rows' exponentials
//   the next tile's   first steps, of the upper rows; under these the lower rows' exponentials
// Each overlap lasts one step of depth, or two (split_steps); a tile has at least twice as many.
// Exponentials are relative to the anchor z_t, which is known before the products, not to the
// tile's maximum: no exponential waits for another, and no maximum is needed. If a row's sum shows
// that the row is too far from the anchor, it is summed again, relative to its maximum. E and dz go
// through shared memory and TMA. They use the stage of the second to last step, whose products are
// done; these 16 KB per warpgroup are released once the boxes have been read. Logits are stored
// directly, 32 bytes of eight rows at a time. The sums of stored logits have no anchor: nothing is
// known of their rows, and the heads of a divergence need them to the last bits. Each lane's sum is
// relative to the greatest of its own logits.
#pragma once

#include <cfloat>

#include "src/cuda/linear/sm90/plain_input.cuh"
#include "src/cuda/linear/units.cuh"

namespace logitless::cuda::sm90 {

// A unit is computed by one cluster, a tile of all its rows at a time.
static_assert(unit_rows == cluster_rows);

// The sums of a thread's two rows, relative to the anchor, or to `maximum` unless that is NaN. For
// stored logits `maximum` is of raw logits, and the sums are always relative to it.
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

// Combines the sums of a quad's lanes, each relative to its own maximum.
__device__ inline PartialSum join_lanes(float maximum, float sum) {
  const float most = quad_max(maximum), from = most == -infinity() ? 0.0f : most;
  return {most, quad_sum(sum * exp2_fast((maximum - from) * log2e))};
}

// Writes a tile's sums of 64 rows, during the next products. Each lane writes one of its quad's
// four rows, whose data it has. In mode sums they are added to the unit's sums, which are
// written after its last tile; else they go to memory.
template <Mode kMode>
__device__ inline void add_sums(const RowSums& sums, const RowData& data, const UnitItem& item,
                                bool ends, int row0, int part, const Arguments& a, int valid,
                                PartialSum* unit) {
  PartialSum own;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    PartialSum row;
    if constexpr (kMode == Mode::logits) {
      row = join_lanes(sums.maximum[h] * of_row(data.slope, part, h), sums.sum[h]);
    } else {
      row = {sums.maximum[h], quad_sum(sums.sum[h])};
    }
    if (h == 0 || threadIdx.x % 2 != 0) own = row;
  }
  if (kMode != Mode::logits && own.reference != own.reference) {
    // The exponentials are relative to anchor * log2(e), rounded; this corrects for that rounding.
    own.reference = fabsf(data.anchor) < most_anchor ? data.anchor : 0.0f;
    own.sum *= exp2_fast(-fmaf(own.reference, log2e, -(own.reference * log2e)));
  }
  const int quad = threadIdx.x % 4, row = row0 + 8 * (quad % 2) + 64 * part;
  if (quad / 2 != part) return;
  if (kMode == Mode::logits && a.partials.sum == nullptr) return;
  if constexpr (kMode == Mode::sums) {
    *unit = combine(*unit, own);
    if (!ends) return;
    own = *unit;
    *unit = PartialSum{};
  }
  write_sums(own, item, row, a, valid);
}

template <Mode kMode>
constexpr bool has_boxes = kMode == Mode::sums_e || kMode == Mode::dz;

// At a tile's end, and again at its start, this many steps run the upper rows' products before the
// lower ones', overlapped with other work. It is two, the whole ring, unless boxes leave room for
// only one.
template <Mode kMode>
constexpr int split_steps = has_boxes<kMode> ? 1 : 2;

// A tile's sum relative to the anchor must not be below this: exponentials that matter may then be
// 0.
constexpr float least_sum = 0x1p-100f;

// A thread has two rows of a half tile, which the index selects. For dz `anchor` is the anchor
// itself, for E anchor * log2(e), because exponentials are computed in base 2.
struct Starts {
  float anchor[2], log2_sum[2], factor[2], target_gradient[2];
};
template <Mode kMode>
__device__ inline Starts find_starts(const RowData& data, int part) {
  Starts s{};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float anchor = of_row(data.anchor, part, h);
    if constexpr (kMode == Mode::dz) {
      s.anchor[h] = anchor;
      s.log2_sum[h] = of_row(data.log2_sum, part, h);
      s.factor[h] = of_row(data.factor, part, h);
      s.target_gradient[h] = of_row(data.target_gradient, part, h);
    } else {
      s.anchor[h] = fabsf(anchor) < most_anchor ? anchor * log2e : 0.0f;
    }
  }
  return s;
}

// The accumulators stay unchanged, since products are in flight. Not is_masked of option_rows.cuh:
// with it ptxas spills a register of dz.
template <bool kMasked>
__device__ inline float element(const float (&d)[96], const LeftOut& mask, int i, int h, int c) {
  const float x = d[4 * i + 2 * h + c];
  if constexpr (!kMasked) return x;
  const int column = 8 * i + c;
  return column == mask.target[h] || column >= mask.end[h] ? -infinity() : x;
}

__device__ inline float log2_exponential(float x, const Starts& starts, int h) {
  return fmaf(x, log2e, -starts.anchor[h]);
}

// E of an element, or for dz only P p (src/row/dz-inl.h has the rest).
template <Mode kMode, bool kMasked>
__device__ inline float exponential(float x, const Starts& starts, const LeftOut& mask, int column,
                                    int h) {
  if constexpr (kMode == Mode::dz) {
    if (kMasked && column == mask.target[h]) return starts.target_gradient[h];
    const float log2_p = fmaf(x - starts.anchor[h], log2e, -starts.log2_sum[h]);
    return starts.factor[h] * exp2_fast(nonpositive(log2_p));
  }
  return exp2_fast(log2_exponential(x, starts, h));
}

// The maximum of row h over this thread's columns.
template <bool kMasked>
__device__ inline float find_maximum(const float (&d)[96], const LeftOut& mask, int h) {
  float maximum = -infinity();
#pragma unroll
  for (int i = 0; i < 24; ++i) {
    if (i % 4 == 0 && again(false)) break;
    maximum = fmaxf(fmaxf(maximum, element<kMasked>(d, mask, i, h, 0)),
                    element<kMasked>(d, mask, i, h, 1));
  }
  return maximum;
}

// The sum of row h relative to its maximum, over this thread's columns.
template <bool kMasked>
__device__ inline float sum_from_maximum(const float (&d)[96], const LeftOut& mask, int h,
                                         float maximum) {
  // In a row of -inf every exponential is 0; NaN stays NaN.
  const float reference = maximum == -infinity() ? 0.0f : maximum;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 24; ++i) {
    if (i % 4 == 0 && again(false)) break;
    // Not fma(x, log2(e), -m log2(e)): it rounds -m log2(e) first, and if |m| is large that error
    // enters the exponent.
    sum += exp2_fast((element<kMasked>(d, mask, i, h, 0) - reference) * log2e) +
           exp2_fast((element<kMasked>(d, mask, i, h, 1) - reference) * log2e);
  }
  return sum;
}

// Where 64 rows of a tile are.
struct HalfTile {
  int row;                // this thread's first row
  int column_tile, part;  // part is 0 in the upper half, 1 in the lower
};

// Computes the exponentials of 64 rows and their sums; writes the exponentials if they are kept.
template <class T, Mode kMode, bool kMasked>
__device__ inline void sum_rows(const float (&d)[96], const LeftOut& mask, const Starts& starts,
                                const HalfTile& at, const Arguments& a,
                                const CUtensorMap* panel_map, const uint8_t* boxes, int warpgroup,
                                RowSums* sums) {
  constexpr bool stores = has_boxes<kMode>;
  float sum[2] = {0, 0};
#pragma unroll
  for (int block = 0; block < 3; ++block) {
    const uint8_t* box = boxes + (at.part + block) % 2 * box_bytes;
#pragma unroll
    for (int two = 0; two < 4; ++two) {
      uint32_t packed[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = 8 * block + 2 * two + n / 2, h = n % 2;
        const float x = element<kMasked>(d, mask, i, h, 0), y = element<kMasked>(d, mask, i, h, 1);
        const float e0 = exponential<kMode, kMasked>(x, starts, mask, 8 * i, h);
        const float e1 = exponential<kMode, kMasked>(y, starts, mask, 8 * i + 1, h);
        sum[h] += e0 + e1;
        if constexpr (keeps_codes<T, kMode>) {
          packed[n] = encode_logs(log2_exponential(x, starts, h), log2_exponential(y, starts, h));
        } else if constexpr (stores) {
          packed[n] = pack<T>(e0, e1);
        }
      }
      if constexpr (stores) write_matrices(box, two, packed);
    }
    if constexpr (stores) {
      fence_copies();
      if (threadIdx.x % 128 == 0) stores_wait();  // so the other box is free when it is written
      group_sync(warpgroup);
      if (threadIdx.x % 128 == 0) {
        const int first = static_cast<int>(a.first_column - a.panel.first) / 64;
        store_box(panel_map, box, at.row, first + 3 * at.column_tile + block);
      }
    }
  }
  if constexpr (kMode != Mode::dz) {
    float maximum[2] = {nan_value(), nan_value()};
    // Each lane decides alone whether its row may be too far from the anchor, without waiting for
    // the others. It allows an eighth of the limit, so that four lanes' sums stay within it.
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) far |= !(sum[h] > least_sum && sum[h] < a.most_sum / 8);
    if (__any_sync(whole_warp, far)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float of_row = quad_sum(sum[h]), m = quad_max(find_maximum<kMasked>(d, mask, h));
        if (!(of_row > least_sum && of_row < a.most_sum)) {
          sum[h] = sum_from_maximum<kMasked>(d, mask, h, m);
          maximum[h] = m;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sums->sum[h] = sum[h], sums->maximum[h] = maximum[h];
  }
}

// Stores the logits of 64 rows of a tile and computes their sums, each lane's relative to its own
// greatest logit.
template <bool kMasked>
__device__ inline void store_rows(const float (&d)[96], const LeftOut& mask, const RowData& data,
                                  const HalfTile& at, const Arguments& a, RowSums* sums) {
  const int64_t column = int64_t{at.column_tile} * tile_columns + 2 * (threadIdx.x % 4);
  float* const first = reinterpret_cast<float*>(a.panel.data) + at.row * a.panel.pitch + column;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* const to = first + 8 * h * a.panel.pitch;
#pragma unroll
    for (int i = 0; i < 24; ++i) {  // whole pairs; elements after the last column are never read
      if (kMasked && 8 * i >= mask.end[h]) break;
      *reinterpret_cast<float2*>(to + 8 * i) = {d[4 * i + 2 * h], d[4 * i + 2 * h + 1]};
    }
  }
  if (a.partials.sum == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float maximum = find_maximum<kMasked>(d, mask, h);
    const float from = maximum == -infinity() ? 0.0f : maximum;
    const float scale = fminf(of_row(data.slope, at.part, h) * log2e, FLT_MAX);  // 0 inf is NaN
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 24; ++i) {
      sum += exp2_fast((element<kMasked>(d, mask, i, h, 0) - from) * scale) +
             exp2_fast((element<kMasked>(d, mask, i, h, 1) - from) * scale);
    }
    sums->sum[h] = sum, sums->maximum[h] = maximum;
  }
}

// Targets, columns after the last one and, in panels, rows after the last one are rare, so there
// are two copies of the code.
template <class T, Mode kMode>
__device__ inline void half_tile(const float (&d)[96], const RowData& data, const HalfTile& at,
                                 const Arguments& a, int valid, const CUtensorMap* panel_map,
                                 const uint8_t* boxes, int warpgroup, RowSums* sums) {
  const int quad = threadIdx.x % 4, from = threadIdx.x % 32 - quad + 2 * at.part;
  const int column = static_cast<int>(a.first_column) + at.column_tile * tile_columns;
  const int left = min(tile_columns, static_cast<int>(a.first_column + a.columns) - column);
  Starts starts{};
  if constexpr (kMode != Mode::logits) starts = find_starts<kMode>(data, at.part);
  LeftOut mask;
  bool any = left < tile_columns;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int target = __shfl_sync(whole_warp, data.target, from + h) - column;
    mask.target[h] = target - 2 * quad;
    const bool exists = at.row + 8 * h < valid;
    mask.end[h] = kMode != Mode::sums && !exists ? -2 * quad : left - 2 * quad;
    any |= (target >= 0 && target < tile_columns) || (kMode != Mode::sums && !exists);
  }
  if constexpr (kMode == Mode::logits) {
    if (__any_sync(whole_warp, any)) return store_rows<true>(d, mask, data, at, a, sums);
    return store_rows<false>(d, mask, data, at, a, sums);
  }
  if (__any_sync(whole_warp, any)) {
    sum_rows<T, kMode, true>(d, mask, starts, at, a, panel_map, boxes, warpgroup, sums);
  } else {
    sum_rows<T, kMode, false>(d, mask, starts, at, a, panel_map, boxes, warpgroup, sums);
  }
}

template <class T, Mode kMode>
__device__ inline void plain_tiles(const CUtensorMap* panel_map, const Pipeline& pipeline,
                                   const PlainWork& work, int warpgroup, const Arguments& a) {
  constexpr bool stores = has_boxes<kMode>, is_scaled = kMode == Mode::logits;
  constexpr int split = split_steps<kMode>;
  float upper[96], lower[96];
  const uint32_t signals = threadIdx.x % 128;
  const auto release = [&](int stage) { a.team.release(pipeline.empty + stage, signals); };
  Ring ring;
  int first[split], last[split], lent = -1;  // stages of a tile's first and last steps
  Walk walk(a.team);
  if (!walk.more(work.units)) return;
  PartialSum unit;
  // Runs during the last lower rows' products. A stage is released before the next one is waited
  // for, because the threads that copy single rows fill three stages before they announce the
  // first.
  const auto begin_upper = [&](bool exists, bool behind_others) {
#pragma unroll
    for (int i = 0; i < split; ++i, ring.next()) {
      if (i > 0 && behind_others) {
        products_wait<1>();
        release(last[i]);
      }
      if (exists) wait(pipeline.full + ring.stage, ring.phase);
      first[i] = ring.stage;
      const StageOperands now(pipeline, first[i], warpgroup);
      multiply_rows<T, Along::depth, Along::depth>(upper, now.left, now.right, i == 0);
    }
  };
  const auto multiply_lower = [&](const int(&steps)[split], bool begins) {
#pragma unroll
    for (int i = 0; i < split; ++i) {
      const StageOperands now(pipeline, steps[i], warpgroup);
      multiply_rows<T, Along::depth, Along::depth>(lower, now.left + lower_left, now.right,
                                                   begins && i == 0);
    }
  };
  begin_upper(true, false);
  multiply_lower(first, true);
  do {  // with the first steps in flight
    const UnitItem item = walk.item(work.units);
    const bool ends = item.tile + 1 == item.end;
    const int row =
        item.row_cluster * cluster_rows + a.team.rank() * tile_rows + thread_row(warpgroup);
    const RowData data = load_row<kMode, is_scaled>(a, row, work.valid);
    if (stores && lent >= 0 && signals == 0) {
      stores_wait();
      a.team.release(pipeline.empty + lent, 0);
      a.team.release(pipeline.empty + lent, 1);
    }
    if constexpr (split > 1) {
      products_wait<1>();
      release(first[0]);
    }
    int previous = first[split - 1];
#pragma unroll 1
    for (int k = 2 * split; k < a.depth_tiles; ++k) {
      const StageOperands now(pipeline, ring.stage, warpgroup);
      wait(pipeline.full + ring.stage, ring.phase);
      multiply_stage<T, Along::depth, Along::depth>(upper, lower, now.left, now.right, true);
      products_wait<1>();
      release(previous);
      previous = ring.stage;
      ring.next();
    }
    const uint8_t* boxes = nullptr;
#pragma unroll
    for (int i = 0; i < split; ++i, ring.next()) {
      wait(pipeline.full + ring.stage, ring.phase);
      last[i] = ring.stage;
      const StageOperands now(pipeline, last[i], warpgroup);
      multiply_rows<T, Along::depth, Along::depth>(upper, now.left, now.right, false);
      if (i > 0) continue;
      products_wait<1>();
      if constexpr (stores) {
        lent = previous;
        boxes = pipeline.left(lent) + (warpgroup - 1) * 2 * box_bytes;
      } else {
        release(previous);
      }
    }
    multiply_lower(last, false);
    products_wait<split>();
    if constexpr (stores) group_sync(warpgroup);  // until no warp's products read the boxes
    const HalfTile above{row, item.tile, 0}, below{row + 64, item.tile, 1};
    RowSums sums;
    half_tile<T, kMode>(upper, data, above, a, work.valid, panel_map, boxes, warpgroup, &sums);
    if constexpr (split > 1) {
      products_wait<1>();
      release(last[0]);
    }
    walk.next(work.teams);
    // After the last tile it multiplies arbitrary memory; the result is not used.
    begin_upper(walk.more(work.units), true);
    if constexpr (kMode != Mode::dz) {
      add_sums<kMode>(sums, data, item, ends, row, 0, a, work.valid, &unit);
    }
    if constexpr (split == 1) {
      products_wait<1>();
      release(last[0]);
    }
    half_tile<T, kMode>(lower, data, below, a, work.valid, panel_map, boxes, warpgroup, &sums);
    multiply_lower(first, true);
    if constexpr (kMode != Mode::dz) {
      add_sums<kMode>(sums, data, item, ends, row, 1, a, work.valid, &unit);
    }
  } while (walk.more(work.units));
  products_wait<0>();
  if (stores && signals == 0) stores_wait();
}

template <class T, Mode kMode>
__global__ void __launch_bounds__(block_threads, 1)
    plain_forward_kernel(const __grid_constant__ CUtensorMap input_map,
                         const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap panel_map,
                         const __grid_constant__ InputRows input,
                         const __grid_constant__ Arguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t dynamic[];
  const int warpgroup = __shfl_sync(whole_warp, static_cast<int>(threadIdx.x / 128), 0);
  __shared__ PlainWork work;
  if (threadIdx.x == 0) {
    prefetch_map(&input_map);
    prefetch_map(&weight_map);
    if (has_boxes<kMode>) prefetch_map(&panel_map);  // the modes without a panel rarely read it
  }
  const Pipeline pipeline = open_pipeline(dynamic);
  clear_left_out(pipeline, a.left_rows);
  if (threadIdx.x == 0) work = find_plain_work(a, input);
  cluster_sync();
  if (warpgroup == 0) {
    fewer_registers<40>();
    const bool gathers = kMode == Mode::sums && work.gathers;
    if (threadIdx.x == 1 || (threadIdx.x == 0 && !gathers)) {
      const bool other = kMode == Mode::sums && work.some;
      copy_boxes(other ? &panel_map : &input_map, &weight_map, pipeline, work, a);
    }
    if constexpr (kMode == Mode::sums) {
      if (gathers && threadIdx.x >= row_copiers) copy_rows(&panel_map, input, pipeline, work, a);
    }
    __syncwarp();
  } else if (!has_some(warpgroup, a.chunk.rows)) {
    skip_tiles(pipeline, work, a);
  } else {
    more_registers<232>();
    plain_tiles<T, kMode>(&panel_map, pipeline, work, warpgroup, a);
  }
  cluster_sync();  // a block must not exit while another may signal it
#endif
}

}  // namespace logitless::cuda::sm90
