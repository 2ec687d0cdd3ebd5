// SPDX-License-Identifier: Apache-2.0
// How an op is divided: chunks of tokens, windows of the vocabulary, one buffer
// a role. Pure host arithmetic on shapes and limits, the same for `workspace`,
// `run`, the command line and the page.
//   whole   the block holds every window of a chunk: three products with
//   gradients else    one window: its logits are made again once the row's sums
//   are known: four
#pragma once

#include <array>

#include "logitless/status.h"
#include "src/call.h"
#include "src/rounding.h"
#include "src/webgpu/device.h"

namespace logitless::webgpu {

// A buffer each: one that a dispatch writes may not be bound twice in it.
enum class Role : uint32_t {
  params,        // the dispatches' uniforms
  zeros,         // stands for absent inputs
  spare,         // and for an absent output
  scalars,       // normalizer, common factor, sum of the class weights
  sums,          // sums of kValuesOfASum,
  more_sums,     // and of as many of those
  vocab_weight,  // [vocab_total]              where the view itself cannot be
                 // bound
  bias,          // [V]                        likewise
  rows,          // [chunk, kStateWords]       state of every token
  extras,        // [chunk, kExtraWords]       what few calls ask for of a token
  counted,       // [4 + chunk]                which tokens count
  inputs,        // [chunk, 8]                 what is given for a token
  losses,        // [chunk]
  partials,      // [chunk, slots, kSlotWords]
  hidden,        // [chunk, D]                 rows of input that count, as f32
  grad_hidden,   // [chunk, D]
  slices,        // [slices, chunk, D]       of grad_hidden, of a window each
  weight,        // [window, D]                where the view itself cannot be bound
  block,         // [windows, chunk, window]   logits, then their gradients
  grad_weight,   // [V, D]                     f32 sum, where the view itself
                 // cannot hold it
  grad_bias,     // [V]                        likewise
  count,
};
constexpr size_t kRoles = static_cast<size_t>(Role::count);

// Holds what of an op decides its plan.
struct Problem {
  int64_t tokens = 0, vocab = 0, vocab_total = 0, hidden = 0;
  bool linear = false, gradients = false, softmax = false, probabilities = false;
  bool state_given = false;  // row_reference and row_log_sum
  bool has_bias = false, bias_bound = false;
  bool has_vocab_weight = false, vocab_weight_bound = false, sums_vocab_weight = false;
  bool weight_bound = false;  // the kernels read the view itself
  int64_t weight_row_bytes = 0;
  int64_t kept_columns = 0;  // whose logits Forward writes to `kept` and Backward reads there
  bool wants_grad_input = false, wants_grad_weight = false, wants_grad_bias = false;
  bool grad_weight_bound = false;
  int64_t grad_weight_row_bytes = 0;
  bool reduces = false;
  // The logits op works in the matrix of its result: f32 rows, in place or
  // after a copy.
  bool direct = false;
  bool rows_at_once = false;       // and a row is read once
  bool in_place = false;           // its logits are there already
  bool more_statistics = false;    // asks for those of `extras`
  bool temperatures = false;       // one of each token
  bool ranks = false;              // and for one that takes the logits once more
  bool plain = false;              // and the call asks for nothing that plain.wgsl has not
  int64_t token_stride_bytes = 0;  // the largest distance of two tokens in a tensor
  bool extras() const { return more_statistics || temperatures; }
  // After the row's sums are known.
  bool needs_logits_again() const { return gradients || softmax || ranks; }
};
Problem problem_of(const Call& call);

// What there is room for in `kept` (kept.cpp), and the largest binding of it for so many tokens.
int64_t columns_kept(const Call& call);
uint64_t slab_binding_bytes(int64_t tokens);

// The views that kernels read and write as they are; without data, none: any
// offset may come.
bool is_bound_matrix(const TensorView& view);
bool is_bound_vector(const TensorView& view);

struct Plan {
  int64_t chunk = 0, chunks = 0;  // tokens of one; how many
  int64_t window = 0,
          windows = 0;  // columns of one, a row's stride in the block; how many
  int64_t slots = 0;    // of 1024 columns, of a row
  int64_t kept_columns = 0;
  bool whole = false;
  bool plain = false;                    // one kernel, and none of the rows' state
  int64_t slices = 1;                    // of a window, for grad_input
  int products = 0;                      // of N x V x D
  uint64_t window_bytes = 0;             // of a window in the block
  std::array<uint64_t, kRoles> bytes{};  // a role's buffer
  uint64_t total = 0;
};

constexpr int64_t kSlotColumns = 1024;
constexpr uint32_t kStateWords = 16, kSlotWords = 8, kExtraWords = 6;  // of the shaders' structs
constexpr int64_t kValuesOfASum = 1024;  // as in sum.wgsl, and in tokens.wgsl's count

// The plan of at most `budget` bytes that is predicted to be the fastest (cost.h), or the smallest
// one where that is too little.
Status make_plan(const Problem& problem, const Limits& limits, uint64_t budget, Plan* plan);
Status workspace_sizes(const Problem& problem, const Limits& limits, uint64_t* minimum,
                       uint64_t* recommended);

}  // namespace logitless::webgpu
