// SPDX-License-Identifier: Apache-2.0
// On Hopper a kernel multiplies and uses the logits at once: input [N, D] . weight [V, D]^T in
// tiles of 256 tokens x 192 columns. Two of its modes can write logits to memory:
//   sums     sum of exponentials of every row and tile (192 columns), and its reference,
//            the anchor or a maximum, the target's left out; for top-k also z in f32
//   sums_e   the same, and E = exp(z - z_target) times the softcap's slope in bf16; for f16 inputs
//            the code of E (numbers.cuh)
//   sums_kept  the same without the softcap's slope, and near the cap the distance to it
//   dz       P exp(z - lse), with P p - o at the target
//   logits   the raw logits in f32, with maximum and sum of exponentials of every row and tile
// This header is shared by two kernels: plain.cuh serves calls without options, with_options.cuh
// those with a bias, a map from raw to z, more statistics or more terms of dz. tile.cuh has the
// tile and its pipeline. Rows of tiles run fastest in groups of 2048 tokens, then the vocabulary.
#pragma once

#include "src/cuda/linear/chunk.cuh"
#include "src/cuda/linear/sm90/tile.cuh"

namespace logitless::cuda::sm90 {

enum class Mode { sums, sums_e, sums_kept, dz, logits };

// Whether the panel holds codes of E.
template <class T, Mode kMode>
constexpr bool keeps_codes = std::is_same_v<T, __half> && kMode == Mode::sums_e;

constexpr int half_right_rows = tile_columns / 2, group_clusters = 4;

// Options for the kernels of with_options.cuh; plain.cuh reads only the slopes, for stored logits.
struct TileOptions {
  MapFactors map;             // without the temperature if rows have their own maps
  const TokenMap* row_map;    // [N]  by token; null: `map` serves all rows
  const float* row_slope;     // [rows of the chunk]  slopes, if there is row_map
  const float* bias;          // [V + padding]  null without a bias
  const float* class_weight;  // [V + padding]  null if every class has weight 1
  bool smoothing, entropy;    // terms of dz
  float small;                // limit of |raw| for the short polynomial of tanh
  float near_cap;             // sums_kept: beyond this |z| the distance to the cap is kept, not E
  float terms[5];             // coefficients of raw^3, raw^5, ..., times the map's
  float large_terms[9];       // large_tanh as parameters, because constants would take registers
};

struct Arguments {
  Chunk chunk;
  Team team;
  int32_t left_rows;  // rows of the left operand that are copied for a tile
  Partials partials;
  const float* target_logit;
  const RowGradient* gradients;  // for dz only
  const float* target_gradient;  // for dz only
  Panel panel;  // written by every mode; f32 for `logits`, and for `sums`, which need none
  int64_t first_column, columns;  // of the vocabulary
  int64_t panel_end;              // whole blocks are written: zeros follow the last column
  int32_t depth_tiles;
  // Limits: of a sum relative to the anchor, and of the maximum's distance (log2) above it.
  float most_sum, most_distance;
  TileOptions options;
};

// Returns `x`, but the compiler must assume a new value each time, so it does not merge branches.
__device__ inline bool again(bool x) {
  int value = x;
  asm volatile("" : "+r"(value));
  return value != 0;
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(whole_warp, x, 1));
  return fmaxf(x, __shfl_xor_sync(whole_warp, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(whole_warp, x, 1);
  return x + __shfl_xor_sync(whole_warp, x, 2);
}

// The target's column within the view, or a column that is in no tile.
__device__ inline int find_target(const Arguments& a, int row, int valid) {
  return row < valid ? a.chunk.tokens.target[a.chunk.first + row] : -1;
}

// What a row's exponents are relative to.
struct RowStart {
  float anchor;    // z_t for E, m for dz
  float log2_sum;  // log2 s, only for dz
  float factor;    // P, only for dz
};
template <Mode kMode>
__device__ inline RowStart load_start(const Arguments& a, int row, int valid) {
  RowStart r{0, 0, 0};
  if (row >= valid) return r;
  if constexpr (kMode == Mode::sums_e || kMode == Mode::sums_kept) r.anchor = a.target_logit[row];
  if constexpr (kMode == Mode::dz) {
    const RowGradient& g = a.gradients[row];
    r.anchor = g.reference;
    r.log2_sum = g.log_sum * log2e;
    // A row whose maximum is not finite has no probabilities.
    const bool exists = fabsf(g.reference) < infinity() && g.log_sum == g.log_sum;
    r.factor = exists ? g.probability : nan_value();
  }
  return r;
}

// A quad of lanes shares four rows, row0 + 0, 8, 64, 72: before the products each lane loads the
// data of one row, and the others get it from that lane.
struct RowData {
  int target;
  float anchor;  // z_t, or m for dz
  // for dz only: log2 s, P, s, and dz of the target
  float log2_sum, factor, smoothing, target_gradient;
  float slope;  // for kScaled only: from raw to z
};
template <Mode kMode, bool kScaled = false>
__device__ inline RowData load_row(const Arguments& a, int row0, int valid) {
  const int quad = threadIdx.x % 4, row = row0 + 8 * (quad % 2) + 64 * (quad / 2);
  RowData r{kMode == Mode::logits ? -1 : find_target(a, row, valid), 0, 0, 0, 0, 0, 0};
  if (row >= valid) return r;
  if constexpr (kScaled) {
    const TileOptions& o = a.options;
    r.slope = o.row_slope == nullptr ? o.map.slope : o.row_slope[row];
  }
  if constexpr (kMode == Mode::logits) return r;
  if constexpr (kMode == Mode::dz) {
    const RowStart start = load_start<kMode>(a, row, valid);
    r.anchor = start.anchor, r.log2_sum = start.log2_sum, r.factor = start.factor;
    r.smoothing = a.gradients[row].smoothing;
    r.target_gradient = a.target_gradient[row];
  } else {
    r.anchor = a.target_logit[row];
  }
  return r;
}

__device__ inline float of_row(float x, int part, int h) {
  return __shfl_sync(whole_warp, x, threadIdx.x / 4 % 8 * 4 + 2 * part + h);
}

// Elements of a thread's row h to leave out, as columns 8 i + {0, 1} from the thread's first: the
// target, those from `end` on (after the last column), and in panels all of a row after the last.
struct LeftOut {
  int target[2], end[2];
};

// In shared memory, because the logits take the registers.
struct ForwardWork {
  int valid;
  Schedule schedule;
};
__device__ inline ForwardWork find_work(const Arguments& a) {
  const int valid = valid_rows(a.chunk);
  return {valid,
          {(valid + cluster_rows - 1) / cluster_rows,
           static_cast<int>((a.columns + tile_columns - 1) / tile_columns), group_clusters}};
}

// Copies every step of a tile. Each of two lanes copies one operand, so that neither needs more
// than one address.
__device__ inline void copy_tile(const CUtensorMap* input_map, const CUtensorMap* weight_map,
                                 const Pipeline& pipeline, int row_cluster, int column_tile,
                                 const Arguments& a, Ring* ring) {
  const bool is_input = threadIdx.x == 0;
  const int rank = a.team.rank();
  const uint32_t offset = is_input ? 0 : left_bytes + rank * half_right_bytes;
  const int row = is_input ? row_cluster * cluster_rows + rank * tile_rows
                           : static_cast<int>(a.first_column) + column_tile * tile_columns +
                                 rank * half_right_rows;
  for (int k = 0; k < a.depth_tiles; ++k, ring->next()) {
    uint64_t* full = pipeline.full + ring->stage;
    wait(pipeline.empty + ring->stage, ring->phase ^ 1);
    if (is_input) {
      expect_bytes(full, a.left_rows * tile_depth * 2 + right_bytes);
      load_box(input_map, full, pipeline.left(ring->stage), k * tile_depth, row);
    } else {
      uint8_t* to = pipeline.left(ring->stage) + offset;
      if (!a.team.apart) {
        load_box_to(weight_map, full, to, k * tile_depth, row, 3);
        continue;
      }
      load_box(weight_map, full, to, k * tile_depth, row);
      load_box(weight_map, full, to + half_right_bytes, k * tile_depth, row + half_right_rows);
    }
  }
}

// Called by lanes 0 and 1 of the first warpgroup.
__device__ inline void copy_tiles(const CUtensorMap* input_map, const CUtensorMap* weight_map,
                                  const Pipeline& pipeline, const Schedule& schedule,
                                  const Arguments& a) {
  Ring ring;
  for (int t = a.team.number(); t < schedule.tiles(); t += a.team.count()) {
    int row_cluster, column_tile;
    schedule.find(t, &row_cluster, &column_tile);
    copy_tile(input_map, weight_map, pipeline, row_cluster, column_tile, a, &ring);
  }
}

}  // namespace logitless::cuda::sm90
