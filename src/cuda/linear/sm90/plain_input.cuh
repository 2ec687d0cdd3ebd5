// SPDX-License-Identifier: Apache-2.0
// The tiles that a block of the plain forward computes, and the first warpgroup, which copies their
// operands. The left operand's rows are the caller's own if every token counts, else those of the
// compacted copy. If there is no copy, because the workspace is small, runs of neighbouring rows
// are copied by TMA as boxes, and two warps copy the other rows, 16 bytes per lane.
#pragma once

#include "src/cuda/linear/sm90/forward.cuh"
#include "src/cuda/linear/units.h"

namespace logitless::cuda::sm90 {

// The caller's input; if data is null, all boxes are of the compacted copy.
struct InputRows {
  const char* data;
  int64_t stride;  // bytes, in at most 31 bits
  int32_t hidden;
  bool copied;  // a compacted copy exists too
};

// In shared memory, because the logits take the registers.
struct PlainWork {
  int valid, teams;
  Units units;
  bool some;     // not all rows count: use the compacted map
  bool gathers;  // not all rows count, and there is no copy
};
__device__ inline PlainWork find_plain_work(const Arguments& a, const InputRows& input) {
  const int valid = valid_rows(a.chunk);
  const int column_tiles = static_cast<int>((a.columns + tile_columns - 1) / tile_columns);
  const bool some = input.data != nullptr && a.chunk.tokens.scalars->valid < a.chunk.tokens.total;
  return {valid, a.team.count(),
          Units::make((valid + cluster_rows - 1) / cluster_rows, column_tiles,
                      max(a.partials.unit_width, 1), a.team.count()),
          some, some && !input.copied};
}

// `left_rows` rows of the left operand are copied for a tile. The other rows that are multiplied
// start as zeros, so that no leftover NaN makes rows that do not exist seem far from their anchor;
// boxes of E may overwrite them later. cluster_sync must follow.
__device__ inline void clear_left_out(const Pipeline& p, int left_rows) {
  const int lines = (left_rows > 128 ? 256 : 128) - left_rows, pieces = 8 * lines;
  for (int i = threadIdx.x; i < stages * pieces; i += block_threads) {
    uint8_t* line = p.left(i / pieces) + left_rows * 128;
    reinterpret_cast<uint4*>(line)[i % pieces] = {};
  }
  if (pieces > 0) fence_copies();
}

// Walks through a team's tiles in order: those of item n, then those of item n + teams. Finding an
// item costs three divisions, so it is done when the item's first tile is needed.
class Walk {
 public:
  __device__ explicit Walk(const Team& team) : n_(team.number()) {}
  __device__ bool more(const Units& units) const { return n_ < units.items; }
  // Returns the item whose next tile is `item.tile`, up to `item.end`. Call only if more().
  __device__ UnitItem item(const Units& units) {
    if (item_.tile == item_.end) item_ = units.item(n_);
    return item_;
  }
  __device__ void next(int teams) {
    if (++item_.tile == item_.end) n_ += teams;
  }

