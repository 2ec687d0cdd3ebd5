// SPDX-License-Identifier: Apache-2.0
// The packers copy strided elements of any input dtype into zero-padded panels of 32-bit lanes
// (gemm.h).

#if defined(LOGITLESS_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_PACK_INL_H_
#undef LOGITLESS_PACK_INL_H_
#else
#define LOGITLESS_PACK_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "hwy/highway.h"
#include "src/cpu/gemm.h"
#include "src/cpu/row_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Elements of a row converted or gathered at a time.
constexpr int64_t stage_columns = 512;

// Depth packed before the next rows are: a panel's part stays in L1 until its cache lines are
// complete.
constexpr int64_t pack_depth = 128;

// `count` is a multiple of a vector's lanes.
HWY_INLINE void copy_lanes(const uint32_t* from, int64_t count, uint32_t* to) {
  const hn::CappedTag<uint32_t, 16> d;
  for (int64_t i = 0; i < count; i += hn::Lanes(d)) hn::StoreU(hn::LoadU(d, from + i), d, to + i);
}

// out[k * out_stride + r] = row_r[k] for four rows and k in [0, lanes).
HWY_INLINE void transpose_4(const uint32_t* const* rows, int64_t lanes, int64_t out_stride,
                            uint32_t* out) {
  const hn::FixedTag<uint32_t, 4> d;
  const hn::FixedTag<uint64_t, 2> d2;
  int64_t k = 0;
  for (; k + 4 <= lanes; k += 4) {
    const auto a = hn::LoadU(d, rows[0] + k), b = hn::LoadU(d, rows[1] + k);
    const auto c = hn::LoadU(d, rows[2] + k), e = hn::LoadU(d, rows[3] + k);
    const auto ab0 = hn::BitCast(d2, hn::InterleaveLower(d, a, b)),
               ab2 = hn::BitCast(d2, hn::InterleaveUpper(d, a, b));
    const auto ce0 = hn::BitCast(d2, hn::InterleaveLower(d, c, e)),
               ce2 = hn::BitCast(d2, hn::InterleaveUpper(d, c, e));
    uint32_t* o = out + k * out_stride;
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d2, ab0, ce0)), d, o);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d2, ab0, ce0)), d, o + out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d2, ab2, ce2)), d, o + 2 * out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d2, ab2, ce2)), d, o + 3 * out_stride);
  }
  for (; k < lanes; ++k) {
    for (int r = 0; r < 4; ++r) out[k * out_stride + r] = rows[r][k];
  }
}

#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
// Return the blocks a0 b0 a2 b2 and a1 b1 a3 b3; Highway has a function for each from 1.3 on.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V even_blocks(D d, V a, V b) {
#if HWY_VERSION_GE(1, 3)
  return hn::InterleaveEvenBlocks(d, a, b);
#else
  return hn::OddEvenBlocks(hn::SlideUpBlocks<1>(d, b), a);
#endif
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V odd_blocks(D d, V a, V b) {
#if HWY_VERSION_GE(1, 3)
  return hn::InterleaveOddBlocks(d, a, b);
#else
  return hn::OddEvenBlocks(b, hn::SlideDownBlocks<1>(d, a));
#endif
}

