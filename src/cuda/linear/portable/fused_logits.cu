// SPDX-License-Identifier: Apache-2.0
// The logits of 16-bit inputs, by tensor cores (mma.sync), and in the same kernel what
// block_exponentials.cu makes of them: the partial sums of a row and 256 columns, and E. The logits
// stay in registers; only for top-k they are stored too.
//
// A block multiplies 128 rows by 256 columns, 32 of D at a time; each of its 8 warps has 64 x 64
// logits. Shared memory is a ring of 4 stages: while one is multiplied, the next are copied, also
// those of the next tile. A stage's row is 64 bytes, of which 16 are a chunk. Chunk c of row r is
// stored at c ^ (r / 2 % 4) for the input and c ^ (r / 8 % 4) for the weight, so that the rows that
// a warp reads together are in different banks.
#include <algorithm>

#include "src/cuda/linear/linear.cuh"
#include "src/cuda/linear/mma.cuh"
#include "src/cuda/linear/portable/kernels.h"
#include "src/cuda/linear/row_sums.cuh"
#include "src/cuda/logit_map.cuh"
#include "src/cuda/runtime/copies.cuh"

namespace logitless::cuda {
namespace {

constexpr int threads = 256, warps_across = 4, warp_edge = 64;
constexpr int tile_rows = 2 * warp_edge, tile_columns = warps_across * warp_edge;
static_assert(tile_columns == fused_columns);
constexpr int stages = 4, row_bytes = 64;
constexpr int weight_offset = tile_rows * row_bytes;
constexpr int stage_bytes = (tile_rows + tile_columns) * row_bytes;
constexpr int chunks = row_bytes / 16, copied_rows = threads / chunks;
constexpr int input_copies = tile_rows / copied_rows, weight_copies = tile_columns / copied_rows;
constexpr int copies = input_copies + weight_copies;           // of a thread, a stage
constexpr int fours = warp_edge / 16, eights = warp_edge / 8;  // of mma's rows and columns
// Row tiles that are multiplied side by side, so that they share the weight's rows in the L2 cache.
constexpr int group = 8;

enum class Sums { exponentials, entropy, any };

struct FusedRows {
  Chunk chunk;
  const char* input;  // [chunk.rows, input_pitch bytes]
  int64_t input_pitch;
  const char* weight;  // [columns, weight_pitch bytes]  from column `first` on
  int64_t weight_pitch;
  int64_t first, columns;
  int32_t row, end;     // the rows to compute
  int32_t depth_bytes;  // of D, a multiple of 16
  bool sums;
  Partials partials;
  const float* target_logit;
  Panel panel;  // starts at column `first`, and may have fewer columns
};
// For mapped logits, rare sums, and logits that are stored.
struct MappedFusedRows : FusedRows {
  LinearCall call;
  float* logits;  // raw [end - row, pitch]  or null
  int64_t pitch;
};
template <bool kMapped>
using Arguments = std::conditional_t<kMapped, MappedFusedRows, FusedRows>;

// The tiles of the rows that count, in the order in which blocks take them.
struct Tiles {
  int first_row;
  int64_t rows, columns;  // in tiles
  __device__ int64_t count() const { return rows * columns; }
  __device__ void find(int64_t tile, int* row, int64_t* column) const {
    const int64_t of_group = tile / (group * columns), left = tile - of_group * group * columns;
    const int64_t height = min(int64_t{group}, rows - of_group * group);
    *row = first_row + static_cast<int>(of_group * group + left % height) * tile_rows;
    *column = left / height * tile_columns;
  }
};

// Copies the operands of this block's tiles into the ring, stage after stage. A thread copies the
// same chunk of several rows.
class Loader {
 public:
  __device__ Loader(const FusedRows& a, const Tiles& tiles, int valid, uint32_t ring)
      : a_(a),
        tiles_(tiles),
        valid_(valid),
        input_rows_(static_cast<int>(a.input_pitch) * copied_rows),
        weight_rows_(static_cast<int>(a.weight_pitch) * copied_rows) {
    const int row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    to_input_ = ring + row * row_bytes + (chunk ^ (row / 2 % 4)) * 16;
    to_weight_ = ring + weight_offset + row * row_bytes + (chunk ^ (row / 8 % 4)) * 16;
    aim();
  }
  // Starts the i-th copy of a stage.
  __device__ void copy(int stage, int i) const {
    const int bytes = static_cast<int>(there_ >> i & 16), k = i - input_copies;
    if (i < input_copies) {
      copy_part(to_input_ + stage * stage_bytes + i * copied_rows * row_bytes,
                input_ + i * input_rows_, bytes);
    } else {
      copy_part(to_weight_ + stage * stage_bytes + k * copied_rows * row_bytes,
                weight_ + k * weight_rows_, bytes);
    }
  }
  // Ends a stage's copies.
  __device__ void next() {
    copies_commit();
    input_ += row_bytes, weight_ += row_bytes, left_ -= row_bytes;
    if (left_ <= 0) there_ = 0;
  }
  __device__ void next_tile() {
    tile_ += gridDim.x;
    aim();
  }

