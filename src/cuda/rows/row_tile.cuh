// SPDX-License-Identifier: Apache-2.0
// A tile of a row in shared memory: n columns of T, at the same distance from a multiple of 128
// bytes as in global memory. So 16-byte words are copied whole whatever the row's address, and each
// sector of a line is copied to a single sector of shared memory; otherwise copies take up to a
// quarter longer. Only the row's own bytes are read. On both sides -inf fills the last 16-byte
// word.
#pragma once

#include "src/cuda/runtime/copies.cuh"
#include "src/cuda/views.cuh"

namespace logitless::cuda {

constexpr int word_bytes = 16, line_bytes = 128;
// Bytes of a tile beyond its columns'.
constexpr int tile_margin = line_bytes + word_bytes;

// A unit is 32 bits of elements: one f32, or two of 16 bits. A word is 16 bytes.

template <class T>
inline constexpr int per_unit = 4 / static_cast<int>(sizeof(T));
template <class T>
inline constexpr int per_word = word_bytes / static_cast<int>(sizeof(T));

// The maximum element by element; ignores NaN.
template <class T>
__device__ uint32_t unit_max(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  } else if constexpr (dtype_of<T> == DType::bf16) {
    const __nv_bfloat162 pair = __hmax2(reinterpret_cast<const __nv_bfloat162&>(a),
                                        reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair =
        __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Written in assembly, because the compiler splits the store into four.
__device__ inline void store_word(void* global, const uint32_t (&bits)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(bits[0]), "r"(bits[1]),
               "r"(bits[2]), "r"(bits[3])
               : "memory");
}

__device__ inline int phase_of(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % word_bytes);
}

template <class T>
struct Tile {
  unsigned char* memory = nullptr;  // in shared memory, the word with column 0
  int phase = 0;                    // bytes from `memory` to column 0
  int n = 0;                        // columns
  __device__ T* elements() const { return reinterpret_cast<T*>(memory + phase); }
  // 16-byte words from `memory` to the end of the columns.
  __device__ int words() const {
    return (phase + n * static_cast<int>(sizeof(T)) + word_bytes - 1) / word_bytes;
  }
  // Columns before the first whole word.
  __device__ int head() const {
    return min(n, (word_bytes - phase) % word_bytes / static_cast<int>(sizeof(T)));
  }
};

// Starts to copy columns [column, column + n) of row i, which can be read after finish_tile. If the
// memory has been read before, a barrier must precede. `memory` is a multiple of 128, and there are
// at least 8 threads.
template <class T>
__device__ Tile<T> start_tile(const TensorView& view, int64_t i, int64_t column, int n,
                              unsigned char* memory) {
  const T* from = address<const T>(view, i, column);
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int64_t stride = view.stride[1];
  Tile<T> tile{memory, 0, n};
  if (stride == 1) {
    tile.phase = phase_of(from);
    tile.memory += reinterpret_cast<uintptr_t>(from) % line_bytes - tile.phase;
  }
  T* to = tile.elements();
  if (stride == 1) {
    const int head = tile.head(), words = (n - head) / per_word<T>;
    const int tail = head + words * per_word<T>;
#pragma unroll 4
    for (int w = t; w < words; w += threads) {
      copy_word(to + head + w * per_word<T>, from + head + w * per_word<T>);
    }
    if (t < head) to[t] = from[t];
    if (t < n - tail) to[tail + t] = from[tail + t];
  } else {
#pragma unroll 8
    for (int j = t; j < n; j += threads) to[j] = from[j * stride];
  }
  const T least = from_f32<T>(-infinity());
  if (t < tile.phase / static_cast<int>(sizeof(T))) reinterpret_cast<T*>(tile.memory)[t] = least;
  if (t < per_word<T>) to[n + t] = least;
  return tile;
}

// Waits for the copies of every thread.
__device__ inline void finish_tile() {
  wait_for_copies();
  __syncthreads();
}

template <class T>
__device__ Tile<T> load_tile(const TensorView& view, int64_t i, int64_t column, int n,
                             unsigned char* memory) {
  const Tile<T> tile = start_tile<T>(view, i, column, n, memory);
  finish_tile();
  return tile;
}

// The maximum of this thread's part of the tile; each column belongs to one thread.
template <class T>
__device__ float thread_max(const Tile<T>& tile) {
  const uint4* words = reinterpret_cast<const uint4*>(tile.memory);
  const float least[2] = {-infinity(), -infinity()};
  uint32_t best = pack<T>(least);
  const int count = tile.words(), threads = static_cast<int>(blockDim.x);
#pragma unroll 4
  for (int w = static_cast<int>(threadIdx.x); w < count; w += threads) {
    const uint4 v = words[w];
    best = unit_max<T>(best, unit_max<T>(unit_max<T>(v.x, v.y), unit_max<T>(v.z, v.w)));
  }
  float x[2] = {-infinity(), -infinity()};
  unpack<T>(best, x);
  return fmaxf(fmaxf(x[0], -infinity()), x[1]);  // -inf replaces a NaN in x[0]
}

// Loads the columns of one 32-bit unit: u * per_unit and, for 16 bits, the next one. `odd`: the
// tile's columns do not start at a multiple of 4 bytes.
template <class T>
__device__ void load_unit(const Tile<T>& tile, int u, bool odd, float* x) {
  uint32_t bits;
  if (sizeof(T) == 2 && odd) {
    const auto* half = reinterpret_cast<const uint16_t*>(tile.elements()) + 2 * u;
    bits = half[0] | static_cast<uint32_t>(half[1]) << 16;
  } else {
    bits = reinterpret_cast<const uint32_t*>(tile.elements())[u];
  }
  unpack<T>(bits, x);
}

// Whether write_tile writes whole words.
template <class T>
__device__ inline bool writes_words(const Tile<T>& tile, const TensorView& output, const T* to) {
  return output.dtype == dtype_of<T> && output.stride[1] == 1 && phase_of(to) == tile.phase;
}
// The thread that writes column j.
template <class T>
__device__ inline int writer_of(const Tile<T>& tile, const TensorView& output, int64_t i,
                                int64_t column, int j) {
  const int threads = static_cast<int>(blockDim.x);
  if (!writes_words(tile, output, address<T>(output, i, column))) return j % threads;
  const int head = tile.head(), words = (tile.n - head) / per_word<T>;
  const int tail = head + words * per_word<T>;
  if (j < head) return j;
  return j < tail ? (j - head) / per_word<T> % threads : head + (j - tail);
}

// Sets output[i, column + j] = value(x_j, j) for the tile's columns. Values are independent, so
// columns are assigned to threads as suits the memory. kUnroll 16-byte words are in flight.
template <int kUnroll, class T, class Value>
__device__ void write_tile(const Tile<T>& tile, const TensorView& output, int64_t i, int64_t column,
                           Value&& value) {
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const T* x = tile.elements();
  T* to = address<T>(output, i, column);
  if (!writes_words(tile, output, to)) {
    for (int j = t; j < tile.n; j += threads) {
      store(output, i, column + j, value(to_f32(x[j]), j));
    }
    return;
  }
  const int head = tile.head(), words = (tile.n - head) / per_word<T>;
  const int tail = head + words * per_word<T>;
#pragma unroll kUnroll
  for (int w = t; w < words; w += threads) {
    const int j = head + w * per_word<T>;
    const uint4 v = *reinterpret_cast<const uint4*>(x + j);
    uint32_t bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      float y[2];
      unpack<T>(bits[u], y);
#pragma unroll
      for (int h = 0; h < per_unit<T>; ++h) y[h] = value(y[h], j + u * per_unit<T> + h);
      bits[u] = pack<T>(y);
    }
    store_word(to + j, bits);
  }
  const int rest = head + (tile.n - tail);  // less than two 16-byte words
  if (t < rest) {
    const int j = t < head ? t : tail + (t - head);
    to[j] = from_f32<T>(value(to_f32(x[j]), j));
  }
}

// The whole block writes 0 to columns [begin, end) of row i, of any floating dtype.
__device__ inline void clear_columns(const TensorView& view, int64_t i, int64_t begin,
                                     int64_t end) {
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int size = view.dtype == DType::f32 ? 4 : 2;
  int64_t head = end - begin, words = 0;  // single elements before the 16-byte words
  if (view.stride[1] == 1) {
    const int phase = size == 4 ? phase_of(address<float>(view, i, begin))
                                : phase_of(address<__half>(view, i, begin));
    head = min(head, int64_t{(word_bytes - phase) % word_bytes / size});
    words = (end - begin - head) * size / word_bytes;
  }
  const int64_t body = begin + head, tail = body + words * (word_bytes / size);
  const uint32_t zero[4] = {};
  for (int64_t w = t; w < words; w += threads) {
    const int64_t j = body + w * (word_bytes / size);
    store_word(
        size == 4 ? static_cast<void*>(address<float>(view, i, j)) : address<__half>(view, i, j),
        zero);
  }
  for (int64_t j = begin + t; j < body; j += threads) store(view, i, j, 0.0f);
  for (int64_t j = tail + t; j < end; j += threads) store(view, i, j, 0.0f);
}

}  // namespace logitless::cuda
