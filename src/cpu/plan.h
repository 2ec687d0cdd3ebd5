// SPDX-License-Identifier: Apache-2.0
// A plan says how a linear cross-entropy runs on the CPU. It is pure host arithmetic on the shape
// and the workspace, which `logitless plan` prints and tests check without running anything.
//
// Tokens pass in chunks. Each chunk makes a product tile of 192 columns, takes maximum, exp and sum
// on the hot tile, and in a stored plan writes the logits to the workspace; then it makes G from
// the stored logits, or from a second product (recompute plan), and both gradient products. The
// division of work that sets the bits - chunk, slots, stored or recomputed - depends on the shape
// and the workspace, never on the number of threads, which only add scratch ("lanes"). So that no
// thread idles for a larger chunk's sake, a plan is weighed together with a fixed number of lanes,
// whoever runs it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "src/call.h"
#include "src/cpu/gemm.h"

namespace logitless::cpu {

// A gradient product takes so many panels of the hidden axis at a time: 128 columns, so that the
// weight and its gradient are touched in runs of 256 bytes or more.
inline constexpr int64_t panel_group = 4;

// The targets' logits of so many tokens are made together, a multiple of every engine's
// token_multiple.
inline constexpr int64_t target_group = 32;

struct LinearShape {
  int64_t tokens = 0, vocab = 0, hidden = 0;
  int64_t teacher_hidden = 0;  // 0 where no head makes a teacher's logits
  DType dtype = DType::f32;
  bool diverges = false;  // there are logits of two heads
  bool forward = true;    // lse is computed; false only where Backward was given the row state
  bool grad_input = false;
  bool grad_weight = false;
  bool grad_bias = false;
  bool direct_grad_weight =
      true;  // it is f32 with unit column stride, so that sums can be formed in the output itself
  bool bias = false;
  bool class_weight = false;
  // Gradients find the state of so many columns, the first ones, kept by an earlier Forward.
  int64_t kept = 0;
  bool places = false;  // kept rows have places, see Tokens
  SumSet sums{};        // the row's sums that are asked for
  // Tiles are looked through for so many columns of each token, or of all tokens' lists.
  int64_t chosen = 0, chosen_of_lists = 0;
  int64_t listed = 0;  // each token has a list of so many of its largest logits
  // tests give that of another CPU; else it is choose_engine(dtype)
  std::optional<Engine> engine{};
  bool all_kept() const { return kept > 0 && kept == vocab; }
  // Returns false where no product makes logits. In 16 bits one does, because a row may lie too far
  // for its kept state, and is made again; of two heads none does, whose kept state is whole.
  bool makes_logits() const { return forward || !all_kept() || (dtype != DType::f32 && !diverges); }
  bool chooses() const { return chosen > 0 || chosen_of_lists > 0; }
  bool gradients() const { return grad_input || grad_weight || grad_bias; }
};

struct LinearPlan {
  Engine engine{};
  int64_t token_chunk = 0;  // a chunk has so many tokens, a multiple of engine.token_multiple()
  int64_t chunks = 0;
  int64_t vocab_tiles = 0;
  // So many partial sums of grad_input each cover their own range of the vocabulary.
  int64_t slots = 0;
  // So many columns of the weight (along the hidden axis) are packed at a time.
  int64_t depth_block = 0;
  bool stored = false;      // logits of a chunk are kept, not made again
  bool weight_sum = false;  // an f32 sum of grad_weight lies in the workspace
  int64_t lanes = 0;        // so many threads have scratch
  // it is the expected time, where 1 is three products of tokens that share one chunk
  double cost = 0;
  int64_t padded_hidden_a = 0;  // it is the depth of the logits product
  int64_t padded_hidden_b = 0;  // it is the columns of the gradient products, in whole panels
  int64_t padded_teacher = 0;   // it is the depth of the teacher's logits product

  // These are byte offsets into the workspace, in order; every one is a multiple of 64.
  uint64_t tokens_at = 0, states_at = 0, gradients_at = 0, blocks_at = 0, logits_at = 0,
           input_along_at = 0, input_across_at = 0, slots_at = 0, weight_sum_at = 0,
           bias_sum_at = 0, rare_at = 0, rare_blocks_at = 0, chosen_at = 0, lanes_at = 0;
  // Of two heads the arrays of logits and of blocks have the teacher's behind the student's.
  uint64_t teacher_along_at = 0, losses_at = 0, sums_at = 0;
  uint64_t lane_bytes = 0;
  uint64_t bytes = 0;  // the whole workspace has so many, with `lanes` lanes

  // These are byte offsets into a lane's scratch.
  uint64_t weight_block_at = 0, tile_at = 0, along_vocab_at = 0, along_tokens_at = 0,
           weight_panels_at = 0, product_at = 0, rows_at = 0, bias_at = 0, class_weight_at = 0,
           listed_at = 0;
};

// Returns how many columns of the vocabulary a call keeps, or reads because its Forward kept them:
// a multiple of vocab_tile, or all.
int64_t columns_kept(const Call& call);

// Returns what the planner sees of a linear op.
LinearShape shape_of(const Call& call);

// Returns into how many tasks a slot of the gradient pass is divided at most, along the hidden
// panels.
inline int64_t most_gradient_parts(int64_t panels) { return std::max<int64_t>(panels / 4, 1); }

// Returns the plan for a workspace of `bytes`: the default plan if it fits, else the least costly
// one that does. With 0 bytes it returns the smallest.
LinearPlan plan_linear(const LinearShape& shape, uint64_t bytes, int64_t threads);

// Returns the default plan with a lane for every thread that it has work for, and for eight if
// there are fewer: its size is what makes it the default, whatever the number of threads.
LinearPlan recommended_plan(const LinearShape& shape, int64_t threads);

}  // namespace logitless::cpu
