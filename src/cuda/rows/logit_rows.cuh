// SPDX-License-Identifier: Apache-2.0
// The row kernel, logits [N, V] -> statistics [N], losses [N], output [N, V]:
//   m_i = max_j z_ij   log s_i = log sum_j exp(z_ij - m_i)   output_ij = draw_ij, or p_ij
// A cluster of blocks handles a row, each block a slice of its columns, copied to shared memory in
// 16-byte words. Blocks exchange their maximum and sum through distributed shared memory; the
// output is computed from the tile in shared memory.
#pragma once

#include "src/cuda/logit_map.cuh"
#include "src/cuda/rows/logit_rows.h"
#include "src/cuda/rows/row_state.cuh"
#include "src/cuda/rows/rows_plan.h"
#include "src/cuda/runtime/cluster.cuh"
#include "src/cuda/runtime/early.cuh"
#include "src/cuda/tokens/tokens.cuh"

namespace logitless::cuda {

struct RowsArguments {
  RowsCall call;
  RowsPlan plan;
  MapFactors map;
};

// A token's values that its row needs.
struct RowTarget {
  int target = -1;  // a column, or -1 if in another shard
  float target_weight = 1, token_weight = 1;
};

// Starts to copy the call's scalars, which the previous kernel may still be writing. They can be
// read after finish_tile.
__device__ inline void start_scalars(const TokenScalars* from, TokenScalars* to) {
  static_assert(sizeof(TokenScalars) % word_bytes == 0);
  constexpr int words = sizeof(TokenScalars) / word_bytes;
  wait_for_kernel_before();
  const int n = static_cast<int>(threadIdx.x);
  if (n >= words) return;
  copy_word(reinterpret_cast<char*>(to) + n * word_bytes,
            reinterpret_cast<const char*>(from) + n * word_bytes);
}

// The coefficients of row i without the factors of the map. For a softmax they give the output p
// itself.
__device__ inline RowGradient gradient_of_row(const RowsCall& call, int64_t i,
                                              const RowTarget& token, const TokenScalars& scalars,
                                              const RowState& state) {
  if (call.scalars == nullptr) {
    RowGradient g;
    g.reference = state.reference;
    g.log_sum = state.log_sum;
    g.probability = 1;
    return g;
  }
  // These gradients are not summed, so the common factor is applied at once.
  return scaled(token_gradient(call.in, scalars, i, token.target_weight, token.token_weight, state),
                scalars.gradient_scale);
}

// draw at the target, including the one-hot term.
__device__ inline float target_gradient(const MapFactors& map, const RowGradient& g, float z,
                                        float class_weight) {
  const float log_p = (z - g.reference) - g.log_sum;
  const float p = exp_any(log_p);
  const double dz = dz_of_target(g, p, expm1f(log_p), log_p + g.entropy_value, class_weight);
  return static_cast<float>(dz * (double{map.slope} * cap_slope(map, z)));
}

// p_j = lost 2^(z_j log2 e - by), where `by` is (m + log s) log2 e, rounded, and `lost` makes up
// for that rounding; both are the same for the whole row. Each element needs one multiply-add,
// rounded relative to its small result. If m is too large for `lost` to be near 1, m is subtracted
// first, as in the sums: the largest term must be exactly 1.
struct Probability {
  float m, log_sum, by = 0, lost = 1;
  bool near;
  __device__ Probability(float m, float log_sum)
      : m(m), log_sum(log_sum), near(fabsf(m) < 0x1p20f && fabsf(log_sum) < 0x1p20f) {
    if (!near) return;
    // Both products and their sum, with the rounding error of each.
    const float x = m * log2_e, y = log_sum * log2_e;
    by = x + y;
    const float y_seen = by - x;
    const float of_sum = (x - (by - y_seen)) + (y - y_seen);
    const float of_y = fmaf(log_sum, log2_e, -y) + log_sum * log2_e_low;
    lost = exp2_fast(-(of_sum + (fmaf(m, log2_e, -x) + of_y)));
  }
  template <bool kNear>
  __device__ float without_lost(float z) const {
    return kNear ? exp2_fast(fmaf(z, log2_e, -by)) : exp_of_row((z - m) - log_sum);
  }
};

// draw_j of every column but the target's.
template <bool kPlain, bool kNear>
struct GradientColumn {
  const MapFactors& map;
  const TensorView& class_weight;
  int64_t first;  // the class of the tile's column 0
  const Probability& p_of;
  float scale;  // the factor of p_j times Probability::lost
  float smoothing, entropy, entropy_value;
  __device__ float operator()(float raw, int j) const {
    const float z = kPlain ? raw : map_raw(map, raw);
    const float p = p_of.template without_lost<kNear>(z);
    if constexpr (kPlain) return scale * p;
    const auto c = [&] { return present(class_weight) ? load(class_weight, first + j) : 1.0f; };
    const float log_p = (z - p_of.m) - p_of.log_sum;
    const float information = (log_p < least_exponent ? least_exponent : log_p) + entropy_value;
    return dz_of<Rounded>(scale * p, smoothing != 0, smoothing, c, entropy != 0,
                          entropy * (p * p_of.lost), information) *
           cap_slope(map, z);
  }
};

// The columns of a block.
struct Slice {
  int64_t begin, end;
  int tile, tiles;
  __device__ int64_t column(int tile_index) const { return begin + int64_t{tile_index} * tile; }
  __device__ int columns(int tile_index) const {
    const int64_t rest = end - column(tile_index);
    return static_cast<int>(rest < 0 ? 0 : rest < tile ? rest : tile);
  }
};

// z of the target in the tile that holds its column.
template <class T>
__device__ float target_logit(const MapFactors& map, const Tile<T>& tile, int64_t column) {
  return map_raw(map, to_f32(tile.elements()[column]));
}

__device__ inline unsigned char* tile_memory() {
  extern __shared__ __align__(line_bytes) unsigned char memory[];
  return memory;
}

template <Columns kColumns>
__device__ decltype(auto) map_of_row(const RowsArguments& a, int64_t i) {
  if constexpr (kColumns == Columns::more) {
    return a.call.map == nullptr ? a.map : with_token(a.map, a.call.map[i]);
  } else {
    return (a.map);
  }
}

// Writes the row's output; `loaded` is the tile that is in shared memory already.
template <class T, Columns kColumns>
__device__ void write_output(const RowsArguments& a, const MapFactors& map, const RowState& state,
                             const Slice& slice, int64_t i, const RowTarget& token,
                             const TokenScalars& scalars, Tile<T> tile, int loaded) {
  constexpr bool kPlain = kColumns == Columns::plain;
  const RowsCall& call = a.call;
  const float slope = map.slope;
  for (int index = 0; index < slice.tiles; ++index) {
    const int64_t column = slice.column(index);
    if (index != loaded) {
      __syncthreads();  // until no thread reads the previous tile
      tile = load_tile<T>(call.logits, i, column, slice.columns(index), tile_memory());
      loaded = index;
    }
    // Every warp computes this itself, which is cheaper than a barrier.
    const RowGradient g = gradient_of_row(call, i, token, scalars, state);
    const Probability p(g.reference, g.log_sum);
    const auto write = [&]<bool kNear>() {
      write_tile<kPlain && kNear ? 4 : 1>(
          tile, call.output, i, column,
          GradientColumn<kPlain, kNear>{map, call.in.vocab_weight, call.in.start() + column, p,
                                        g.probability * slope * p.lost, g.smoothing * slope,
                                        g.entropy * slope, g.entropy_value});
    };
    // The thread that has written the target's column among the others overwrites it with a value
    // that its warp has computed by then.
    const int t = static_cast<int>(threadIdx.x), target = token.target;
    const bool here = target >= column && target < column + tile.n;
    const int writer =
        here ? writer_of(tile, call.output, i, column, static_cast<int>(target - column)) : -1;
    float at_target = 0;
    if (here && writer / 32 == t / 32) {
      const bool weighted = !kPlain && present(call.in.vocab_weight);
      const float c = weighted ? load(call.in.vocab_weight, call.in.start() + target) : 1.0f;
      at_target = target_gradient(map, g, target_logit(map, tile, target - column), c);
    }
    if (p.near) {
      write.template operator()<true>();
    } else {
      write.template operator()<false>();
    }
    if (t == writer) store(call.output, i, target, at_target);
  }
}

// Called by one thread of the row.
__device__ inline void write_state(const RowsCall& call, int64_t i, const RowTarget& token,
                                   const TokenScalars& scalars, const RowStatistics& state) {
  if (present(call.outputs.loss)) {
    *loss_of(call.losses, call.outputs.loss, i) =
        token_loss(scalars, token.target, token.target_weight, token.token_weight, state);
  }
  put_state(call.in, call.outputs.statistics, i, token.target, state);
}

// Exchanges the partial sums of a row's blocks: each block writes its own into every block's table.
struct Exchange {
  CommonPartial table[most_row_blocks];  // by the block's rank
  uint64_t arrivals;                     // an mbarrier that counts the bytes of `table`
};
static_assert(sizeof(CommonPartial) == 32);
template <Columns kColumns>
constexpr int exchanged_bytes = sizeof(CommonPartial) + (kColumns == Columns::more ? 4 : 0);

// Combines the blocks' partial sums into the row's; called by every thread of every block.
// init_expecting and cluster_wait must precede, so that every block's mbarrier is initialized.
template <Columns kColumns>
__device__ inline RowPartial combine_blocks(const RowPartial& own, int rank, int cluster,
                                            SumSet wants, Exchange* exchange) {
  [[maybe_unused]] __shared__ float mass[most_row_blocks];
  const int t = static_cast<int>(threadIdx.x), lane = t % 32;
  if (t < cluster) {
    const uint32_t slot = address_in_block(&exchange->table[rank], t);
    const uint32_t arrivals = address_in_block(&exchange->arrivals, t);
    send(slot, __float_as_uint(own.maximum), arrivals);
    send(slot + 4, __float_as_uint(own.sum), arrivals);
    send(slot + 8, __float_as_uint(own.shifted), arrivals);
    send(slot + 12, __float_as_uint(own.weighted), arrivals);
    send(slot + 16, __float_as_uint(own.logits), arrivals);
    send(slot + 20, __float_as_uint(own.squared), arrivals);
    send(slot + 24, static_cast<uint32_t>(own.above), arrivals);
    send(slot + 28, static_cast<uint32_t>(own.argmax), arrivals);
    if constexpr (kColumns == Columns::more) {
      send(address_in_block(&mass[rank], t), __float_as_uint(own.mass), arrivals);
    }
  }
  __syncwarp();
  wait_for_bytes(&exchange->arrivals);
  // All partial sums have arrived and no more will come, so this block may exit.
  RowPartial of_lane;
  if (lane < cluster) {
    static_cast<CommonPartial&>(of_lane) = exchange->table[lane];
    if constexpr (kColumns == Columns::more) of_lane.mass = mass[lane];
  }
  return combine_lanes<kColumns>(of_lane, wants);
}

constexpr int blocks_at_once(Columns columns) {
  return columns == Columns::plain ? 4 : columns == Columns::options ? 3 : 2;
}

template <class T, Columns kColumns>
__global__ void __launch_bounds__(most_row_threads, blocks_at_once(kColumns))
    rows_kernel(const __grid_constant__ RowsArguments a) {
  __shared__ WarpResults warps;
  __shared__ Exchange exchange;
  __shared__ alignas(word_bytes) TokenScalars scalars;
  let_next_start();
  const RowsCall& call = a.call;
  const int cluster = a.plan.cluster;
  const int rank = static_cast<int>(blockIdx.x) & (cluster - 1);  // `cluster` is a power of two
  const int64_t i = blockIdx.x >> (__ffs(cluster) - 1);
  const bool makes_state = !present(call.row_reference);
  const int64_t per_block = int64_t{a.plan.tile} * a.plan.tiles;
  const int64_t begin = rank * per_block, all = call.logits.shape[1];
  const Slice slice{begin, begin + per_block < all ? begin + per_block : all, a.plan.tile,
                    a.plan.tiles};
  RowTarget token;
  if (call.scalars != nullptr) {
    const int64_t target = load_int(call.in.target, i);
    if (kind_of_token(call.in, call.inactive, i, target) !=
        TokenKind::counts) {  // the same in the whole cluster
      if (present(call.output)) clear_columns(call.output, i, slice.begin, slice.end);
      wait_for_kernel_before();
      return;
    }
    token = {column_of_target(call.in, target), target_weight(call.in, target),
             token_weight(call.in, i)};
  }
  const bool exchanges = makes_state && cluster > 1;
  if (exchanges) {
    if (threadIdx.x == 0) {
      init_expecting(&exchange.arrivals, cluster * exchanged_bytes<kColumns>);
    }
    __syncwarp();
    cluster_arrive();
  }
  Tile<T> tile = start_tile<T>(call.logits, i, slice.begin, slice.columns(0), tile_memory());
  if (call.scalars != nullptr) start_scalars(call.scalars, &scalars);
  finish_tile();

  int loaded = 0;
  RowStatistics state;
  const MapFactors& map = map_of_row<kColumns>(a, i);
  if (makes_state) {
    RowPartial partial;
    float at_target = -infinity();
    TargetColumn counted{token.target, 0};
    if (kColumns == Columns::more && a.call.wants.has(SumKind::above) && token.target >= 0) {
      counted.logit = map_raw(map, load(call.logits, i, token.target));
    }
    for (int index = 0; index < slice.tiles; ++index) {
      const int64_t column = slice.column(index);
      if (index != loaded) {
        __syncthreads();  // until no thread reads the previous tile
        tile = load_tile<T>(call.logits, i, column, slice.columns(index), tile_memory());
        loaded = index;
      }
      if (token.target >= column && token.target < column + tile.n) {
        at_target = target_logit(map, tile, token.target - column);
      }
      const RowPartial next = tile_partial<T, kColumns>(
          tile, map, call.in.vocab_weight, call.in.start(), static_cast<int>(column), a.call.wants,
          {counted.column - static_cast<int>(column), counted.logit}, &warps);
      partial = index == 0 ? next : combine_two<kColumns>(partial, next, a.call.wants);
    }
    if (exchanges) {
      cluster_wait();  // until every block has started
      partial = combine_blocks<kColumns>(partial, rank, cluster, a.call.wants, &exchange);
    }
    state = finish_row<kColumns>(partial, a.call.wants);
    if (kColumns == Columns::more && a.call.wants.has(SumKind::logits))
      state.mean_logit /= static_cast<float>(call.in.whole());
    state.target_logit = at_target;
    // The block that has the target's column writes the row's state.
    const bool tells =
        token.target < 0 ? rank == 0 : token.target >= slice.begin && token.target < slice.end;
    if (call.scalars != nullptr && tells && threadIdx.x == blockDim.x - 1) {
      write_state(call, i, token, scalars, state);
    }
  } else {
    state.reference = load(call.row_reference, i);
    state.log_sum = load(call.row_log_sum, i);
  }
  if (!present(call.output)) return;
  if (present(call.entropy)) state.entropy = load(call.entropy, i);
  write_output<T, kColumns>(a, map, state, slice, i, token, scalars, tile, loaded);
}

}  // namespace logitless::cuda