 private:
  __device__ void aim() {
    there_ = 0, left_ = 0;
    input_ = a_.input, weight_ = a_.weight;
    if (tile_ >= tiles_.count()) return;
    const int row = threadIdx.x / chunks, at = threadIdx.x % chunks * 16;
    int first_row;
    int64_t first_column;
    tiles_.find(tile_, &first_row, &first_column);
    left_ = a_.depth_bytes - at;
    input_ += (first_row + row) * a_.input_pitch + at;
    weight_ += (first_column + row) * a_.weight_pitch + at;
#pragma unroll
    for (int i = 0; i < copies; ++i) {
      const bool is_input = i < input_copies;
      const int r = row + (is_input ? i : i - input_copies) * copied_rows;
      const bool there = is_input ? first_row + r < valid_ : first_column + r < a_.columns;
      there_ |= (there && left_ > 0 ? 16u : 0u) << i;
    }
  }

  const FusedRows& a_;
  const Tiles& tiles_;
  const int valid_, input_rows_, weight_rows_;  // bytes of as many rows as are copied at once
  int64_t tile_ = blockIdx.x;
  int left_ = 0;  // bytes of D that are left for this thread
  uint32_t to_input_, to_weight_;
  uint32_t there_ = 0;  // 16 << i if the row of the i-th copy exists, and this chunk of D
  const char *input_ = nullptr, *weight_ = nullptr;
};

// A warp's operands of 16 of D, of which a stage has two, and where they are in the first stage.
// Column 2 q + e of the n-th eight of 32 logits belongs to row 8 q + 2 n + e of the weight, so that
// a thread's logits are of 8 consecutive columns.
struct Fragments {
  uint32_t input[fours][4], weight[eights / 2][4];

  __device__ void load(uint32_t input_at, uint32_t weight_at, int stage) {
#pragma unroll
    for (int j = 0; j < eights / 2; ++j) {
      load_matrices(weight[j],
                    weight_at + stage * stage_bytes + (j / 2 * 32 + j % 2 * 4) * row_bytes);
    }
#pragma unroll
    for (int i = 0; i < fours; ++i) {
      load_matrices(input[i], input_at + stage * stage_bytes + i * 16 * row_bytes);
    }
  }
};

// The logits of a warp. A thread has 8 rows, the r-th is 8 r + lane / 4, and of each 16 columns,
// the n-th is 32 (n / 8) + 8 (lane % 4) + n % 8.
struct Logits {
  float sum[fours][eights][4];

  __device__ float& at(int r, int n) { return sum[r / 2][n / 2][r % 2 * 2 + n % 2]; }
  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < 2 * fours; ++r) {
#pragma unroll
      for (int n = 0; n < 2 * eights; ++n) at(r, n) = 0;
    }
  }
  // The n-th product of 32, in an order that reads each operand several times in a row.
  template <class T>
  __device__ void multiply(const Fragments& f, int n) {
    const int i = n / eights, j = i % 2 == 0 ? n % eights : eights - 1 - n % eights;
    multiply_matrices<T>(sum[i][j], f.input[i], f.weight[j / 2][j % 2 * 2],
                         f.weight[j / 2][j % 2 * 2 + 1]);
  }
  // Column `one` and those from `end` on, counted from this thread's first, become -inf.
  __device__ void leave_out(int r, int one, int end) {
#pragma unroll
    for (int n = 0; n < 2 * eights; ++n) {
      const int column = n / 8 * 32 + n % 8;
      if (column == one || column >= end) at(r, n) = -infinity();
    }
  }
};

