// SPDX-License-Identifier: Apache-2.0
// How a linear op runs on the CPU, decided from the shape, the engine and the bytes of workspace:
// `logitless plan` prints a plan and tests check it without running anything.
//
// Tokens pass in chunks. Each chunk multiplies tiles of 192 columns, computes maximum, exp and sum
// while the tile is in the cache, and in a stored plan writes the logits to the workspace. Then it
// computes dz from the stored logits, or from a second product (recompute plan), and both gradient
// products. What decides the bits (chunk, slots, stored or recomputed) never depends on the number
// of threads; more threads only need more scratch ("lanes"). A plan's cost is estimated as a
// geometric mean over 1 to 8 threads, so that a larger chunk does not leave threads idle.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "src/call.h"
#include "src/cpu/gemm.h"

namespace logitless::cpu {

// Panels of the hidden axis per gradient product: 128 columns with AVX-512 and AMX, so that the
// weight and its gradient are accessed in runs of 256 bytes or more. With shorter vectors panels
// are narrower (gemm_tile-inl.h).
inline constexpr int64_t panel_group = 4;

// Tokens whose target logits are computed together, a multiple of every engine's token_multiple.
inline constexpr int64_t target_group = 32;

struct LinearShape {
  int64_t tokens = 0, vocab = 0, hidden = 0;
  int64_t teacher_hidden = 0;  // 0 if there is no teacher's head
  DType dtype = DType::f32;
  bool diverges = false;  // logits of two heads
  bool forward = true;    // compute lse; false where Backward is given state
  bool grad_input = false;
  bool grad_weight = false;
  bool grad_bias = false;
  bool direct_grad_weight = true;  // f32 with unit column stride: sums can be formed in place
  bool bias = false;
  bool class_weight = false;
  // Columns, from the first, whose state an earlier Forward kept.
  int64_t kept = 0;
  bool places = false;  // kept rows are found by Tokens::place
  SumSet sums{};        // the requested sums of the row
  // The number of chosen columns per token, or of all tokens' lists together.
  int64_t chosen = 0, chosen_of_lists = 0;
  int64_t listed = 0;  // k of top-k
  // another CPU's engine, for tests; else choose_engine(dtype)
  std::optional<Engine> engine{};
  bool all_kept() const { return kept > 0 && kept == vocab; }
  // Whether a product computes logits. In 16 bits it does even if all columns are kept, because a
  // row may be out of the kept values' range and is computed again. Kept state of two heads is
  // always enough.
  bool makes_logits() const { return forward || !all_kept() || (dtype != DType::f32 && !diverges); }
  bool chooses() const { return chosen > 0 || chosen_of_lists > 0; }
  bool gradients() const { return grad_input || grad_weight || grad_bias; }
};

struct LinearPlan {
  Engine engine{};
  int64_t token_chunk = 0;  // tokens of a chunk, a multiple of engine.token_multiple()
  int64_t chunks = 0;
  int64_t vocab_tiles = 0;
  // The number of partial sums of grad_input, each over its own range of the vocabulary.
  int64_t slots = 0;
  // Columns of the weight (along the hidden axis) packed at a time.
  int64_t depth_block = 0;
  bool stored = false;      // a chunk's logits are stored, not computed again
  bool weight_sum = false;  // an f32 sum of grad_weight is in the workspace
  int64_t lanes = 0;        // threads that have scratch
  // expected time; 1 is that of three products of tokens in a single chunk
  double cost = 0;
  int64_t padded_hidden_a = 0;  // the depth of the logits product
  int64_t padded_hidden_b = 0;  // the columns of the gradient products, in whole panels
  int64_t padded_teacher = 0;   // the depth of the teacher's logits product

  // Byte offsets into the workspace, all multiples of 64.
  uint64_t tokens_at = 0, states_at = 0, gradients_at = 0, blocks_at = 0, logits_at = 0,
           input_along_at = 0, input_across_at = 0, slots_at = 0, weight_sum_at = 0,
           bias_sum_at = 0, rare_at = 0, rare_blocks_at = 0, chosen_at = 0, lanes_at = 0;
  // With two heads the teacher's logits and blocks follow the student's.
  uint64_t teacher_along_at = 0, losses_at = 0, sums_at = 0;
  uint64_t lane_bytes = 0;
  uint64_t bytes = 0;  // the whole workspace, with `lanes` lanes

  // Byte offsets into a lane's scratch.
  uint64_t weight_block_at = 0, tile_at = 0, along_vocab_at = 0, along_tokens_at = 0,
           weight_panels_at = 0, product_at = 0, rows_at = 0, bias_at = 0, class_weight_at = 0,
           listed_at = 0;
};

// Columns of the vocabulary that a Forward keeps, or that a Backward reads: a multiple of
// vocab_tile, or all.
int64_t columns_kept(const Call& call);

LinearShape shape_of(const Call& call);

// The most tasks into which a slot of the gradient pass is divided, along the hidden panels.
inline int64_t most_gradient_parts(int64_t panels) { return std::max<int64_t>(panels / 4, 1); }

// Returns the plan for a workspace of `bytes`: the default plan if it fits, else the cheapest one
// that fits, else the smallest.
LinearPlan plan_linear(const LinearShape& shape, uint64_t bytes, int64_t threads);

// Returns the default plan with a lane for each of `threads`, and for at least eight, as far as it
// has work for them. So its size is the same for up to eight threads.
LinearPlan recommended_plan(const LinearShape& shape, int64_t threads);

}  // namespace logitless::cpu
