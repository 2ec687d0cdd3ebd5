// SPDX-License-Identifier: Apache-2.0
// An op is divided into chunks of tokens and windows of the vocabulary, with one buffer a role.
// This is pure host arithmetic on shapes and limits, the same for `workspace`, `run`, the command
// line and the page.
//   whole      the block holds every window of a chunk: three products with gradients
//   else       it holds one window, whose logits are made again once the row's sums are known: four
// A divergence of two heads holds every window of both.
#pragma once

#include <array>

#include "logitless/status.h"
#include "src/call.h"
#include "src/rounding.h"
#include "src/webgpu/device.h"

namespace logitless::webgpu {

// Each role has a buffer of its own, because one that a dispatch writes may not be bound twice in
// it.
enum class Role : uint32_t {
  params,        // holds the dispatches' uniforms
  zeros,         // stands for absent inputs
  spare,         // stands for an absent output
  scalars,       // holds the normalizer, the common factor and the sum of the class weights
  sums,          // holds sums of kValuesOfASum values
  more_sums,     // holds sums of as many of those
  vocab_weight,  // [vocab_total]  is there where the view itself cannot be bound
  bias,          // [V]  is there where the view itself cannot be bound
  rows,          // [chunk, kStateWords]  holds the state of every token
  extras,        // [chunk, kExtraWords]  holds what few calls ask for of a token
  counted,       // [4 + chunk]  lists which tokens count
  inputs,        // [chunk, 8]  holds what is given for a token
  losses,        // [chunk]
  partials,      // [chunk, slots, kSlotWords]  or, of shards, [chunk, kFoldWords]
  hidden,        // [chunk, D]  holds the rows of input that count, as f32
  grad_hidden,   // [chunk, D]
  ids,           // [chunk, K, 1 or 2]  holds the words of chosen columns' ids, then columns
  chosen,        // [chunk, K]  holds their logits, or their gradients
  slices,        // [slices, chunk, D]  holds grad_input's sums, each over a part of a window
  weight,        // [window, D]  is there where the view itself cannot be bound
  block,         // [windows, chunk, window]  holds logits, then their gradients
  grad_weight,   // [V, D]  holds the f32 sum, where the view itself cannot hold it
  grad_bias,     // [V]  holds the f32 sum, where the view itself cannot hold it
  // Divergences have these of the teacher, like those of the op's own head.
  teacher_rows,    // [chunk, kStateWords]
  teacher_extras,  // [chunk, kExtraWords]
  teacher_bias,    // [V]
  teacher_hidden,  // [chunk, Dt]
  teacher_block,   // [windows, chunk, window]
  count,
};
constexpr size_t kRoles = static_cast<size_t>(Role::count);

// This of a teacher decides the plan of a divergence.
struct TeacherProblem {
  bool is_there = false;  // it is not beside what is kept
  bool is_head = false;   // or it is logits
  int64_t hidden = 0;     // it has its own
  bool weight_bound = false, has_bias = false, bias_bound = false, temperatures = false;
  int64_t weight_row_bytes = 0;
};

// This of an op decides its plan.
struct Problem {
  int64_t tokens = 0, vocab = 0, vocab_total = 0, hidden = 0;
  bool linear = false, gradients = false, softmax = false, probabilities = false;
  bool state_given = false;   // row_reference and row_log_sum are given
  bool combines = false;      // the tokens' states come from shards of the vocabulary
  bool diverges = false;      // there are two heads
  bool hands_states = false;  // of a divergence, which are for shards
  int64_t chosen = 0;         // each token has so many chosen columns
  int64_t id_bytes = 0;       // an id of one has so many
  bool id_lists = false;      // they are lists, which are refused
  bool only_chosen = false;   // they alone have gradients, which is refused
  bool targets_only = false;  // it makes logits of targets and chosen columns, and no other
  bool lists = false;         // the largest logits are asked for, which is refused
  bool reads_kept = false;    // of a divergence, whose gradient Forward has kept
  TeacherProblem teacher;
  bool has_bias = false, bias_bound = false;
  bool has_vocab_weight = false, vocab_weight_bound = false, sums_vocab_weight = false;
  bool weight_bound = false;  // the kernels read the view itself
  int64_t weight_row_bytes = 0;
  // Forward writes the logits of so many columns to `kept`, and Backward reads them there
  int64_t kept_columns = 0;
  bool wants_grad_input = false, wants_grad_weight = false, wants_grad_bias = false;
  bool grad_weight_bound = false;
  int64_t grad_weight_row_bytes = 0;
  bool reduces = false;
  // The logits op works in the matrix of its result: in f32 rows, in place or after a copy.
  bool direct = false;
  bool rows_at_once = false;       // and a row is read once
  bool in_place = false;           // its logits are there already
  bool more_statistics = false;    // the call asks for statistics of `extras`
  bool temperatures = false;       // each token has its own
  bool ranks = false;              // it asks for rank or mass_above: the logits once more
  bool plain = false;              // the call asks for nothing that plain.wgsl has not
  int64_t token_stride_bytes = 0;  // two tokens of a tensor are at most so far apart
  bool extras() const { return more_statistics || temperatures; }
  // Returns whether the logits are needed after the row's sums are known.
  bool needs_logits_again() const { return gradients || softmax || ranks; }
  // Returns whether the logits of two heads are there at once.
  bool has_teacher() const { return diverges && !reads_kept; }
};
Problem problem_of(const Call& call);

// Returns how many columns `kept` has room for (kept.cpp), and the largest binding of it for so
// many tokens.
int64_t columns_kept(const Call& call);
uint64_t slab_binding_bytes(int64_t tokens);

// Kernels read and write these views as they are. A view without data is none of them, because any
// offset may come.
bool is_bound_matrix(const TensorView& view);
bool is_bound_vector(const TensorView& view);

struct Plan {
  int64_t chunk = 0, chunks = 0;  // a chunk has so many tokens; there are so many chunks
  int64_t window = 0,
          // Columns of one, which is a row's stride in the block; and how many there are.
      windows = 0;
  int64_t slots = 0;  // a row has so many, of 1024 columns each
  int64_t kept_columns = 0;
  bool whole = false;
  bool plain = false;                    // one kernel does everything, and there is no rows' state
  int64_t slices = 1;                    // a window is cut into so many for grad_input
  int products = 0;                      // so many products of N x V x D are made
  uint64_t window_bytes = 0;             // a window has so many in the block
  std::array<uint64_t, kRoles> bytes{};  // each role's buffer has so many
  uint64_t total = 0;
};

constexpr int64_t kSlotColumns = 1024;
constexpr int64_t kValuesOfASum = 1024;  // sum.wgsl and tokens.wgsl's count add so many

// Makes the plan of at most `budget` bytes that is predicted to be the fastest (cost.h), or the
// smallest one where that is too little.
Status make_plan(const Problem& problem, const Limits& limits, uint64_t budget, Plan* plan);
Status workspace_sizes(const Problem& problem, const Limits& limits, uint64_t* minimum,
                       uint64_t* recommended);

}  // namespace logitless::webgpu