// The sums of some columns of a row.
template <Sums kSums>
struct RowSums {
  float maximum = -INFINITY, sum = 0, shifted = 0;
};
template <>
struct RowSums<Sums::any> : RowSums<Sums::entropy> {
  float weighted = 0, logits = 0, squared = 0, mass = 0;
  int above = 0, argmax = INT32_MAX;
};

// What is known of a tile's rows, copied while the tile is multiplied; zeros for rows that do not
// count.
struct TileRows {
  float anchor[tile_rows];
  int32_t target[tile_rows];

  __device__ void copy(const FusedRows& a, int first_row, int valid) {
    if (threadIdx.x >= tile_rows) return;
    const int row = first_row + threadIdx.x, bytes = row < valid ? 4 : 0;
    copy_four(&anchor[threadIdx.x], a.target_logit + row, bytes);
    copy_four(&target[threadIdx.x], a.chunk.tokens.target + a.chunk.first + row, bytes);
  }
};

// What becomes of the logits of a thread: 8 rows of 16 columns.
template <class T, bool kStores, Sums kSums, bool kMapped>
struct Epilogue {
  static constexpr bool kCodes = std::is_same_v<T, __half>, kAny = kSums == Sums::any;
  static constexpr bool kEntropy = kSums != Sums::exponentials;
  const Arguments<kMapped>& a;
  const TileRows& rows;
  Logits& logits;
  int first_row, valid;  // of the tile
  int in_tile;           // this thread's first row
  int column, left;      // this thread's first column among the weight's, and how many there are

  __device__ int row(int r) const { return first_row + in_tile + 8 * r; }
  __device__ int target(int r) const {
    return rows.target[in_tile + 8 * r] - (static_cast<int>(a.first) + column);
  }
  static __device__ int offset(int n) { return n / 8 * 32 + n % 8; }
  __device__ float of_column(const TensorView& view, int64_t start, int n) const {
    return offset(n) < left ? load(view, start + a.first + column + offset(n)) : 0.0f;
  }

  __device__ void map() {
    float bias[2 * eights];
#pragma unroll
    for (int n = 0; n < 2 * eights; ++n) {
      bias[n] = present(a.call.bias) ? of_column(a.call.bias, 0, n) : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2 * fours; ++r) {
      if (row(r) >= valid) continue;
      const MapFactors map = map_of_token(a.call.map, a.chunk.tokens, a.chunk.first + row(r));
#pragma unroll
      for (int n = 0; n < 2 * eights; ++n) {
        logits.at(r, n) = map_raw(map, logits.at(r, n) + bias[n]);
      }
    }
  }
  __device__ void store() const {
#pragma unroll
    for (int n = 0; n < 2 * eights; n += 4) {
#pragma unroll
      for (int r = 0; r < 2 * fours; ++r) {
        if (row(r) >= valid) continue;
        float* const to = a.logits + (row(r) - a.row) * a.pitch + column + offset(n);
        const float four[4] = {logits.at(r, n), logits.at(r, n + 1), logits.at(r, n + 2),
                               logits.at(r, n + 3)};
        if (offset(n) + 4 <= left) {
          *reinterpret_cast<float4*>(to) = {four[0], four[1], four[2], four[3]};
          continue;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (offset(n) + k < left) to[k] = four[k];
        }
      }
    }
  }
  // Targets and columns that do not exist become -inf.
  __device__ void leave_out() {
    bool any = left < warp_edge;
#pragma unroll
    for (int r = 0; r < 2 * fours; ++r) any |= static_cast<unsigned>(target(r)) < warp_edge;
    if (!__any_sync(whole_warp, any)) return;
#pragma unroll
    for (int r = 0; r < 2 * fours; ++r) logits.leave_out(r, target(r), left);
  }

  // The sums that few calls want, of an element: y = exp(z - reference).
  __device__ void add_rare(int r, int n, float z, float y, RowSums<kSums>* sums) const {
    const Partials& p = a.partials;
    const bool is_other = offset(n) < left && offset(n) != target(r);
    if (is_other && p.weighted != nullptr) {
      const TensorView& weight = a.call.in.vocab_weight;
      const float c = present(weight) ? of_column(weight, a.call.in.start(), n) : 1.0f;
      if (c != 0) sums->weighted = fmaf(c, z, sums->weighted);
    }
    if (is_other && p.logits != nullptr) sums->logits += z;
    if (p.squared != nullptr) sums->squared = fmaf(y, y, sums->squared);
    if (z > rows.anchor[in_tile + 8 * r]) {
      ++sums->above;
      sums->mass += y;
    }
    if (z == sums->maximum && is_other) sums->argmax = min(sums->argmax, column + offset(n));
  }

