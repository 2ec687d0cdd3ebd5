// SPDX-License-Identifier: Apache-2.0
// What the copy engine is told of a matrix.
#pragma once

#include <cuda.h>

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda::sm90 {

// [rows, columns] of 16-bit elements, rows `stride` elements apart, in boxes of box_rows x 64;
// outside: zeros.
CUtensorMap make_map(const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                     int box_rows, Stream* stream);

// The same with the columns in blocks of 64, `blocks` of them one after the other in boxes of
// box_rows lines each. Where rows are no whole blocks it is a map of one block at a time.
struct BlockMap {
  CUtensorMap map;
  int32_t boxes;  // to ask for: 1 at (0, row, block), or each at (column, row, 0)
};
BlockMap make_block_map(const void* data, DType dtype, int64_t rows, int64_t columns,
                        int64_t stride, int box_rows, int blocks, Stream* stream);

// Maps `count` blocks [rows, 64], `pitch` lines apart, in boxes of `blocks` blocks, box_rows lines
// each.
CUtensorMap make_panel_map(const void* data, DType dtype, int64_t rows, int64_t pitch,
                           int64_t count, int box_rows, int blocks, Stream* stream);

}  // namespace logitless::cuda::sm90
