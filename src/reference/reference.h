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

// How the judged backend adds, which sets gamma(K) of the contract.
struct BoundModel {
  bool tensor_cores = false;  // gamma is then u32 (4 + K/16) instead of u32 (4 + sqrt K)
  bool tf32 = false;  // products of f32 keep 10 bits of both operands: gamma grows by 2 2^-10
  // Rows are constant, repeated or of one sign: where K/4 is more, it replaces sqrt K or K/16.
  bool structured = false;
};

struct Output {
  std::vector<double>
      value;  // dense, row-major, in the view's shape; NaN and inf are as the contract says
  std::vector<double>
      bound;  // the absolute error allowed, with the final rounding to the view's dtype
  // argmax, rank and top_ids have no bound; `accepted` lists what may be returned in place of
  // value[i].
  std::vector<std::vector<int64_t>> accepted;
};

struct Result {
  Status status;  // target_out_of_range where run() would say so
  // The outputs that the op asks for, by the names of for_each_tensor. Looking one up must not
  // allocate: once the first output is written nothing may fail.
  std::map<std::string, Output, std::less<>> outputs;
  int32_t fault = 0;  // or-ed into the op's fault word
  // row_reference may be near the maximum; row_log_sum is then the rest of lse
  bool anchored = false;
  // A divergence may be infinite or not (the edge at 2^-126): it cannot be compared.
  bool undecided = false;
};

// Evaluates a validated op on host memory. Reads the op's inputs (and, accumulating, its outputs'
// old contents) and writes nothing. with_bounds = false skips the sums of magnitudes.
Result evaluate(const Call& call, const BoundModel& model = {}, bool with_bounds = true);

}  // namespace logitless::reference