  // The sums of a row's 16 logits; the maximum is of the warp's 64. Writes E where there is room.
  __device__ RowSums<kSums> exponentials(int r) const {
    RowSums<kSums> sums;
#pragma unroll
    for (int n = 0; n < 2 * eights; ++n) {
      sums.maximum = fmaxf(sums.maximum, logits.at(r, n));  // drops NaN, which the sum keeps
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      sums.maximum = fmaxf(sums.maximum, __shfl_xor_sync(whole_warp, sums.maximum, lanes));
    }
    // Logits of -inf alone add 0; -inf - -inf would be NaN.
    const float reference = sums.maximum == -infinity() ? 0.0f : sums.maximum;
    const float anchor = kStores ? rows.anchor[in_tile + 8 * r] : 0.0f;
    const float lift = kStores && !kCodes ? exp_any(sums.maximum - anchor) : 0.0f;
    MapFactors map;
    if constexpr (kMapped && kStores && !kCodes) {
      map = map_of_token(a.call.map, a.chunk.tokens, a.chunk.first + min(row(r), valid - 1));
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t packed[4];
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        float e[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float z = logits.at(r, part * 8 + n + k), x = z - reference;
          const float y = exp2_fast(x * log2e);
          sums.sum += y;
          if constexpr (kEntropy) sums.shifted = fmaf(y, fmaxf(x, least_exponent), sums.shifted);
          if constexpr (kAny) add_rare(r, part * 8 + n + k, z, y, &sums);
          e[k] = kCodes ? (z - anchor) * log2e : y * lift;
          if constexpr (kMapped && kStores && !kCodes) e[k] *= cap_slope(map, z);
        }
        if constexpr (kStores) packed[n / 2] = kCodes ? encode_logs(e[0], e[1]) : pack<T>(e);
      }
      if constexpr (kStores) {
        const int64_t at = column + part * 32;
        if (row(r) < valid && at < a.panel.columns) {
          T* const to = reinterpret_cast<T*>(a.panel.data) + row(r) * a.panel.pitch + at;
          *reinterpret_cast<uint4*>(to) = {packed[0], packed[1], packed[2], packed[3]};
        }
      }
    }
    return sums;
  }

  // Adds up four lanes, which have the same maximum.
  static __device__ void add_lanes(RowSums<kSums>* sums) {
    const auto add = [](auto* x, int lanes) { *x += __shfl_xor_sync(whole_warp, *x, lanes); };
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      add(&sums->sum, lanes);
      if constexpr (kEntropy) add(&sums->shifted, lanes);
      if constexpr (kAny) {
        add(&sums->weighted, lanes), add(&sums->logits, lanes), add(&sums->squared, lanes);
        add(&sums->mass, lanes), add(&sums->above, lanes);
        sums->argmax = min(sums->argmax, __shfl_xor_sync(whole_warp, sums->argmax, lanes));
      }
    }
  }

  // Writes the sums of a row from those of its four warps, as sum number `at`.
  static __device__ void write(const Arguments<kMapped>& a, const RowSums<kSums>* parts,
                               int64_t at) {
    RowSums<kSums> all;
#pragma unroll
    for (int n = 0; n < warps_across; ++n) all.maximum = fmaxf(all.maximum, parts[n].maximum);
#pragma unroll
    for (int n = 0; n < warps_across; ++n) {
      const RowSums<kSums>& own = parts[n];
      const float distance = own.maximum - all.maximum;
      const float lift = lift_of(own.maximum, all.maximum);
      all.sum = fmaf(own.sum, lift, all.sum);
      if (kEntropy && own.maximum != -infinity()) {
        const float moved = fmaf(fmaxf(distance, least_exponent), own.sum, own.shifted);
        all.shifted = fmaf(lift, moved, all.shifted);
      }
      if constexpr (kAny) {
        all.weighted += own.weighted, all.logits += own.logits, all.above += own.above;
        all.squared = fmaf(own.squared, lift * lift, all.squared);
        all.mass = fmaf(own.mass, lift, all.mass);
        if (own.maximum == all.maximum) all.argmax = min(all.argmax, own.argmax);
      }
    }
    const auto put = [&](auto* to, auto x) {
      if (to != nullptr) to[at] = x;
    };
    const Partials& p = a.partials;
    p.maximum[at] = all.maximum;
    p.sum[at] = all.sum;
    if constexpr (kEntropy) put(p.shifted, all.shifted);
    if constexpr (kAny) {
      put(p.weighted, all.weighted), put(p.logits, all.logits), put(p.squared, all.squared);
      put(p.above, all.above), put(p.mass(), all.mass);
      // -inf everywhere, or NaN: the segment's first column
      const int first = static_cast<int>(at % p.segments * fused_columns);
      put(p.argmax, all.argmax == INT32_MAX ? first : static_cast<int>(a.first) + all.argmax);
    }
  }

  // `shared` is free for this: [tile_rows, warps_across].
  __device__ void run(RowSums<kSums>* shared) {
    if constexpr (kMapped) {
      if (a.logits != nullptr) store();
      map();
    }
    leave_out();
    const int across = threadIdx.x / 64;
#pragma unroll
    for (int r = 0; r < 2 * fours; ++r) {
      RowSums<kSums> sums = exponentials(r);
      add_lanes(&sums);
      if (threadIdx.x % 4 == 0) shared[(in_tile + 8 * r) * warps_across + across] = sums;
    }
    __syncthreads();
    const int own = first_row + threadIdx.x, tile_column = column / tile_columns * tile_columns;
    const bool writes = a.sums && threadIdx.x < tile_rows && own < valid;
    RowSums<kSums> parts[warps_across];
    if (writes) {
#pragma unroll
      for (int n = 0; n < warps_across; ++n) parts[n] = shared[threadIdx.x * warps_across + n];
    }
    __syncthreads();  // the next copies overwrite `shared` and `rows`
    if (writes) {
      write(a, parts, own * a.partials.segments + (a.first + tile_column) / fused_columns);
    }
  }
};

