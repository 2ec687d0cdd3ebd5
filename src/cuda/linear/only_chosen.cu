// SPDX-License-Identifier: Apache-2.0
// The gradients of logits_at alone ("Only chosen columns" of docs/semantics.md), without a product:
//   a_ik = g_ik times the slope of raw -> z at the column ids_ik
//   grad_input_i = sum_k a_ik W[ids_ik]
//   grad_weight_j = sum of a_ik x_i, grad_bias_j = sum of a_ik, over the places (i, k)
//   with id j, in a fixed order
// One warp per token computes its places' columns and factors; blocks gather rows of the weight for
// grad_input. For grad_weight and grad_bias the places are sorted by column. A column with more
// than piece_places places is cut into pieces of that size, each added up by its own block; a row
// of grad_weight is then the sum of its pieces, in order. Time is limited by memory: a row of D
// elements per place, twice, and grad_weight once.
#include "src/cuda/linear/dot.cuh"
#include "src/cuda/linear/lists.cuh"
#include "src/cuda/ops.h"
#include "src/cuda/tokens/token_scalars.cuh"
#include "src/row/map.h"

namespace logitless::cuda {
namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int many = 4;  // rows loaded at a time
// Enough on a multiprocessor to hide the latency of memory.
constexpr int blocks_resident = 4;
// An id that all of 8192 tokens choose makes 16 pieces; each piece may need a row of sums.
constexpr int piece_places = 512;
// Columns whose places a block of grad_weight's kernel reads together.
constexpr int columns_of_block = 8;

struct OnlyChosen {
  TokenInput in;
  TensorView input, weight, bias, grad_logits_at;
  TensorView grad_input, grad_weight, grad_bias;
  MapFactors map;
  bool accumulate;
  IdLists lists;
  int32_t* row;    // [places]  a place's token
  float* factor;   // [places]
  int32_t* begin;  // [V + 1]  the first sorted place of each column
  float* pieces;   // [two a bin, pitch]
  int64_t pitch;
};

__device__ int vocab_of(const OnlyChosen& c) { return static_cast<int>(c.in.vocab); }

// Every place starts with column V, which does not exist; factors_kernel sets active tokens'.
__global__ void __launch_bounds__(threads)
    fill_kernel(SortedPlaces sorted, int64_t places, int none) {
  const int64_t p = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (p >= places) return;
  sorted.column[p] = none;
  sorted.place[p] = static_cast<int32_t>(p);
}

// A warp checks whether a token has a gradient; if so, it computes its places' columns and factors.
template <class T>
__global__ void __launch_bounds__(threads)
    factors_kernel(const __grid_constant__ OnlyChosen c, int32_t* columns) {
  const int64_t i = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (i >= c.input.shape[0]) return;
  const TokenKind kind = kind_of_target(c.in, target_of(c.in, i));
  if (kind == TokenKind::outside && lane == 0) set_fault(c.in.fault, 1);
  if (kind != TokenKind::counts) return;
  const int64_t count = c.lists.count[i], first = c.lists.first[i];
  const auto gradient = [&](int64_t k) {
    return *element_of<const float>(c.lists, c.grad_logits_at, i, k);
  };
  bool is_active = false;
  for (int64_t k = lane; k < count; k += 32) {
    const ChosenColumn chosen = column_of(c.in, id_of(c.lists, i, k));
    if (chosen.is_outside) set_fault(c.in.fault, 1);
    is_active |= chosen.is_given && gradient(k) != 0;
  }
  if (!__any_sync(whole_warp, is_active)) return;
  MapFactors map = c.map;
  if (c.in.makes_maps) {
    TokenMap own{};
    if (lane == 0) own = map_of_temperature(c.in, load(c.in.temperature, i));
    own.slope = __shfl_sync(whole_warp, own.slope, 0);
    own.outward = __shfl_sync(whole_warp, own.outward, 0);
    own.outward_low = __shfl_sync(whole_warp, own.outward_low, 0);
    own.backward = __shfl_sync(whole_warp, own.backward, 0);
    map = with_token(map, own);
  }
  const auto put = [&](int64_t k, int column, float factor) {
    columns[first + k] = column;
    c.row[first + k] = static_cast<int32_t>(i);
    c.factor[first + k] = factor;
  };
  if (!map.capped) {
    for (int64_t k = lane; k < count; k += 32) {
      const int column = column_of(c.in, id_of(c.lists, i, k)).column;
      if (column >= 0) put(k, column, gradient(k) * map.slope);
    }
    return;
  }
  for (int64_t k = 0; k < count; ++k) {
    const int column = column_of(c.in, id_of(c.lists, i, k)).column;
    if (column < 0) continue;
    const float z = logit_of<T>(c.input, c.weight, c.bias, map, i, column, lane);
    if (lane == 0) put(k, column, gradient(k) * cap_slope(map, z) * map.slope);
  }
}

// A matrix of which each thread reads some columns of many rows.
template <class T>
struct GatheredRows {
  const TensorView& matrix;
  int64_t d;
  bool whole;  // every row's pack at d is 16 aligned bytes

