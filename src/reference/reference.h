// SPDX-License-Identifier: Apache-2.0
// The reference: every op in double with plain loops, written from docs/semantics.md alone. It
// shares no arithmetic with the other backends, and bounds the error of every element for an f32
// implementation ("Accuracy" of that document).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "src/call.h"

namespace logitless::reference {

// How the tested backend adds, which sets gamma(K) of the contract.
struct BoundModel {
  bool tensor_cores = false;  // gamma is then u32 (4 + K/16) instead of u32 (4 + sqrt K)
  bool tf32 = false;          // f32 operands are rounded to 10 bits: gamma grows by 2 2^-10
  // Rows are constant, repeated or of one sign: if K/4 is larger, it replaces sqrt K or K/16.
  bool structured = false;
};

struct Output {
  std::vector<double> value;  // dense, row-major, in the view's shape
  std::vector<double> bound;  // the absolute error allowed, including the final rounding
  // argmax, rank and top_ids have no bound; accepted[i] lists all values that element i may
  // have.
  std::vector<std::vector<int64_t>> accepted;
};

struct Result {
  Status status;  // target_out_of_range if run() would return it
  // The outputs that the op asks for, by their names in for_each_tensor. Looking one up must not
  // allocate: once the first output is written nothing may fail.
  std::map<std::string, Output, std::less<>> outputs;
  int32_t fault = 0;  // or-ed into the op's fault word
  // Set by tests: row_reference need only be near the maximum, and row_log_sum is lse minus it.
  bool anchored = false;
  // It may or may not be infinite (an edge case at 2^-126), so a divergence cannot be compared.
  bool undecided = false;
};

// Evaluates a validated op on host memory. Reads the op's inputs (and, accumulating, its outputs'
// old contents) and writes nothing. with_bounds = false skips the sums of magnitudes.
Result evaluate(const Call& call, const BoundModel& model = {}, bool with_bounds = true);

}  // namespace logitless::reference