 private:
  int n_;
  UnitItem item_{0, 0, 0, -1};
};

// For a multiplying warpgroup without rows.
__device__ inline void skip_tiles(const Pipeline& pipeline, const PlainWork& work,
                                  const Arguments& a) {
  Ring ring;
  for (Walk walk(a.team); walk.more(work.units); walk.next(work.teams)) {
    walk.item(work.units);
    skip_tile(a.depth_tiles, pipeline, &ring, a.team);
  }
}

// For lanes 0 and 1 with one operand each, or for one of them with the weight alone.
__device__ inline void copy_boxes(const CUtensorMap* input_map, const CUtensorMap* weight_map,
                                  const Pipeline& pipeline, const PlainWork& work,
                                  const Arguments& a) {
  Ring ring;
  for (Walk walk(a.team); walk.more(work.units); walk.next(work.teams)) {
    const UnitItem item = walk.item(work.units);
    copy_tile(input_map, weight_map, pipeline, item.row_cluster, item.tile, a, &ring);
  }
}

constexpr int row_copiers = 64, row_barrier = 3;  // threads 64 to 127 copy single rows
__device__ inline void copiers_sync() {
  asm volatile("barrier.sync %0, %1;" ::"n"(row_barrier), "n"(row_copiers) : "memory");
}

// Copies 16 bytes to shared memory: the first `bytes` from `from`, then zeros.
__device__ inline void copy_16(uint32_t to, const char* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
template <int kLeft>
__device__ inline void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// The rows of the input in a tile; a thread copies 16 bytes of every eighth. After the last row
// that counts any row may be copied, since its results are not written. The two warps are short of
// time, so rows are looked up once per row cluster.
constexpr int input_box_rows = 64, input_boxes = tile_rows / input_box_rows;
struct alignas(16) RowTable {
  static constexpr int lines = 8, rows = tile_rows / lines, pitch = rows + 4;
  int row[lines][pitch];
  __device__ int& at(int r) { return row[r % lines][r / lines]; }
};

// Returns a bit for each of the tile's boxes of 64 rows that are contiguous in the input.
__device__ inline uint32_t fill(RowTable* table, int first, const PlainWork& work,
                                const Arguments& a) {
  copiers_sync();
#pragma unroll 1
  for (int r = threadIdx.x % row_copiers; r < tile_rows; r += row_copiers) {
    const int row = min(first + r, work.valid - 1);
    table->at(r) = a.chunk.tokens.row[a.chunk.first + row];
  }
  copiers_sync();
  uint32_t boxes = 0;
#pragma unroll 1
  for (int box = 0; box < input_boxes; ++box) {
    const int r = box * input_box_rows, last = r + input_box_rows - 1;
    // After the last row that counts the table repeats that row.
    const bool exists = table->at(last) > table->at(last - 1);
    if (exists && table->at(last) - table->at(r) == input_box_rows - 1) boxes |= 1u << box;
  }
  return boxes;
}

// Copies this thread's 16 bytes of 8 rows of a box: every eighth row from row 8 `from` on.
__device__ inline void copy_lines(const RowTable& table, int line, int from, const char* input,
                                  uint32_t stride, uint32_t to, int bytes) {
#pragma unroll 1
  for (int i = from; i < from + 8; i += 4) {
    const int4 rows = *reinterpret_cast<const int4*>(&table.row[line][i]);
    const uint32_t row[4] = {static_cast<uint32_t>(rows.x), static_cast<uint32_t>(rows.y),
                             static_cast<uint32_t>(rows.z), static_cast<uint32_t>(rows.w)};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      copy_16(to + (i + n) * 1024, input + uint64_t{row[n]} * stride, bytes);
    }
  }
}

// Copies the input's rows of tokens that count, wherever they are. Three stages are in flight
// before the first is announced; only then are the bytes of the weight and of whole boxes counted.
__device__ inline void copy_rows(const CUtensorMap* map, const InputRows& input,
                                 const Pipeline& pipeline, const PlainWork& work,
                                 const Arguments& a) {
  __shared__ RowTable table;
  const int thread = threadIdx.x % row_copiers, line = thread / 8, chunk = thread % 8;
  const uint32_t swizzled = line * 128 + (chunk ^ line) * 16;
  const uint32_t stride = static_cast<uint32_t>(input.stride);
  Ring ring;
  int ahead = 0, row_cluster = -1;
  // `boxes` is the tile's; `counted` has those of stages not yet announced, 4 bits each.
  uint32_t boxes = 0, counted = 0;
  const auto announce = [&] {
    fence_copies();
    copiers_sync();
    const int stage = (ring.stage + stages - ahead) % stages;
    --ahead;
    const uint32_t bytes = __popc(counted >> 4 * ahead & 15) * left_block_bytes + right_bytes;
    if (thread == 0) expect_bytes(pipeline.full + stage, bytes);
  };
  for (Walk walk(a.team); walk.more(work.units); walk.next(work.teams)) {
    const UnitItem item = walk.item(work.units);
    if (item.row_cluster != row_cluster) {
      row_cluster = item.row_cluster;
      boxes = fill(&table, row_cluster * cluster_rows + a.team.rank() * tile_rows, work, a);
    }
#pragma unroll 1
    for (int k = 0; k < a.depth_tiles; ++k) {
      const int column = k * tile_depth + chunk * 8;
      const int bytes = min(max(2 * (input.hidden - column), 0), 16);
      const char* from = input.data + 2 * (bytes > 0 ? column : 0);
      wait(pipeline.empty + ring.stage, ring.phase ^ 1);
      uint8_t* left = pipeline.left(ring.stage);
#pragma unroll 1
      for (int box = 0; box < input_boxes; ++box) {
        if ((boxes >> box & 1) == 0) {
          copy_lines(table, line, box * 8, from, stride, shared_address(left) + swizzled, bytes);
        } else if (thread == 0) {
          load_box(map, pipeline.full + ring.stage, left + box * left_block_bytes, k * tile_depth,
                   table.at(box * input_box_rows));
        }
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      ring.next();
      counted = counted << 4 | boxes;
      if (++ahead < 3) continue;
      copies_wait<2>();
      announce();
    }
  }
  copies_wait<0>();
  while (ahead > 0) announce();
}

}  // namespace logitless::cuda::sm90
