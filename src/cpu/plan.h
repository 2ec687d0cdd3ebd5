// SPDX-License-Identifier: Apache-2.0
// How a linear op runs on the CPU, decided from the shape and the bytes of workspace alone:
// `logitless plan` prints a plan and tests check it without running anything.
//
// Tokens pass in chunks. Each chunk multiplies tiles of 192 columns, takes maximum, exp and sum on
// the hot tile, and in a stored plan writes the logits to the workspace; then it makes G from the
// stored logits, or from a second product (recompute plan), and both gradient products. What sets
// the bits - chunk, slots, stored or recomputed - never depends on the number of threads, which
// only add scratch ("lanes"). Every plan is weighed with a fixed number of lanes, so that a larger
// chunk does not leave threads idle.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "src/call.h"
#include "src/cpu/gemm.h"

namespace logitless::cpu {

// Panels of the hidden axis in a gradient product at a time: 128 columns, so that the weight and
// its gradient are touched in runs of 256 bytes or more.
inline constexpr int64_t panel_group = 4;

// Tokens whose targets' logits are made together, a multiple of every engine's token_multiple.
inline constexpr int64_t target_group = 32;

struct LinearShape {
  int64_t tokens = 0, vocab = 0, hidden = 0;
  int64_t teacher_hidden = 0;  // 0 where the teacher is no head
  DType dtype = DType::f32;
  bool diverges = false;  // logits of two heads
  bool forward = true;    // compute lse; false only where Backward is given the row state
  bool grad_input = false;
  bool grad_weight = false;
  bool grad_bias = false;
  bool direct_grad_weight =
      true;  // f32 with unit column stride, so that sums can be formed in the output itself
  bool bias = false;
  bool class_weight = false;
  // Columns, from the first, whose state an earlier Forward kept for the gradients.
  int64_t kept = 0;
  bool places = false;  // kept rows have places: Tokens::place
  SumSet sums{};        // the row's sums that are asked for
  // The number of chosen columns of each token, or of all tokens' lists.
  int64_t chosen = 0, chosen_of_lists = 0;
  int64_t listed = 0;  // length of a token's list of largest logits
  // for tests, another CPU's; else choose_engine(dtype)
  std::optional<Engine> engine{};
  bool all_kept() const { return kept > 0 && kept == vocab; }
  // Whether a product makes logits. In 16 bits it does even if all is kept, because a row may lie
  // too far for its kept state and is made again; the kept state of two heads is always enough.
  bool makes_logits() const { return forward || !all_kept() || (dtype != DType::f32 && !diverges); }
  bool chooses() const { return chosen > 0 || chosen_of_lists > 0; }
  bool gradients() const { return grad_input || grad_weight || grad_bias; }
};

struct LinearPlan {
  Engine engine{};
  int64_t token_chunk = 0;  // tokens of a chunk, a multiple of engine.token_multiple()
  int64_t chunks = 0;
  int64_t vocab_tiles = 0;
  // Partial sums of grad_input, each over its own range of the vocabulary.
  int64_t slots = 0;
  // Columns of the weight (along the hidden axis) that are packed at a time.
  int64_t depth_block = 0;
  bool stored = false;      // logits of a chunk are kept, not made again
  bool weight_sum = false;  // an f32 sum of grad_weight is in the workspace
  int64_t lanes = 0;        // threads that have scratch
  // expected time; 1 is three products of tokens that share one chunk
  double cost = 0;
  int64_t padded_hidden_a = 0;  // the depth of the logits product
  int64_t padded_hidden_b = 0;  // the columns of the gradient products, in whole panels
  int64_t padded_teacher = 0;   // the depth of the teacher's logits product

  // Byte offsets into the workspace, in order, all multiples of 64.
  uint64_t tokens_at = 0, states_at = 0, gradients_at = 0, blocks_at = 0, logits_at = 0,
           input_along_at = 0, input_across_at = 0, slots_at = 0, weight_sum_at = 0,
           bias_sum_at = 0, rare_at = 0, rare_blocks_at = 0, chosen_at = 0, lanes_at = 0;
  // With two heads the teacher's logits and blocks follow the student's.
  uint64_t teacher_along_at = 0, losses_at = 0, sums_at = 0;
  uint64_t lane_bytes = 0;
  uint64_t bytes = 0;  // of the whole workspace, with `lanes` lanes

  // Byte offsets into a lane's scratch.
  uint64_t weight_block_at = 0, tile_at = 0, along_vocab_at = 0, along_tokens_at = 0,
           weight_panels_at = 0, product_at = 0, rows_at = 0, bias_at = 0, class_weight_at = 0,
           listed_at = 0;
};

// Columns of the vocabulary that a call keeps, or reads because its Forward kept them: a multiple
// of vocab_tile, or all.
int64_t columns_kept(const Call& call);

LinearShape shape_of(const Call& call);

// The most tasks that a slot of the gradient pass is divided into, along the hidden panels.
inline int64_t most_gradient_parts(int64_t panels) { return std::max<int64_t>(panels / 4, 1); }

// Returns the plan for a workspace of `bytes`: the default plan if it fits, else the least costly
// one that does; the smallest for 0 bytes.
LinearPlan plan_linear(const LinearShape& shape, uint64_t bytes, int64_t threads);

// Returns the default plan with a lane for each of `threads`, at least eight, that it has work for:
// so its size is the same for any number of threads up to eight.
LinearPlan recommended_plan(const LinearShape& shape, int64_t threads);

}  // namespace logitless::cpu