// A row that does not count becomes zeros, because products read it too.
template <class T>
__device__ void clear_rows(const FusedRows& a, int valid) {
  const int64_t eighths = (min(a.columns, a.panel.columns) + 7) / 8;
  for (int64_t n = int64_t{blockIdx.x} * threads + threadIdx.x; n < (a.end - valid) * eighths;
       n += int64_t{gridDim.x} * threads) {
    T* const row = reinterpret_cast<T*>(a.panel.data) + (valid + n / eighths) * a.panel.pitch;
    *reinterpret_cast<uint4*>(row + n % eighths * 8) = {};
  }
}

template <class T, bool kStores, Sums kSums, bool kMapped>
__global__ void __launch_bounds__(threads, 1)
    fused_logits_kernel(const __grid_constant__ Arguments<kMapped> a) {
  extern __shared__ __align__(128) char memory[];
  __shared__ TileRows rows;
  const int valid = max(a.row, min(valid_rows(a.chunk), a.end));
  const Tiles tiles{a.row, (valid - a.row + tile_rows - 1) / tile_rows,
                    (a.columns + tile_columns - 1) / tile_columns};
  // D in whole rounds of the ring; beyond D both operands are zeros.
  const int steps = (a.depth_bytes + row_bytes * stages - 1) / (row_bytes * stages) * stages;
  const uint32_t ring = shared_address(memory);
  Loader loader(a, tiles, valid, ring);
#pragma unroll
  for (int s = 0; s < stages - 1; ++s) {
#pragma unroll
    for (int i = 0; i < copies; ++i) loader.copy(s, i);
    loader.next();
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int input_row = warp % 2 * warp_edge + lane % 16, input_half = lane / 16;
  const int weight_row = warp / 2 * warp_edge + lane % 8 / 2 * 8 + lane / 16 * 2 + lane % 2;
  const int weight_half = lane / 8 % 2;
  uint32_t input_at[2], weight_at[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    input_at[k] = ring + input_row * row_bytes + ((2 * k + input_half) ^ (input_row / 2 % 4)) * 16;
    weight_at[k] = ring + weight_offset + weight_row * row_bytes +
                   ((2 * k + weight_half) ^ (weight_row / 8 % 4)) * 16;
  }
  Logits logits;
  Fragments now, next;
  copies_wait<stages - 2>();
  __syncthreads();
  now.load(input_at[0], weight_at[0], 0);
#pragma unroll 1
  for (int64_t tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
    int first_row;
    int64_t first_column;
    tiles.find(tile, &first_row, &first_column);
    rows.copy(a, first_row, valid);  // with the copies of the next stage
    logits.clear();
#pragma unroll 1
    for (int step = 0; step < steps; step += stages) {
#pragma unroll
      for (int s = 0; s < stages; ++s) {
        next.load(input_at[1], weight_at[1], s);
#pragma unroll
        for (int n = 0; n < fours * eights; ++n) {
          constexpr int every = fours * eights / copies;
          if (n % every == 0 && n / every < copies) {
            loader.copy((s + stages - 1) % stages, n / every);
          }
          logits.multiply<T>(now, n);
        }
        loader.next();
        // The copies are stages - 1 ahead, so that a tile's last ones are made here.
        if (s == 0 && step + stages == steps) loader.next_tile();
        copies_wait<stages - 2>();
        __syncthreads();
        now.load(input_at[0], weight_at[0], (s + 1) % stages);
#pragma unroll
        for (int n = 0; n < fours * eights; ++n) logits.multiply<T>(next, n);
      }
    }
    const int column = static_cast<int>(first_column) + warp / 2 * warp_edge + lane % 4 * 8;
    Epilogue<T, kStores, kSums, kMapped> epilogue{a,      rows,
                                                  logits, first_row,
                                                  valid,  warp % 2 * warp_edge + lane / 4,
                                                  column, static_cast<int>(a.columns) - column};
    // The last stage has been read, and is filled again in the next tile's first step.
    epilogue.run(reinterpret_cast<RowSums<kSums>*>(memory + (stages - 1) * stage_bytes));
  }
  wait_for_copies();
  if constexpr (kStores) clear_rows<T>(a, valid);
}

template <class T, bool kStores, Sums kSums, bool kMapped>
void launch(const MappedFusedRows& a, const LinearWork& work) {
  static_assert(sizeof(RowSums<kSums>) * tile_rows * warps_across <= stage_bytes);
  const int64_t tiles = divide_up(int64_t{a.end - a.row}, int64_t{tile_rows}) *
                        divide_up(a.columns, int64_t{tile_columns});
  const LaunchShape shape{
      .blocks = static_cast<unsigned>(std::min<int64_t>(tiles, work.device.multiprocessors)),
      .threads = threads,
      .shared_bytes = stages * stage_bytes};
  work.stream->launch_config("fused_logits", fused_logits_kernel<T, kStores, kSums, kMapped>, shape,
                             static_cast<const Arguments<kMapped>&>(a));
}

template <class T, bool kStores>
void launch(const MappedFusedRows& a, const LinearWork& work) {
  const Partials& p = a.partials;
  const bool entropy = a.sums && p.shifted != nullptr;
  if (a.sums && asks_for_more(p)) return launch<T, kStores, Sums::any, true>(a, work);
  const bool mapped = !work.call.plain() || a.logits != nullptr;
  if (mapped) return launch<T, kStores, Sums::entropy, true>(a, work);
  if (entropy) return launch<T, kStores, Sums::entropy, false>(a, work);
  launch<T, kStores, Sums::exponentials, false>(a, work);
}

}  // namespace