// transpose_4 for 16 rows, in whole cache lines: 64 shuffles for 256 lanes.
HWY_INLINE void transpose_16(const uint32_t* const* rows, int64_t lanes, int64_t out_stride,
                             uint32_t* out) {
  const hn::Full512<uint32_t> d;
  const hn::Full512<uint64_t> d2;
  using V = hn::Vec<decltype(d)>;
  for (int64_t k = 0; k < lanes; k += 16) {
    // Block b of four[g][i]: rows 4g to 4g + 3 at k + 4b + i.
    V four[4][4];
    for (int g = 0; g < 4; ++g) {
      const V a = hn::LoadU(d, rows[4 * g] + k), b = hn::LoadU(d, rows[4 * g + 1] + k);
      const V c = hn::LoadU(d, rows[4 * g + 2] + k), e = hn::LoadU(d, rows[4 * g + 3] + k);
      const auto ab0 = hn::BitCast(d2, hn::InterleaveLower(d, a, b));
      const auto ab2 = hn::BitCast(d2, hn::InterleaveUpper(d, a, b));
      const auto ce0 = hn::BitCast(d2, hn::InterleaveLower(d, c, e));
      const auto ce2 = hn::BitCast(d2, hn::InterleaveUpper(d, c, e));
      four[g][0] = hn::BitCast(d, hn::InterleaveLower(d2, ab0, ce0));
      four[g][1] = hn::BitCast(d, hn::InterleaveUpper(d2, ab0, ce0));
      four[g][2] = hn::BitCast(d, hn::InterleaveLower(d2, ab2, ce2));
      four[g][3] = hn::BitCast(d, hn::InterleaveUpper(d2, ab2, ce2));
    }
    for (int i = 0; i < 4; ++i) {
      const V even_low = hn::ConcatLowerLower(d, four[2][i], four[0][i]);
      const V odd_low = hn::ConcatLowerLower(d, four[3][i], four[1][i]);
      const V even_high = hn::ConcatUpperUpper(d, four[2][i], four[0][i]);
      const V odd_high = hn::ConcatUpperUpper(d, four[3][i], four[1][i]);
      uint32_t* o = out + (k + i) * out_stride;
      hn::StoreU(even_blocks(d, even_low, odd_low), d, o);
      hn::StoreU(odd_blocks(d, even_low, odd_low), d, o + 4 * out_stride);
      hn::StoreU(even_blocks(d, even_high, odd_high), d, o + 8 * out_stride);
      hn::StoreU(odd_blocks(d, even_high, odd_high), d, o + 12 * out_stride);
    }
  }
}
constexpr int64_t transpose_rows_at_once = 16;
#else
constexpr int64_t transpose_rows_at_once = 4;
#endif

// out[k * out_stride + r] = rows[r][k] for `count` rows, a multiple of 4.
HWY_INLINE void transpose(const uint32_t* const* rows, int64_t count, int64_t lanes,
                          int64_t out_stride, uint32_t* out) {
  int64_t r = 0;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  const int64_t whole = lanes / 16 * 16;
  for (; r + 16 <= count && lanes == whole; r += 16)
    transpose_16(rows + r, lanes, out_stride, out + r);
#endif
  for (; r < count; r += 4) transpose_4(rows + r, lanes, out_stride, out + r);
}

// lanes[i] = (low[i], high[i]), a pair of bf16. `count` is a multiple of a vector's lanes, as in
// every panel.
HWY_INLINE void interleave_pairs(const uint16_t* low, const uint16_t* high, int64_t count,
                                 uint32_t* lanes) {
  const hn::CappedTag<uint32_t, 16> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const int64_t n = hn::Lanes(d);
  for (int64_t i = 0; i < count; i += n) {
    const auto a = hn::PromoteTo(d, hn::LoadU(d16, low + i)),
               b = hn::PromoteTo(d, hn::LoadU(d16, high + i));
    hn::StoreU(hn::Or(a, hn::ShiftLeft<16>(b)), d, lanes + i);
  }
}

// Prefetches the run that is packed next: hardware does not follow many short runs.
HWY_INLINE void prefetch_run(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) hwy::Prefetch(from + i);
}

// Reads a row's elements as the engine takes them (f32 or bf16), contiguously.
struct RowReader {
  const Engine& engine;
  const Source& source;
  bool direct;  // already contiguous in that dtype in memory

  RowReader(const Engine& e, const Source& s)
      : engine(e),
        source(s),
        direct(s.column_stride == 1 && s.dtype == (e.element == 4 ? DType::f32 : DType::bf16)) {}

  const char* at(int64_t row, int64_t column) const {
    const int64_t r = source.row_index != nullptr ? source.row_index[row] : row;
    return source.data +
           (r * source.row_stride + column * source.column_stride) * size_of(source.dtype);
  }

  // A pair of bf16 may start at an odd element; then it cannot be read in place as a 32-bit lane.
  bool lane_aligned(int64_t row, int64_t column) const {
    return reinterpret_cast<uintptr_t>(at(row, column)) % alignof(uint32_t) == 0;
  }

  // Converts or gathers into buffer, with zeros up to `padded` elements.
  void stage(int64_t row, int64_t column, int64_t count, int64_t padded, void* buffer) const {
    const int64_t size = size_of(source.dtype);
    const char* from = at(row, column);
    alignas(64) char gathered[stage_columns * 4];
    if (source.column_stride != 1) {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(gathered + i * size, from + i * source.column_stride * size, size);
      }
      from = gathered;
    }
    if (engine.element == 4) {
      load_as_f32(from, source.dtype, count, static_cast<float*>(buffer));
    } else {
      std::memcpy(buffer, from, count * 2);
    }
    std::memset(static_cast<char*>(buffer) + count * engine.element, 0,
                (padded - count) * engine.element);
  }
};

