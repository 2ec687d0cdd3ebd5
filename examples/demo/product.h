// SPDX-License-Identifier: Apache-2.0
// The three f32 products of a linear layer y = x W^T, on the library's packed kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "src/cpu/gemm.h"

namespace logitless::cli::demo {

// A dense row-major matrix of memory that it does not own.
template <class T>
struct Matrix {
  T* data;
  int64_t rows, columns;
};

class Products {
 public:
  // Computes y = x W^T, or y += x W^T, with x [N, I], W [O, I] and y [N, O].
  void forward(Matrix<const float> x, Matrix<const float> w, bool add, Matrix<float> y);
  // Computes grad_x = grad_y W.
  void input_gradient(Matrix<const float> grad_y, Matrix<const float> w, Matrix<float> grad_x);
  // Computes grad_W = grad_y^T x.
  void weight_gradient(Matrix<const float> grad_y, Matrix<const float> x, Matrix<float> grad_w);

 private:
  // Computes c[rows, columns] (+)= sum over depth of a[row, k] b[column, k]; b's panels are in
  // packed_.
  void multiply(const cpu::Source& a, int64_t depth, bool add, Matrix<float> c);
  void pack(const cpu::Source& b, bool along_rows, int64_t columns, int64_t depth);

  std::vector<float> packed_;   // B panels
  std::vector<float> scratch_;  // every thread has one A block and one tile of c
};

}  // namespace logitless::cli::demo
