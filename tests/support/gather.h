// SPDX-License-Identifier: Apache-2.0
// Makes an op from some of another op's tokens, in any order, in its own memory.
#pragma once

#include <string_view>
#include <vector>

#include "problem.h"

namespace logitless::conformance {

// Whether the field's first dimension is tokens.
template <class Op>
bool per_token(const Op& op, std::string_view name) {
  for (const std::string_view other :
       {"weight", "bias", "vocab_weight", "normalizer", "grad_weight", "grad_bias", "fault",
        "teacher_weight", "teacher_bias"}) {
    if (name == other) return false;
  }
  if constexpr (LossOp<Op>) {
    if (name == "loss" || name == "grad_loss") return op.options.reduction == Reduction::none;
  }
  return true;
}

inline std::vector<double> gather_rows(const std::vector<double>& values, int64_t columns,
                                       const std::vector<int64_t>& rows) {
  std::vector<double> gathered;
  for (const int64_t row : rows) {
    gathered.insert(gathered.end(), values.begin() + row * columns,
                    values.begin() + (row + 1) * columns);
  }
  return gathered;
}

// Row k of the result is row rows[k] of `p`, which must not be in place.
template <class Op>
Problem<Op> gather(const Problem<Op>& p, const std::vector<int64_t>& rows) {
  Problem<Op> out{.op = p.op, .pool = {}, .model = p.model};
  logitless_op unused{};
  for_each_tensor(out.op, unused, [&](const char* name, Access access, TensorView& view, auto&&) {
    if (!view) return;
    std::vector<int64_t> shape(view.shape.begin(), view.shape.begin() + view.rank);
    const bool token = per_token(p.op, name);
    if (token) shape[0] = static_cast<int64_t>(rows.size());
    if (access == Access::write) {
      view = out.pool.reserve(view.dtype, shape);
      return;
    }
    const std::vector<double> values = read(view);
    const int64_t columns = view.rank == 2 ? view.shape[1] : 1;
    view = out.pool.add(view.dtype, shape, token ? gather_rows(values, columns, rows) : values);
  });
  return out;
}

}  // namespace logitless::conformance
