// SPDX-License-Identifier: Apache-2.0
// Tensor maps, which describe a matrix to TMA, the GPU's copy engine.
#pragma once

#include <cuda.h>

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda::sm90 {

// Maps [rows, columns] of 16-bit elements, with rows `stride` elements apart, in boxes of box_rows
// x 64; elements outside are read as zeros.
CUtensorMap make_map(const void* data, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                     int box_rows, Stream* stream);

// The same with columns in blocks of 64, `blocks` of them per box, with box_rows lines each. If the
// rows are not whole blocks, each box is a single block.
struct BlockMap {
  CUtensorMap map;
  int32_t boxes;  // boxes to load: one at (0, row, block), or each at (column, row, 0)
};
BlockMap make_block_map(const void* data, DType dtype, int64_t rows, int64_t columns,
                        int64_t stride, int box_rows, int blocks, Stream* stream);

// Maps `count` blocks [rows, 64], `pitch` lines apart, in boxes of `blocks` blocks with box_rows
// lines each.
CUtensorMap make_panel_map(const void* data, DType dtype, int64_t rows, int64_t pitch,
                           int64_t count, int box_rows, int blocks, Stream* stream);

}  // namespace logitless::cuda::sm90
