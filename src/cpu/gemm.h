// SPDX-License-Identifier: Apache-2.0
// Packed products on the CPU: C[m, n] (+)= sum_k A[m, k] B[n, k]. Both operands are packed in
// panels; with few rows of A, B may stay unpacked (multiply_unpacked).
//
// An operand's element along k is a 32-bit lane: one f32, or a pair of bf16. Every engine shares
// the packing, and only the multiply-accumulate differs. An A panel holds `a_rows` rows of A, a B
// panel `b_columns` columns of B, both zero-padded to whole panels, so that no kernel has an edge.
// Every element of A B^T is one chain of additions along k in ascending order: its bits do not
// depend on its panel, the blocking or the size of the product.
#pragma once

#include <cstdint>

#include "logitless/tensor.h"

namespace logitless::cpu {

enum class Arithmetic {
  f32,       // multiply-adds; 16-bit inputs are widened while they are packed
  bf16_dot,  // AVX-512 BF16 or Arm BF16: dot products of pairs
  amx,       // Intel AMX: tiles of bf16
};

// How a dtype is multiplied on this CPU.
struct Engine {
  Arithmetic arithmetic;
  int64_t a_rows;      // rows of an A panel
  int64_t b_columns;   // columns of a B panel
  int64_t k_multiple;  // depths are zero-padded to a multiple of it
  int64_t element;     // bytes per packed element: 4 or 2
  // Token counts are padded to whole A panels and to the depth multiple of grad_weight's product.
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

// Columns of a tile of the vocabulary, a multiple of every engine's a_rows and b_columns. 192 x 512
// f32 is 384 KiB, less than half of a 1 MiB L2 (docs/kernels/cpu.md).
inline constexpr int64_t vocab_tile = 192;
// The engine for a dtype on the current target. CPU features decide, never timing.
Engine choose_engine(DType dtype);
const char* name_of(Arithmetic arithmetic);
// For tests: runs bf16 products on `arithmetic`; nullptr returns to choose_engine's choice. Returns
// false and changes nothing if the current target does not have it.
bool force_bf16_arithmetic(const Arithmetic* arithmetic);

// A strided matrix in memory; row_index may select its rows.
struct Source {
  const char* data = nullptr;  // of row 0, column 0
  DType dtype = DType::f32;
  int64_t row_stride = 0, column_stride = 1;  // in elements
  const int64_t* row_index = nullptr;         // [rows]  null: rows 0, 1, 2, ...
};

// The packers read elements [row0, row0 + rows) x [column0, column0 + columns) of `source`. Here
// columns run along k: A[row, k], B[row, k].
void pack_a_along_columns(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t column0,
                          int64_t columns, void* panels);
void pack_b_along_columns(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t column0,
                          int64_t columns, void* panels);
// Here rows run along k: B[column, k].
void pack_b_along_rows(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t column0,
                       int64_t columns, void* panels);

inline constexpr int64_t gradient_group = 32;  // rows packed at a time
// Packs rows [first, first + count) of a gradient tile both ways: as rows of A with k along the
// vocabulary (for grad_input), and as rows of A^T with k along the tokens (for grad_weight); a null
// destination is skipped. `rows` is [count][vocab_tile] in f32, zero where there is no token; count
// and first are multiples of token_multiple.
void pack_gradient(const Engine&, const float* rows, int64_t first, int64_t count, int64_t tokens,
                   void* along_vocab, void* along_tokens);

// What a product does with C.
enum class Onto {
  nothing,  // overwrites it
  chain,    // continues its chains: C has the first part of the same product
  sum,      // adds a product of its own. A chain along many tiles would lose their small terms.
            // AMX continues the chain: its products are of bf16, which rounds more.
};
// For whole panels. k counts padded elements; strides between panels are in bytes.
struct Product {
  const void* a;
  int64_t a_panel_stride, a_panels;
  const void* b = nullptr;
  int64_t b_panel_stride = 0, b_panels = 0;
  int64_t k;
  float* c;
  int64_t c_stride;  // elements between rows
  Onto onto = Onto::nothing;
};
void multiply(const Engine&, const Product&);
// The same product, to the bit, with elements [row0, row0 + rows) x [0, columns) of `source` in
// place of `b`, for few A panels; k is `columns`, padded. Returns false without doing anything if
// the operands must be packed.
bool multiply_unpacked(const Engine&, const Source&, int64_t row0, int64_t rows, int64_t columns,
                       const Product&);

// For a block of f32 rows: to[r, j] = (overwrite ? 0 : to[r, j]) + scale * from[r, j].
void add_scaled(const float* from, int64_t from_stride, float scale, int64_t rows, int64_t columns,
                bool overwrite, float* to, int64_t to_stride);

// Whether this CPU and kernel allow AMX (gemm_amx.cpp).
bool amx_available();
void multiply_amx(const Product&);

}  // namespace logitless::cpu