  __device__ GatheredRows(const TensorView& of, int64_t first_column)
      : matrix(of), d(first_column) {
    constexpr int width = Pack<T>::width;
    whole = d + width <= of.shape[1] && (of.stride[1] == 1 || of.shape[1] == 1) &&
            (of.stride[0] % width == 0 || of.shape[0] == 1) &&
            reinterpret_cast<uintptr_t>(address<const T>(of, 0, d)) % 16 == 0;
  }
  __device__ uint4 operator[](int row) const {
    if (whole) return *reinterpret_cast<const uint4*>(address<const T>(matrix, row, d));
    return RowReader<T>(matrix, row, matrix.shape[1])(d);
  }
};

template <class T>
__device__ void add_scaled(float factor, const uint4& bits, float (&sum)[Pack<T>::width]) {
  float x[Pack<T>::width];
  unpack<T>(bits, x);
#pragma unroll
  for (int e = 0; e < Pack<T>::width; ++e) sum[e] = fmaf(factor, x[e], sum[e]);
}

// Adds factor_n times row_n, for `count` rows in shared memory in order, to a thread's columns of a
// sum; negative rows are skipped.
template <class T>
__device__ void add_rows(const GatheredRows<T>& rows, const int* row, const float* factor,
                         int count, float (&sum)[Pack<T>::width]) {
  for (int n = 0; n < count; n += many) {
    uint4 x[many];
#pragma unroll
    for (int u = 0; u < many; ++u) {
      if (n + u < count && row[n + u] >= 0) x[u] = rows[row[n + u]];
    }
#pragma unroll
    for (int u = 0; u < many; ++u) {
      if (n + u < count && row[n + u] >= 0) add_scaled<T>(factor[n + u], x[u], sum);
    }
  }
}

// Writes a thread's columns of a gradient's row, or, if `adds`, adds to them.
template <int kWidth>
__device__ void write_row(const TensorView& to, int64_t row, int64_t d, float (&x)[kWidth],
                          bool adds) {
  const int64_t count = to.shape[1];
  if (d >= count) return;
  with_dtype_on_device(to.dtype, [&](auto element) {
    using E = decltype(element);
    constexpr int width = Pack<E>::width;
    E* const at = address<E>(to, row, d);
    const bool whole = d + kWidth <= count && (to.stride[1] == 1 || count == 1) &&
                       reinterpret_cast<uintptr_t>(at) % 16 == 0;
    if constexpr (kWidth % width == 0) {
      if (whole && !adds) {
#pragma unroll
        for (int n = 0; n < kWidth; n += width) {
          Pack<E> pack;
#pragma unroll
          for (int e = 0; e < width; ++e) pack.x[e] = from_f32<E>(x[n + e]);
          *reinterpret_cast<Pack<E>*>(at + n) = pack;
        }
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      if (d + e >= count) break;
      E* const one = at + e * to.stride[1];
      *one = from_f32<E>(adds ? to_f32(*one) + x[e] : x[e]);
    }
  });
}

// A block computes a slice of a token's row of grad_input.
template <class T>
__global__ void __launch_bounds__(threads, blocks_resident)
    input_kernel(const __grid_constant__ OnlyChosen c, const int32_t* columns) {
  __shared__ int row[threads];
  __shared__ float factor[threads];
  constexpr int width = Pack<T>::width;
  const int64_t i = blockIdx.x, d = (block_of_second_axis() * threads + threadIdx.x) * width;
  const int64_t first = c.lists.first[i], count = c.lists.count[i];
  float sum[width] = {};
  for (int64_t base = 0; base < count; base += threads) {
    __syncthreads();
    if (base + threadIdx.x < count) {
      const int column = columns[first + base + threadIdx.x];
      row[threadIdx.x] = column < vocab_of(c) ? column : -1;
      factor[threadIdx.x] = c.factor[first + base + threadIdx.x];
    }
    __syncthreads();
    const int here = static_cast<int>(min(int64_t{threads}, count - base));
    if (d < c.weight.shape[1]) add_rows<T>({c.weight, d}, row, factor, here, sum);
  }
  write_row(c.grad_input, i, d, sum, false);
}

// Finds each column's first place by bisection.
__global__ void __launch_bounds__(threads)
    begin_kernel(const int32_t* column, int places, int vocab, int32_t* begin) {
  const int64_t j = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (j > vocab) return;
  int first = 0;
  for (int count = places; count > 0;) {
    const int half = count / 2;
    if (column[first + half] < j) {
      first += half + 1, count -= half + 1;
    } else {
      count = half;
    }
  }
  begin[j] = first;
}

// Sorted places that a block has read into shared memory, up to `threads` at a time.
struct PlacesRead {
  int row[threads];
  float factor[threads];
};
struct PlacesHeld {
  int base = 0, count = 0;

  // Reads the places from p on, and before `last`, unless p is there.
  __device__ void need(int p, int last, const OnlyChosen& c, const int32_t* place,
                       PlacesRead* read) {
    if (p < base + count) return;
    base = p, count = min(threads, last - p);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count) {
      const int from = place[p + threadIdx.x];
      read->row[threadIdx.x] = c.row[from];
      read->factor[threadIdx.x] = c.factor[from];
    }
    __syncthreads();
  }
};

// The sorted places form bins of piece_places. In each bin at most one long column starts, and at
// most one continues: their pieces there are 2 bin and 2 bin + 1.
struct Piece {
  int first, count;
};
__device__ Piece piece_of(const OnlyChosen& c, const int32_t* column, int places, int64_t n) {
  const int bin = static_cast<int>(n / 2) * piece_places;
  const bool begins = n % 2 == 0;
  const int at = begins ? bin + piece_places : bin;
  if (at >= places || column[at] >= vocab_of(c)) return {0, 0};
  const int begin = c.begin[column[at]], end = c.begin[column[at] + 1];
  if (end - begin <= piece_places) return {0, 0};
  const int later = (bin - begin + piece_places - 1) / piece_places;
  const int first = begins ? begin : begin + later * piece_places;
  if (begins ? (begin < bin || begin >= at) : (begin >= bin || first >= end)) return {0, 0};
  return {first, min(piece_places, end - first)};
}

template <class T>
__global__ void __launch_bounds__(threads)
    pieces_kernel(const __grid_constant__ OnlyChosen c, const int32_t* column, const int32_t* place,
                  int places) {
  __shared__ PlacesRead read;
  constexpr int width = Pack<T>::width;
  const Piece piece = piece_of(c, column, places, blockIdx.x);
  if (piece.count == 0) return;
  const int64_t d = (block_of_second_axis() * threads + threadIdx.x) * width;
  const int end = piece.first + piece.count;
  PlacesHeld held;
  float sum[width] = {};
  for (int p = piece.first; p < end; p += held.count) {
    held.need(p, end, c, place, &read);
    if (d < c.pitch) add_rows<T>({c.input, d}, read.row, read.factor, held.count, sum);
  }
  if (d >= c.pitch) return;
#pragma unroll
  for (int e = 0; e < width; ++e) c.pieces[blockIdx.x * c.pitch + d + e] = sum[e];
}

// A block computes a slice of some rows of grad_weight, whose places are consecutive. It loads
// `many` places at a time, of whichever columns.
template <class T>
__global__ void __launch_bounds__(threads, blocks_resident)
    weight_kernel(const __grid_constant__ OnlyChosen c, const int32_t* place) {
  __shared__ PlacesRead read;
  __shared__ int begin_of[columns_of_block + 1];
  constexpr int width = Pack<T>::width;
  const int64_t first_column = int64_t{blockIdx.x} * columns_of_block;
  const int64_t d = (block_of_second_axis() * threads + threadIdx.x) * width;
  const int columns = static_cast<int>(min(int64_t{columns_of_block}, c.in.vocab - first_column));
  if (static_cast<int>(threadIdx.x) <= columns) {
    begin_of[threadIdx.x] = c.begin[first_column + threadIdx.x];
  }
  __syncthreads();
  const GatheredRows<T> rows(c.input, d);
  PlacesHeld held;
  float sum[width] = {};
  int j = 0;
  const auto finish_column = [&] {
    if (begin_of[j] != begin_of[j + 1] || !c.accumulate) {
      write_row(c.grad_weight, first_column + j, d, sum, c.accumulate);
    }
#pragma unroll
    for (float& x : sum) x = 0;
    ++j;
  };
  const auto is_long = [&](int n) { return begin_of[n + 1] - begin_of[n] > piece_places; };
  while (j < columns) {
    int last = j;
    while (last < columns && !is_long(last)) ++last;
    const int end = begin_of[last];
    for (int p = begin_of[j]; p < end;) {
      held.need(p, begin_of[columns], c, place, &read);
      const int at = p - held.base, count = min(many, min(end - p, held.count - at));
      uint4 x[many];
#pragma unroll
      for (int u = 0; u < many; ++u) {
        if (u < count && d < c.pitch) x[u] = rows[read.row[at + u]];
      }
#pragma unroll
      for (int u = 0; u < many; ++u) {
        if (u >= count) break;
        while (p + u >= begin_of[j + 1]) finish_column();
        add_scaled<T>(read.factor[at + u], x[u], sum);
      }
      p += count;
    }
    while (j < last) finish_column();
    if (j == columns) break;
    for (int p = begin_of[j]; p < begin_of[j + 1] && d < c.pitch; p += piece_places) {
      const int64_t n = 2 * int64_t{p / piece_places} + (p > begin_of[j]);
#pragma unroll
      for (int e = 0; e < width; ++e) sum[e] += c.pieces[n * c.pitch + d + e];
    }
    finish_column();
  }
}

// A warp sums a column's factors; each lane takes every 32nd.
__global__ void __launch_bounds__(threads)
    bias_kernel(const __grid_constant__ OnlyChosen c, const int32_t* place) {
  const int64_t j = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  if (j >= c.in.vocab) return;
  const int begin = c.begin[j], end = c.begin[j + 1], lane = threadIdx.x % 32;
  if (begin == end && c.accumulate) return;
  float sum = 0;
  for (int p = begin + lane; p < end; p += 32) sum += c.factor[place[p]];
  sum = warp_sum(sum);
  if (lane != 0) return;
  store(c.grad_bias, j, 0, c.accumulate ? load(c.grad_bias, j) + sum : sum);
}

struct Layout {
  OnlyChosen call;
  SortedPlaces sorted;
  int64_t piece_rows;
  uint64_t bytes;
};

Layout layout_of(const Call& call, void* memory) {
  Arena arena(memory);
  const int64_t hidden = call.hidden();
  Layout layout{};
  OnlyChosen& c = layout.call;
  c.in = token_input(call);
  c.input = call.input, c.weight = call.weight, c.bias = call.bias;
  c.grad_logits_at = call.grad_logits_at;
  c.grad_input = call.grad_input, c.grad_weight = call.grad_weight, c.grad_bias = call.grad_bias;
  c.map = map_factors(logit_map(call.options));
  c.accumulate = call.accumulate;
  c.lists = place_lists(&arena, call.ids, call.id_offsets, call.tokens());
  c.pitch = round_up(hidden, 8);
  const int64_t places = c.lists.places;
  layout.piece_rows =
      call.grad_weight && places > piece_places ? 2 * int64_t{blocks_for(places, piece_places)} : 0;
  c.row = arena.take<int32_t>(places);
  c.factor = arena.take<float>(places);
  layout.sorted = place_sorted(&arena, places);
  c.begin = arena.take<int32_t>(call.vocab() + 1);
  c.pieces = arena.take<float>(layout.piece_rows * c.pitch);
  layout.bytes = arena.used();
  return layout;
}

void enqueue(const Layout& layout, Stream* stream) {
  const OnlyChosen& c = layout.call;
  const int64_t tokens = c.input.shape[0], places = c.lists.places, vocab = c.weight.shape[0];
  const auto count = static_cast<int>(places);
  find_lists(c.lists, tokens, c.in.fault, stream);
  SortedPlaces sorted = layout.sorted;
  stream->launch("fill_places", fill_kernel, blocks_for(places, threads), threads, sorted, places,
                 static_cast<int>(vocab));
  with_dtype(c.input.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t slices = divide_up(c.weight.shape[1], threads * Pack<T>::width);
    stream->launch("chosen_factors", factors_kernel<T>, blocks_for(tokens, warps), threads, c,
                   sorted.column);
    if (c.grad_input) {
      stream->launch("chosen_grad_input", input_kernel<T>,
                     two_axes(static_cast<unsigned>(tokens), slices), threads, c, sorted.column);
    }
    if (!c.grad_weight && !c.grad_bias) return;
    sorted = sort_places(sorted, places, vocab, stream);
    stream->launch("column_begins", begin_kernel, blocks_for(vocab + 1, threads), threads,
                   sorted.column, count, static_cast<int>(vocab), c.begin);
    if (c.grad_weight) {
      stream->launch("chosen_pieces", pieces_kernel<T>,
                     two_axes(static_cast<unsigned>(layout.piece_rows), slices), threads, c,
                     sorted.column, sorted.place, count);
      stream->launch("chosen_grad_weight", weight_kernel<T>,
                     two_axes(blocks_for(vocab, columns_of_block), slices), threads, c,
                     sorted.place);
    }
    if (c.grad_bias) {
      stream->launch("chosen_grad_bias", bias_kernel, blocks_for(vocab, warps), threads, c,
                     sorted.place);
    }
  });
}

}  // namespace

Status only_chosen_workspace(const Call& call, WorkspaceSize* size) {
  const uint64_t bytes = layout_of(call, nullptr).bytes;
  *size = {bytes, bytes, Arena::alignment};
  return check_linear_extents({call.tokens(), call.vocab(), call.hidden(), call.all_chosen()});
}

Status run_only_chosen(const Call& call, const Workspace& workspace, const DeviceInfo&,
                       Stream* stream) {
  const Layout layout = layout_of(call, static_cast<char*>(workspace.data) + workspace.byte_offset);
  stream->prepare_and_run([&] { enqueue(layout, stream); });
  return {};
}

}  // namespace logitless::cuda