// Rows of one segment of columns, as lanes; rows after the last are zero.
struct RowGroup {
  alignas(64) char buffer[transpose_rows_at_once][pack_depth * 4];
  const uint32_t* lanes[transpose_rows_at_once];

  void read(const RowReader& reader, int64_t row, int64_t wanted, int64_t rows, int64_t column,
            int64_t count, int64_t padded) {
    for (int64_t r = 0; r < wanted; ++r) {
      lanes[r] = reinterpret_cast<const uint32_t*>(buffer[r]);
      if (r >= rows) {
        std::memset(buffer[r], 0, padded * reader.engine.element);
      } else if (reader.direct && count == padded && reader.lane_aligned(row + r, column)) {
        lanes[r] = reinterpret_cast<const uint32_t*>(reader.at(row + r, column));
      } else {
        reader.stage(row + r, column, count, padded, buffer[r]);
      }
    }
  }
};

// Packs with k along the columns. A panel has panel_rows rows; with amx_a it is [k / 32][32
// rows][32] instead of [lane][panel_rows].
void pack_along_columns(const Engine& engine, const Source& source, int64_t row0, int64_t rows,
                        int64_t column0, int64_t columns, int64_t panel_rows, bool amx_a,
                        void* panels) {
  const RowReader reader(engine, source);
  const int64_t depth = engine.padded_k(columns);
  const int64_t per_lane = 4 / engine.element;
  const int64_t group_rows = std::min(panel_rows, transpose_rows_at_once);
  RowGroup group;
  for (int64_t p = 0; p * panel_rows < rows; ++p) {
    uint32_t* panel = static_cast<uint32_t*>(panels) + p * panel_rows * (depth / per_lane);
    for (int64_t k = 0; k < depth; k += pack_depth) {
      const int64_t padded = std::min(pack_depth, depth - k);
      const int64_t count = std::clamp<int64_t>(columns - k, 0, padded);
      for (int64_t r = 0; r < panel_rows; r += group_rows) {
        const int64_t wanted = std::min(group_rows, panel_rows - r);
        if (reader.direct) {
          // The next rows of this panel, or its first rows further along k.
          const bool last = r + group_rows >= panel_rows;
          const int64_t next_k = last ? k + pack_depth : k, next_r = last ? 0 : r + group_rows;
          const int64_t bytes = std::min(pack_depth, columns - next_k) * engine.element;
          const int64_t from = p * panel_rows + next_r, to = std::min(from + group_rows, rows);
          for (int64_t i = from; i < to && bytes > 0; ++i)
            prefetch_run(reader.at(row0 + i, column0 + next_k), bytes);
        }
        group.read(reader, row0 + p * panel_rows + r, wanted, rows - p * panel_rows - r,
                   column0 + k, count, padded);
        if (!amx_a) {
          transpose(group.lanes, wanted, padded / per_lane, panel_rows,
                    panel + k / per_lane * panel_rows + r);
          continue;
        }
        for (int64_t i = 0; i < wanted; ++i) {
          for (int64_t step = 0; step < padded / 32; ++step) {
            std::memcpy(panel + (k / 32 + step) * 512 + (r + i) * 16, group.lanes[i] + step * 16,
                        64);
          }
        }
      }
    }
  }
}

// Packs with k along the rows, in panels [lane][b_columns].
void pack_along_rows(const Engine& engine, const Source& source, int64_t row0, int64_t rows,
                     int64_t column0, int64_t columns, void* panels) {
  const RowReader reader(engine, source);
  const int64_t width = engine.b_columns, per_lane = 4 / engine.element;
  const int64_t depth_lanes = engine.padded_k(rows) / per_lane;
  alignas(64) char low[stage_columns * 4], high[stage_columns * 2];
  alignas(64) uint32_t lanes[stage_columns];
  const int64_t step = stage_columns / width * width;
  constexpr int64_t ahead = 8;  // lanes: 4 KiB at 128 columns
  for (int64_t c = 0; c < columns; c += step) {
    const int64_t count = std::min(step, columns - c), padded = (count + width - 1) / width * width;
    uint32_t* out = static_cast<uint32_t*>(panels) + c / width * depth_lanes * width;
    for (int64_t k = 0; k < depth_lanes; ++k) {
      if (reader.direct && (k + ahead) * per_lane < rows) {
        for (int64_t h = 0; h < per_lane; ++h) {
          const int64_t row = std::min((k + ahead) * per_lane + h, rows - 1);
          prefetch_run(reader.at(row0 + row, column0 + c), count * engine.element);
        }
      }
      const uint32_t* from = lanes;
      if (per_lane == 1 && reader.direct && count == padded) {
        from = reinterpret_cast<const uint32_t*>(reader.at(row0 + k, column0 + c));
      } else if (per_lane == 1) {
        reader.stage(row0 + k, column0 + c, count, padded, lanes);
      } else {
        const uint16_t* halves[2] = {reinterpret_cast<uint16_t*>(low),
                                     reinterpret_cast<uint16_t*>(high)};
        for (int64_t h = 0; h < 2; ++h) {
          const int64_t row = 2 * k + h;
          char* buffer = h == 0 ? low : high;
          if (row >= rows) {
            std::memset(buffer, 0, padded * 2);
          } else if (reader.direct && count == padded) {
            halves[h] = reinterpret_cast<const uint16_t*>(reader.at(row0 + row, column0 + c));
          } else {
            reader.stage(row0 + row, column0 + c, count, padded, buffer);
          }
        }
        interleave_pairs(halves[0], halves[1], padded, lanes);
      }
      for (int64_t p = 0; p * width < padded; ++p) {
        copy_lanes(from + p * width, width, out + (p * depth_lanes + k) * width);
      }
    }
  }
}

