// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/plan.h"

#include <algorithm>
#include <utility>

#include "src/cpu/row_kernels.h"
#include "src/cpu/tokens.h"

namespace logitless::cpu {
namespace {

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Hands out consecutive ranges, each 64-byte aligned.
struct Layout {
  uint64_t at = 0;
  uint64_t take(int64_t bytes) {
    const uint64_t start = at;
    at += round_up(bytes, 64);
    return start;
  }
  // Starts anew at `start`, for what lives when the ranges since then are dead; then the larger of
  // both.
  uint64_t back_to(uint64_t start) { return std::exchange(at, start); }
  void at_least(uint64_t end) { at = std::max(at, end); }
};

// Columns of the weight packed at a time: 256 keep the block in L2 beside the packed input; few
// tokens are bound by reading the weight, in runs the longer the better (8 x 4096 x 128256 loss
// only: 119 ms at 256, 105 at 1024, 138 at 4096).
constexpr int64_t many_tokens_depth = 256, few_tokens_depth = 1024, few_tokens = 64;
// 512 tokens: 144 flop a byte of weight at D 768, far above the machine's balance; 256 costs 3 %,
// 1024 gains nothing (docs/kernels/cpu.md).
constexpr int64_t largest_chunk = 512;
// More slots feed more threads without splitting the hidden axis and cost memory: at most this many
// bytes.
constexpr int64_t slot_bytes = int64_t{12} << 20;
constexpr int64_t most_slots = 8;
// What the default may take beyond half of the f32 logits.
constexpr int64_t default_extra = int64_t{16} << 20;
// Loss only: X packed, one tile a lane and the tiles' states.
constexpr int64_t loss_only_bytes = int64_t{14} << 20;

struct Choice {
  int64_t token_chunk;
  bool stored;
};

LinearPlan make_plan(const LinearShape& shape, Choice choice, int64_t lanes) {
  LinearPlan p;
  p.engine = choose_engine(shape.dtype);
  p.stored = choice.stored;
  // Chunks of one size: 513 tokens are 2 x 264, not 512 and 1.
  const int64_t tokens = std::max<int64_t>(shape.tokens, 1);
  p.chunks = (tokens + choice.token_chunk - 1) / choice.token_chunk;
  p.token_chunk = round_up((tokens + p.chunks - 1) / p.chunks, p.engine.token_multiple());
  p.depth_block =
      std::min(shape.hidden, p.token_chunk <= few_tokens ? few_tokens_depth : many_tokens_depth);
  p.vocab_tiles = (shape.vocab + vocab_tile - 1) / vocab_tile;
  p.padded_hidden_a = p.engine.padded_k(shape.hidden);
  p.padded_hidden_b = p.engine.b_panels(shape.hidden) * p.engine.b_columns;
  p.weight_sum = shape.grad_weight && !shape.direct_grad_weight && p.chunks > 1;
  const int64_t chunk = p.token_chunk;
  const int64_t slot = chunk * p.padded_hidden_b * 4;
  // Without grad_input nothing is summed over the vocabulary: every tile is its own task.
  p.slots = shape.grad_input
                ? std::clamp<int64_t>(slot_bytes / slot, 1, std::min(most_slots, p.vocab_tiles))
                : p.vocab_tiles;

  Layout whole;
  p.tokens_at = whole.take(tokens_bytes(shape.tokens));
  p.states_at = whole.take(shape.tokens * sizeof(RowState));
  p.gradients_at = whole.take(shape.gradients() ? chunk * sizeof(RowGradient) : 0);
  p.logits_at = whole.take(p.stored ? p.vocab_tiles * chunk * vocab_tile * 4 : 0);
  // Packed input with k along the tokens, for grad_weight; with k along the hidden axis, for the
  // logits.
  const int64_t across = shape.grad_weight ? p.engine.b_bytes(shape.hidden, chunk) : 0;
  const int64_t along = p.engine.a_bytes(chunk, shape.hidden);
  p.input_across_at = whole.take(across);
  if (!p.stored) p.input_along_at = whole.take(along);
  // The forward pass is over when the slots are first written.
  const uint64_t forward_at = whole.at;
  if (p.stored) p.input_along_at = whole.take(along);
  p.blocks_at = whole.take(shape.forward ? p.vocab_tiles * chunk * sizeof(BlockState) : 0);
  const uint64_t forward_end = whole.back_to(forward_at);
  p.slots_at = whole.take(shape.grad_input ? p.slots * slot : 0);
  whole.at_least(forward_end);
  p.weight_sum_at = whole.take(p.weight_sum ? shape.vocab * shape.hidden * 4 : 0);
  p.bias_sum_at = whole.take(shape.grad_bias ? p.vocab_tiles * vocab_tile * 4 : 0);
  p.lanes_at = whole.at;

  Layout lane;
  p.weight_block_at = lane.take(p.engine.b_bytes(vocab_tile, p.depth_block));
  p.tile_at = lane.take(p.stored ? 0 : chunk * vocab_tile * 4);
  const uint64_t product_end = p.stored ? lane.back_to(0) : lane.at;
  p.along_vocab_at = lane.take(shape.grad_input ? p.engine.a_bytes(chunk, vocab_tile) : 0);
  p.along_tokens_at = lane.take(shape.grad_weight ? p.engine.a_bytes(vocab_tile, chunk) : 0);
  const int64_t group = panel_group * p.engine.b_columns;
  p.weight_panels_at = lane.take(shape.grad_input ? p.engine.b_bytes(group, vocab_tile) : 0);
  p.product_at = lane.take(shape.grad_weight ? vocab_tile * group * 4 : 0);
  p.rows_at = lane.take(shape.gradients() ? std::min(gradient_group, chunk) * vocab_tile * 4 : 0);
  lane.at_least(product_end);
  p.bias_at = lane.take(shape.bias ? vocab_tile * 4 : 0);
  p.class_weight_at = lane.take(shape.class_weight ? vocab_tile * 4 : 0);
  p.lane_bytes = lane.at;
  p.lanes = lanes;
  p.bytes = p.lanes_at + lanes * p.lane_bytes;
  return p;
}

int64_t default_chunk(const LinearShape& shape, int64_t multiple) {
  int64_t chunk = std::min(largest_chunk, round_up(std::max<int64_t>(shape.tokens, 1), multiple));
  chunk = round_up(chunk, multiple);
  const uint64_t limit = shape.gradients()
                             ? uint64_t(shape.tokens) * shape.vocab * 2 + default_extra
                             : loss_only_bytes;
  const bool stored = shape.gradients() && shape.forward;
  for (; chunk > multiple; chunk = round_up(chunk / 2, multiple)) {
    LinearPlan p = make_plan(shape, {chunk, stored}, 2);
    if (p.weight_sum) p.bytes -= uint64_t(shape.vocab) * shape.hidden * 4;
    if (p.bytes <= limit) break;
  }
  return chunk;
}

// With gradients the packed operands of both products share the cache.
int64_t recompute_chunk(const LinearShape& shape, int64_t chunk) {
  return shape.gradients() ? std::min<int64_t>(chunk, 256) : chunk;
}

// As many threads as the pass of most tasks has work for; scratch for more would lie idle.
int64_t useful_lanes(const LinearShape& shape, const LinearPlan& p, int64_t threads) {
  const int64_t forward = shape.forward ? p.vocab_tiles : 1;
  const int64_t panels = p.engine.b_panels(shape.hidden);
  const int64_t backward = shape.gradients() ? p.slots * most_gradient_parts(panels) : 1;
  return std::clamp<int64_t>(threads, 1, std::max(forward, backward));
}

}  // namespace

LinearPlan plan_linear(const LinearShape& shape, uint64_t bytes, int64_t threads) {
  const int64_t multiple = choose_engine(shape.dtype).token_multiple();
  const bool can_store = shape.gradients() && shape.forward;
  const int64_t first = default_chunk(shape, multiple);
  // A smaller chunk is not always a smaller plan: more than one may need an f32 sum of grad_weight.
  LinearPlan p, least;
  const auto fits = [&](Choice choice) {
    p = make_plan(shape, choice, 1);
    if (least.bytes == 0 || p.bytes < least.bytes) least = p;
    return p.bytes <= bytes;
  };
  bool found = false;
  if (can_store) {
    // Below 64 tokens a stored chunk is bound by reading and writing grad_weight: recomputing costs
    // a third more.
    for (int64_t chunk = first; !found; chunk = round_up(chunk / 2, multiple)) {
      found = fits({chunk, true});
      if (chunk <= std::max<int64_t>(64, multiple)) break;
    }
  }
  for (int64_t chunk = recompute_chunk(shape, first); !found;
       chunk = round_up(chunk / 2, multiple)) {
    found = fits({chunk, false});
    if (chunk <= multiple) break;
  }
  if (!found) return least;
  if (threads > 1 && p.lane_bytes > 0) {
    const int64_t more = static_cast<int64_t>((bytes - p.bytes) / p.lane_bytes);
    p.lanes = std::min<int64_t>(useful_lanes(shape, p, threads), 1 + more);
    p.bytes += (p.lanes - 1) * p.lane_bytes;
  }
  return p;
}

LinearPlan recommended_plan(const LinearShape& shape, int64_t threads) {
  const int64_t multiple = choose_engine(shape.dtype).token_multiple();
  const bool can_store = shape.gradients() && shape.forward;
  int64_t chunk = default_chunk(shape, multiple);
  if (!can_store) chunk = recompute_chunk(shape, chunk);
  const LinearPlan one = make_plan(shape, {chunk, can_store}, 1);
  return make_plan(shape, {chunk, can_store}, useful_lanes(shape, one, threads));
}

}  // namespace logitless::cpu
