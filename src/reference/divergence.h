// SPDX-License-Identifier: Apache-2.0
// A token's divergence, its statistics and its gradient, from the rows of both heads ("Divergences
// of two heads" of docs/semantics.md).
#pragma once

#include "src/reference/statistics.h"

namespace logitless::reference {

// The teacher as a separate op, for make_row.
struct TeacherHead {
  explicit TeacherHead(const Call& call);
  Row row(const Token& token, int64_t i, const BoundModel& model, bool with_bounds) const;

 private:
  Call call_;
  bool state_given_;
  std::vector<double> weight_, bias_;  // [V, Dt] [V]
};

// D and the terms of its gradient, over the columns of the views.
struct DivergenceRow {
  Estimate divergence, acceptance, slope_sum;
  std::vector<Estimate> dz;  // [V]  of D alone
  bool undecided = false;    // an edge case: may or may not be infinite
};
// `slope_mean` is that of the whole vocabulary, as are the rows' states if it is given.
DivergenceRow divergence_row(const DivergenceOptions& options, const Row& student,
                             const Row& teacher, const double* slope_mean);

Estimate divergence_loss(const RowOf& student, const DivergenceRow& row);
RowGradient divergence_gradient(const Call& call, const Tokens& tokens, const Token& token,
                                const Row& student, const DivergenceRow& row);

}  // namespace logitless::reference
