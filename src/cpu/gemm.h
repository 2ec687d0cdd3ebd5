// SPDX-License-Identifier: Apache-2.0
// The CPU makes packed products C[m, n] (+)= sum_k A[m, k] B[n, k], whose operands are both packed
// in panels first; with a few rows of A, B may stay as it is (multiply_unpacked).
//
// An operand's element along k is a 32-bit lane: one f32, or a pair of bf16. Then every engine
// shares the packing and only the multiply-accumulate differs. A panel holds `a_rows` rows of A, a
// B panel `b_columns` columns of B; both are zero-padded to whole panels, so that no kernel has an
// edge. Every element of C is one chain of additions along k in ascending order: neither the panel
// it lies in, nor the blocking, nor the size of the product changes its bits.
#pragma once

#include <cstdint>

#include "logitless/tensor.h"

namespace logitless::cpu {

enum class Arithmetic {
  f32,       // it uses FMA, and 16-bit inputs are widened while they are packed
  bf16_dot,  // AVX-512 BF16 or Arm BF16 makes dot products of pairs
  amx,       // Intel AMX multiplies tiles of bf16
};

// This is the engine of a dtype on this CPU, with sizes in elements.
struct Engine {
  Arithmetic arithmetic;
  int64_t a_rows;      // an A panel has so many rows
  int64_t b_columns;   // a B panel has so many columns
  int64_t k_multiple;  // depths are zero-padded to a multiple of this
  int64_t element;     // a packed element has 4 bytes or 2
  // Token counts are padded to this: to whole A panels, and to a whole depth of grad_weight.
  int64_t token_multiple() const { return a_rows > k_multiple ? a_rows : k_multiple; }
  int64_t padded_k(int64_t k) const { return (k + k_multiple - 1) / k_multiple * k_multiple; }
  int64_t a_panels(int64_t rows) const { return (rows + a_rows - 1) / a_rows; }
  int64_t b_panels(int64_t columns) const { return (columns + b_columns - 1) / b_columns; }
  int64_t a_bytes(int64_t rows, int64_t k) const {
    return a_panels(rows) * a_rows * padded_k(k) * element;
  }
  int64_t b_bytes(int64_t columns, int64_t k) const {
    return b_panels(columns) * b_columns * padded_k(k) * element;
  }
};

// A tile holds so many columns of the vocabulary, a multiple of every engine's a_rows and
// b_columns. 192 x 512 f32 is 384 KiB, less than half of a 1 MiB L2
// (docs/kernels/cpu.md).
inline constexpr int64_t vocab_tile = 192;
// Says which engine computes products of this dtype on the target now in force. CPU features
// decide, never timing.
Engine choose_engine(DType dtype);
const char* name_of(Arithmetic arithmetic);
// Tests call this: bf16 products run on `arithmetic`, if the target in force has it, until it is
// called again; else it returns false and changes nothing. nullptr returns to choose_engine's
// choice.
bool force_bf16_arithmetic(const Arithmetic* arithmetic);

// This is a strided matrix in memory, whose rows may be picked by an index.
struct Source {
  const char* data = nullptr;  // it points to row 0, column 0
  DType dtype = DType::f32;
  int64_t row_stride = 0, column_stride = 1;  // they count elements
  const int64_t* row_index = nullptr;         // [rows]  where it is null, row i is row i itself
};

// All packers take elements [row0, row0 + rows) x [column0, column0 + columns) of `source`. In this
// one columns run along k: A[row, k], B[row, k].
void pack_a_along_columns(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t column0,
                          int64_t columns, void* panels);
void pack_b_along_columns(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t column0,
                          int64_t columns, void* panels);
// Here rows run along k: B[column, k].
void pack_b_along_rows(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t column0,
                       int64_t columns, void* panels);

// Packs rows [first, first + count) of a gradient tile both ways: as rows of A with k along the
// vocabulary (for grad_input), and as rows of A^T with k along the tokens (for grad_weight); null
// says that one is not wanted. `rows` is [count][vocab_tile] in f32, zero where there is no token;
// count and first are multiples of token_multiple.
inline constexpr int64_t gradient_group = 32;  // it packs so many rows at a time
void pack_gradient(const Engine&, const float* rows, int64_t first, int64_t count, int64_t tokens,
                   void* along_vocab, void* along_tokens);

// It makes C = (accumulate ? C : 0) + A B^T for whole panels. k counts elements and is padded;
// strides between panels count bytes.
struct Product {
  const void* a;
  int64_t a_panel_stride, a_panels;
  const void* b = nullptr;
  int64_t b_panel_stride = 0, b_panels = 0;
  int64_t k;
  float* c;
  int64_t c_stride;  // it counts the elements between rows
  bool accumulate = false;
};
void multiply(const Engine&, const Product&);
// Makes the same, bit for bit, of elements [row0, row0 + rows) x [0, columns) of `source` as they
// lie in memory, for a product of few A panels, whose `b` is not read and whose k is the columns
// padded. Returns false, having done nothing, where only packed operands serve.
bool multiply_unpacked(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t columns,
                       const Product&);

// Makes to[r, j] = (overwrite ? 0 : to[r, j]) + scale * from[r, j] for a block of f32 rows.
void add_scaled(const float* from, int64_t from_stride, float scale, int64_t rows, int64_t columns,
                bool overwrite, float* to, int64_t to_stride);

// gemm_amx.cpp tells whether this CPU and kernel allow AMX, and has its product.
bool amx_available();
void multiply_amx(const Product&);

}  // namespace logitless::cpu
