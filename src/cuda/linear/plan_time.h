// SPDX-License-Identifier: Apache-2.0
// What the cost models of every engine share: seconds on a device, from its measured speed.
#pragma once

#include "src/cuda/linear/plan.h"

namespace logitless::cuda {

// cost(size) of every piece of `total`: whole ones and what is left.
template <class F>
double in_pieces(int64_t total, int64_t piece, F&& cost) {
  const int64_t left = total % piece;
  return static_cast<double>(total / piece) * cost(piece) + (left > 0 ? cost(left) : 0);
}

// A call's seconds under a plan whose sizes are all chosen: chunk_time(tokens) of every chunk, and
// what is done once.
template <class F>
double predicted_time(const LinearShape& s, const LinearPlan& p, const DeviceSpeed& speed,
                      F&& chunk_time) {
  const int64_t last = std::max<int64_t>(s.tokens, 1) - (p.chunks - 1) * p.token_chunk;
  double time = chunk_time(p.chunks > 1 ? p.token_chunk : last) *
                static_cast<double>(std::max<int64_t>(p.chunks - 1, 1));
  if (p.chunks > 1) time += chunk_time(last);
  time += 30 * speed.launch;
  // Rows that are copied one by one where not all tokens count take half as long again.
  if (!p.copies_input) time += 1e-6;
  const double outputs = static_cast<double>(s.rows_of_weight()) * static_cast<double>(s.hidden);
  if (p.grad_weight_sum) time += outputs * 6 / speed.memory;
  if (s.copies_weight) time += outputs * 2 * static_cast<double>(size_of(s.dtype)) / speed.memory;
  return time;
}

// Whether rows of grad_weight are added to what is there.
inline bool adds_to_weight(const LinearShape& s, const LinearPlan& p) {
  return p.grad_weight_sum || (s.grad_weight_f32 && p.chunks > 1);
}

}  // namespace logitless::cuda
