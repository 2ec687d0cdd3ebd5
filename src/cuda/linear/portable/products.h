// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's products of a head: the logits, and both gradients of a panel of E or dz.
#pragma once

#include "src/cuda/linear/linear.h"

namespace logitless::cuda {

class HeadProducts {
 public:
  explicit HeadProducts(const LinearWork& work) : work_(work) {}

  // Raw logits of the chunk's rows [row, row + rows) and columns [column, column + columns),
  // written to `to` with rows `pitch` apart. The largest product of the call has most_rows and
  // most_columns.
  struct Logits {
    int64_t row = 0, rows = 0, column = 0, columns = 0;
    int64_t most_rows = 0, most_columns = 0;
    float* to = nullptr;
    int64_t pitch = 0;
  };
  void logits(const Logits& block) const;

  // sums [rows, hidden_pitch] (+)= panel rows . weight rows.
  void grad_input(const Panel& panel, int64_t row, int64_t rows, float* sums, bool add) const;
  // Computes rows of grad_weight from panel columns and `factor_rows`: the input times v for E, the
  // input for dz.
  void grad_weight(const Panel& panel, const char* factor_rows, bool adds) const;

 private:
  const float* zero() const { return &work_.m.tokens.scalars->zero; }
  const float* one() const { return &work_.m.tokens.scalars->one; }
  // The depth of the logits' product and the columns of grad_input's: D, and the zeros after it if
  // the weight is a padded copy.
  int64_t depth() const;
  void multiply(Product* p, const float* alpha, bool add) const;

  const LinearWork& work_;
};

}  // namespace logitless::cuda
