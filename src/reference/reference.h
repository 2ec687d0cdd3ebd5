// SPDX-License-Identifier: Apache-2.0
// The oracle: every op in double with plain loops, written from docs/semantics.md alone. It shares
// no code with what it judges, and says for every element how far an honest implementation may be
// from it ("Accuracy" of that document).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "src/call.h"

namespace logitless::reference {

// Says how the judged backend adds, which sets gamma(K) of the contract.
struct BoundModel {
  bool tensor_cores = false;  // gamma = u32 (4 + K/16) instead of u32 (4 + sqrt K)
  bool tf32 = false;          // products of f32 keep 10 bits of both operands: gamma + 2 2^-10
  bool structured = false;    // constant, repeated, one-signed rows: K/4, not sqrt K
};

struct Output {
  std::vector<double>
      value;  // dense, row-major, in the view's shape; NaN and inf as the contract says
  std::vector<double>
      bound;  // allowed absolute error, the final rounding to the view's dtype included
  // argmax, rank: bound[i] is unused; `accepted` says for every token what may be named.
  std::vector<std::vector<int64_t>> accepted;
};

struct Result {
  Status status;  // target_out_of_range, as run() would say
  // By the names of for_each_tensor, those the op asks for. To find one allocates nothing: once the
  // first output is written, nothing may fail.
  std::map<std::string, Output, std::less<>> outputs;
  int32_t fault = 0;      // what is or-ed into the op's fault word
  bool anchored = false;  // row_reference may be near the maximum, and row_log_sum is the rest
};

// Evaluates a validated op on host memory. Reads the op's inputs (and, accumulating, its outputs'
// old contents), writes nothing. with_bounds = false skips the magnitude sums.
Result evaluate(const Call& call, const BoundModel& model = {}, bool with_bounds = true);

}  // namespace logitless::reference
