// SPDX-License-Identifier: Apache-2.0
// Matrix products by cuBLASLt, which is found at run time. Its heuristic, never timing, chooses the
// kernel from the types and the shape of the largest chunk. The choice serves the smaller chunks
// too, so that the same call gives the same bits in every process. The depth is split only where
// the caller gives memory for it.
#pragma once

#include "src/cuda/runtime/runtime.h"

namespace logitless::cuda {

// Element (i, j) is at data + i row_stride + j column_stride; one of the strides is 1.
struct Operand {
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;
};

// c [rows, columns] = alpha a [rows, depth] b [depth, columns] + beta c, with sums in f32.
struct Product {
  DType in = DType::f32, out = DType::f32;
  int64_t rows = 0, columns = 0, depth = 0;
  Operand a, b;
  void* c = nullptr;
  int64_t c_stride = 0;          // between rows; columns are contiguous
  const float* alpha = nullptr;  // on the device
  const float* beta = nullptr;   // where it is 0, c is not read
  bool tf32 = false;             // f32 inputs are read with 10 bits of mantissa
  // The size of the call's largest product of this kind; 0: this one is the largest.
  int64_t most_rows = 0, most_columns = 0;
  // Memory for the sums of parts of the depth, which is then split, in an order that the shape
  // gives. Used in place of the library's own memory, and larger.
  void* parts = nullptr;
  int64_t parts_bytes = 0;
};

// Bytes of a workspace for the library's own use.
constexpr int64_t matrix_library_bytes = 4 << 20;

void multiply(const Product& product, const DeviceInfo& device, void* library_memory,
              Stream* stream);

// Whether a product reads, or writes, a matrix in place: its rows (or columns) are whole 16 bytes,
// multiples of 16 bytes apart. Not its address: the workspace may be asked for before there is one.
bool serves_product(const TensorView& matrix);

// Returns backend_unavailable with the names tried, if there is none.
Status find_matrix_library();
// Creates the device's handle, which loads the library's kernels lazily.
Status warmup_matrix_library(const DeviceInfo& device);

}  // namespace logitless::cuda
