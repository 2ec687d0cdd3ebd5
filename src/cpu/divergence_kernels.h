// SPDX-License-Identifier: Apache-2.0
// Vector kernels over a block of one row of both heads' logits, f32 in memory, one per instruction
// set: the formulas of src/row/divergence.h, of which each column costs one expm1 and at most one
// logarithm.
#pragma once

#include <cstdint>

#include "logitless/ops.h"
#include "src/row/map.h"

namespace logitless::cpu {

// What both heads' rows are once their sums are known.
struct DivergenceRow {
  // With these p = exp((z - reference) - log_sum); q likewise, of the teacher's.
  float reference = 0, log_sum = 0;
  float teacher_reference = 0, teacher_log_sum = 0;
  float apart = 0;  // it is lse_z - lse_t, formed of the rows' two numbers each
  float mean = 0;   // it is sum_k p_k f_k, NaN where that is infinite; 0 or NaN for forward_kl
};

// The divergence of a call, with what its columns need of beta.
struct DivergenceTerms {
  DivergenceKind kind;  // of effective_kind()
  float beta, rest;     // the rest is 1 - beta
  float label_weight;
};

struct DivergenceSums {
  float value = 0, mean = 0, acceptance = 0;
};
struct DivergenceWants {
  bool value = false, mean = false, acceptance = false;
};

// Returns the sums over a block that are wanted, formed in one order that depends on count alone; a
// sum may be NaN or not where a row's is.
DivergenceSums divergence_block(const DivergenceTerms& terms, const DivergenceRow& row,
                                const float* z, const float* t, int64_t count,
                                DivergenceWants wants);

// What a row's gradient is multiplied with: `steep`, a power of two, before anything is rounded,
// and `last` after all is.
struct DivergenceScale {
  float steep = 1, last = 1;
};

// Makes draw[j] = dz_j dz/draw of the student for j in [0, count), times the scale. Of the label's
// term label_weight p_j is in it, and at the target, if target is in [0, count), the whole of it.
void divergence_gradient(const DivergenceTerms& terms, const DivergenceRow& row,
                         const LogitMap& map, DivergenceScale scale, const float* z, const float* t,
                         int64_t count, int64_t target, float* draw);

}  // namespace logitless::cpu
