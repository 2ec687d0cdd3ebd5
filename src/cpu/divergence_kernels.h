// SPDX-License-Identifier: Apache-2.0
// Vector kernels over a block of one row of both heads' logits, f32 in memory, compiled for each
// instruction set.
#pragma once

#include <cstdint>

#include "logitless/ops.h"
#include "src/row/map.h"

namespace logitless::cpu {

// Both heads' row states, and what the gradient needs of the row's sums.
struct DivergenceRow {
  // p = exp((z - reference) - log_sum); q likewise, of the teacher's.
  float reference = 0, log_sum = 0;
  float teacher_reference = 0, teacher_log_sum = 0;
  float apart = 0;  // lse of the student minus lse of the teacher
  float mean = 0;   // sum_k p_k f_k, NaN if infinite; 0 or NaN for forward_kl
};

// A call's divergence and its constants.
struct DivergenceTerms {
  DivergenceKind kind;  // as effective_kind() returns it
  float beta, rest;     // rest = 1 - beta
  float label_weight;
};

struct DivergenceSums {
  float value = 0, mean = 0, acceptance = 0;
};
struct DivergenceWants {
  bool value = false, mean = false, acceptance = false;
};

// Returns the wanted sums over a block, in an order set by count and the vectors' length. With NaN
// in the row, a sum may or may not be NaN.
DivergenceSums divergence_block(const DivergenceTerms& terms, const DivergenceRow& row,
                                const float* z, const float* t, int64_t count,
                                DivergenceWants wants);

// Factors of a row's gradient: `steep`, a power of two, is applied before anything is rounded,
// `last` after that.
struct DivergenceScale {
  float steep = 1, last = 1;
};

// draw[j] = dz_j dz/draw of the student for j in [0, count), times the scale. Includes label_weight
// p_j, and at the target, if it is in [0, count), the whole of the label's term.
void divergence_gradient(const DivergenceTerms& terms, const DivergenceRow& row,
                         const LogitMap& map, DivergenceScale scale, const float* z, const float* t,
                         int64_t count, int64_t target, float* draw);

}  // namespace logitless::cpu