void fused_logits(const LinearWork& work, const Block& block, bool sums, const Panel& panel) {
  const LinearShape& s = work.call.shape;
  const Operand weight = weight_rows(work.call, work.m, block.column);
  // A copied weight has zeros behind its rows, as the input has.
  const int64_t element = size_of(s.dtype), depth = s.copies_weight ? s.hidden_pitch() : s.hidden;
  const MappedFusedRows rows{{.chunk = work.chunk,
                              .input = work.m.input,
                              .input_pitch = s.hidden_pitch() * element,
                              .weight = static_cast<const char*>(weight.data),
                              .weight_pitch = weight.row_stride * element,
                              .first = block.column,
                              .columns = block.columns,
                              .row = block.row,
                              .end = block.row + block.rows,
                              .depth_bytes = static_cast<int32_t>(depth * element),
                              .sums = sums,
                              .partials = work.m.partials,
                              .target_logit = work.m.target_logit,
                              .panel = panel},
                             work.call,
                             const_cast<float*>(block.logits),
                             block.pitch};
  const bool stores = panel.data != nullptr;
  if (s.dtype == DType::f16) {
    return stores ? launch<__half, true>(rows, work) : launch<__half, false>(rows, work);
  }
  stores ? launch<__nv_bfloat16, true>(rows, work) : launch<__nv_bfloat16, false>(rows, work);
}

}  // namespace logitless::cuda