// pack_gradient of gemm.h.
void pack_gradient_rows(const Engine& engine, const float* rows, int64_t first, int64_t count,
                        int64_t tokens, void* along_vocab, void* along_tokens) {
  const int64_t per_lane = 4 / engine.element, panel_rows = engine.a_rows;
  const bool amx = engine.arithmetic == Arithmetic::amx;
  const int64_t row_lanes = vocab_tile / per_lane;
  alignas(64) uint16_t narrow[gradient_group][vocab_tile];
  const uint32_t* lanes = reinterpret_cast<const uint32_t*>(rows);
  if (per_lane == 2) {
    for (int64_t r = 0; r < count; ++r)
      store_from_f32(rows + r * vocab_tile, vocab_tile, DType::bf16, narrow[r]);
    lanes = reinterpret_cast<const uint32_t*>(narrow);
  }
  if (along_vocab != nullptr) {
    for (int64_t p = 0; p < count / panel_rows; ++p) {
      uint32_t* panel = static_cast<uint32_t*>(along_vocab) + (first + p * panel_rows) * row_lanes;
      const uint32_t* from = lanes + p * panel_rows * row_lanes;
      for (int64_t r = 0; r < panel_rows; r += 4) {
        if (!amx) {
          const uint32_t* four[4] = {from + r * row_lanes, from + (r + 1) * row_lanes,
                                     from + (r + 2) * row_lanes, from + (r + 3) * row_lanes};
          transpose_4(four, row_lanes, panel_rows, panel + r);
          continue;
        }
        for (int64_t i = r; i < r + 4; ++i) {
          for (int64_t step = 0; step < vocab_tile / 32; ++step) {
            std::memcpy(panel + step * 512 + i * 16, from + i * row_lanes + step * 16, 64);
          }
        }
      }
    }
  }
  if (along_tokens == nullptr) return;
  // Rows, or pairs of rows, of lanes along the vocabulary.
  alignas(64) uint32_t pairs[gradient_group / 2][vocab_tile];
  const int64_t depth_rows = count / per_lane;
  if (per_lane == 2) {
    for (int64_t r = 0; r < depth_rows; ++r)
      interleave_pairs(narrow[2 * r], narrow[2 * r + 1], vocab_tile, pairs[r]);
    lanes = pairs[0];
  }
  uint32_t* out = static_cast<uint32_t*>(along_tokens);
  if (amx) {
    // [vocab panel][tokens / 32][32 columns][16 pairs]
    for (int64_t p = 0; p < vocab_tile / 32; ++p) {
      const uint32_t* from[16];
      for (int64_t r = 0; r < 16; ++r) from[r] = pairs[r] + p * 32;
      transpose(from, 16, 32, 16, out + (p * (tokens / 32) + first / 32) * 512);
    }
    return;
  }
  for (int64_t p = 0; p < vocab_tile / tile_rows; ++p) {
    uint32_t* panel = out + (p * (tokens / per_lane) + first / per_lane) * tile_rows;
    for (int64_t r = 0; r < depth_rows; ++r) {
      std::memcpy(panel + r * tile_rows, lanes + r * vocab_tile + p * tile_rows, tile_rows * 4);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace logitless::cpu
HWY_AFTER_NAMESPACE();

#endif  // the per-target include guard
