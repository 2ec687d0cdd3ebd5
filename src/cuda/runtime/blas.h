// SPDX-License-Identifier: Apache-2.0
// Matrix products by cuBLASLt, which is found at run time. Its heuristic, never timing, chooses the
// kernel from the types and the shape of the largest chunk. Smaller chunks use the same kernel if
// it can run them. So the same call gives the same bits in every process. The depth is split only
// if the caller gives memory for it.
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
  const float* beta = nullptr;   // if it is 0, c is not read
  bool tf32 = false;             // f32 inputs are read with 10 bits of mantissa
  // The size of the call's largest product of this kind; 0 if this one is the largest.
  int64_t most_rows = 0, most_columns = 0;
  // Memory for partial sums of the depth, which may then be split, in an order that depends on the
  // shape. Used in place of cuBLASLt's workspace, and larger.
  void* parts = nullptr;
  int64_t parts_bytes = 0;
};

// Bytes of cuBLASLt's own workspace.
constexpr int64_t matrix_library_bytes = 4 << 20;

void multiply(const Product& product, const DeviceInfo& device, void* library_memory,
              Stream* stream);

// Whether a product can read or write a matrix in place: its rows (or columns) are whole multiples
// of 16 bytes, and multiples of 16 bytes apart. Does not check the address: the workspace may be
// sized before an address is known.
bool serves_product(const TensorView& matrix);

// Returns backend_unavailable with the names tried if cuBLASLt is not found.
Status find_matrix_library();
// Creates the device's handle. cuBLASLt loads a kernel only at the first product that needs it.
Status warmup_matrix_library(const DeviceInfo& device);

}  // namespace logitless::cuda
