// SPDX-License-Identifier: Apache-2.0
// The plan of an op: chunks of tokens, windows of the vocabulary, and one buffer per role. Only
// host arithmetic on shapes and limits, the same for `workspace`, `run`, the command line and the
// page.
//   whole      the block holds every window of a chunk: with gradients, three products
//   else       it holds one window; logits are computed again once the row's sums are known: four
// A divergence of two heads holds every window of both.
#pragma once

#include <array>

#include "logitless/status.h"
#include "src/call.h"
#include "src/rounding.h"
#include "src/webgpu/device.h"

namespace logitless::webgpu {

// Each role has its own buffer, because a dispatch may not bind a buffer that it writes twice.
enum class Role : uint32_t {
  params,        // uniforms of the dispatches
  zeros,         // bound for absent inputs
  spare,         // bound for an absent output
  scalars,       // the normalizer, the common factor, the sum of the class weights
  sums,          // sums of kValuesOfASum values each
  more_sums,     // sums of kValuesOfASum such sums each
  vocab_weight,  // [vocab_total]  a copy, if the view itself cannot be bound
  bias,          // [V]  a copy, if the view itself cannot be bound
  rows,          // [chunk, kStateWords]  the state of each token
  extras,        // [chunk, kExtraWords]  what few calls need
  counted,       // [4 + chunk]  the number of rows, then their tokens
  inputs,        // [chunk, 8]  inputs per token
  losses,        // [chunk]
  partials,      // [chunk, slots, kSlotWords]  or, for shards, [chunk, kFoldWords]
  hidden,        // [chunk, D]  the rows of input that count, as f32
  grad_hidden,   // [chunk, D]
  ids,           // [chunk, K, 1 or 2]  words of ids, then their columns
  chosen,        // [chunk, K]  logits of the chosen columns, or their gradients
  slices,        // [slices, chunk, D]  sums of grad_input, each over a part of a window
  weight,        // [window, D]  a copy, if the view itself cannot be bound
  block,         // [windows, chunk, window]  logits, then their gradients
  grad_weight,   // [V, D]  the f32 sum, if the view itself cannot hold it
  grad_bias,     // [V]  the f32 sum, if the view itself cannot hold it
  // The teacher's, in divergences.
  teacher_rows,    // [chunk, kStateWords]
  teacher_extras,  // [chunk, kExtraWords]
  teacher_bias,    // [V]
  teacher_hidden,  // [chunk, Dt]
  teacher_block,   // [windows, chunk, window]
  count,
};
constexpr size_t kRoles = static_cast<size_t>(Role::count);

// Properties of a divergence's teacher on which the plan depends.
struct TeacherProblem {
  bool is_there = false;  // false if kept state is read
  bool is_head = false;   // else its logits are given
  int64_t hidden = 0;
  bool weight_bound = false, has_bias = false, bias_bound = false, temperatures = false;
  int64_t weight_row_bytes = 0;
};

// Properties of an op on which the plan depends.
struct Problem {
  int64_t tokens = 0, vocab = 0, vocab_total = 0, hidden = 0;
  bool linear = false, gradients = false, softmax = false, probabilities = false;
  bool state_given = false;   // row_reference and row_log_sum are given
  bool combines = false;      // the tokens' states come from shards of the vocabulary
  bool diverges = false;      // a divergence, of two heads
  bool hands_states = false;  // a divergence that writes states or sums for shards: refused
  int64_t chosen = 0;         // chosen columns per token
  int64_t id_bytes = 0;       // bytes of a chosen column's id
  bool id_lists = false;      // ids are lists: refused
  bool only_chosen = false;   // only chosen columns have gradients: refused
  bool targets_only = false;  // no logits except of targets and chosen columns
  bool lists = false;         // the largest logits are requested: refused
  bool reads_kept = false;    // a divergence whose gradient Forward kept
  TeacherProblem teacher;
  bool has_bias = false, bias_bound = false;
  bool has_vocab_weight = false, vocab_weight_bound = false, sums_vocab_weight = false;
  bool weight_bound = false;  // the kernels read the view itself
  int64_t weight_row_bytes = 0;
  int64_t kept_columns = 0;  // columns that `kept` holds
  bool wants_grad_input = false, wants_grad_weight = false, wants_grad_bias = false;
  bool grad_weight_bound = false;
  int64_t grad_weight_row_bytes = 0;
  bool reduces = false;
  // An op on given logits works in its result's memory: in f32 rows, in place or after a copy.
  bool direct = false;
  bool rows_at_once = false;       // `direct`, and each row is read once
  bool in_place = false;           // the result's matrix holds the logits already
  bool more_statistics = false;    // statistics of `extras` are requested
  bool temperatures = false;       // per token
  bool ranks = false;              // rank or mass_above, which read the logits again
  bool plain = false;              // plain.wgsl serves the whole call
  int64_t token_stride_bytes = 0;  // the largest of any tensor
  bool extras() const { return more_statistics || temperatures; }
  // Whether the logits are needed after the row's sums are known.
  bool needs_logits_again() const { return gradients || softmax || ranks; }
  // Whether the logits of two heads are in memory at once.
  bool has_teacher() const { return diverges && !reads_kept; }
};
Problem problem_of(const Call& call);

// The number of columns that `kept` has room for (kept.cpp), and the largest binding of a slab for
// a chunk of `tokens` tokens.
int64_t columns_kept(const Call& call);
uint64_t slab_binding_bytes(int64_t tokens);

// Whether kernels can read and write the view itself. False if it has no data yet, because its
// offset is unknown.
bool is_bound_matrix(const TensorView& view);
bool is_bound_vector(const TensorView& view);

struct Plan {
  int64_t chunk = 0, chunks = 0;    // tokens of a chunk, and the number of chunks
  int64_t window = 0, windows = 0;  // columns per window (a row's stride); number of windows
  int64_t slots = 0;                // per row, of 1024 columns each; 2 in Combine
  int64_t kept_columns = 0;
  bool whole = false;
  bool plain = false;         // one kernel does everything, without the rows' state
  int64_t slices = 1;         // per window, for grad_input
  int products = 0;           // of N x V x D each
  uint64_t window_bytes = 0;  // per window in the block
  std::array<uint64_t, kRoles> bytes{};
  uint64_t total = 0;
};

constexpr int64_t kSlotColumns = 1024;
constexpr int64_t kValuesOfASum = 1024;  // in sum.wgsl and tokens.wgsl's count

// Returns the plan within `budget` bytes that is predicted to be the fastest (cost.h), or the
// smallest plan if none fits.
Status make_plan(const Problem& problem, const Limits& limits, uint64_t budget, Plan* plan);
Status workspace_sizes(const Problem& problem, const Limits& limits, uint64_t* minimum,
                       uint64_t* recommended);

}  // namespace logitless::webgpu
