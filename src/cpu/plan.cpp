// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/plan.h"

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <utility>

#include "src/cpu/chosen.h"
#include "src/cpu/divergence_kernels.h"
#include "src/cpu/row_kernels.h"
#include "src/cpu/tokens.h"
#include "src/cpu/top.h"
#include "src/rounding.h"

namespace logitless::cpu {
namespace {

// Sizes saturate here: shapes that validation accepts may exceed it once padded to whole tiles. No
// machine has that much memory.
constexpr int64_t most_bytes = (INT64_MAX / 64 - 1) * 64;

constexpr int64_t bytes_of(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return most_bytes;
  }
  return product;
}

// Allocates consecutive ranges, each 64-byte aligned.
struct Layout {
  uint64_t at = 0;
  uint64_t take(int64_t bytes) {
    const uint64_t start = at;
    const uint64_t end = start + round_up(std::min(bytes, most_bytes), 64);
    at = std::min<uint64_t>(end, most_bytes);
    return start;
  }
  // back_to() continues at `start`, for arrays used after the ranges since then; at_least() keeps
  // the larger end of both.
  uint64_t back_to(uint64_t start) { return std::exchange(at, start); }
  void at_least(uint64_t end) { at = std::max(at, end); }
};

// Columns of the weight packed at a time: 256 keep the block and the packed input in L2. With few
// tokens reading the weight dominates, and longer runs are read faster (8 x 4096 x 128256, loss
// only: 119 ms with 256, 105 with 1024, 138 with 4096).
constexpr int64_t many_tokens_depth = 256, few_tokens_depth = 1024, few_tokens = 64;
// 512 tokens do 144 flop per byte of memory traffic at D 768, far above the machine's balance; 256
// cost 3 % more, 1024 gain nothing (docs/kernels/cpu.md).
constexpr int64_t chunk_steps[] = {512, 384, 256, 192, 128, 96, 64, 48, 32, 16, 8};
// If logits are recomputed, both products' packed operands share the cache; chunks are smaller.
constexpr int64_t largest_recomputed = 256;
// Smaller chunks save little memory and take many times as long: only two heads, and shapes whose
// default plan has them, use them.
constexpr int64_t smallest_chunk = 64;
// More slots feed more threads without splitting the hidden axis, but need memory: at most this
// much.
constexpr int64_t slot_bytes = int64_t{12} << 20;
// What the default may take beyond half of the f32 logits.
constexpr int64_t default_extra = int64_t{16} << 20;
// The default's limit for the loss alone: packed input, a tile for each lane, the tiles' states.
constexpr int64_t loss_only_bytes = int64_t{14} << 20;

// The lanes and slots for which a plan's cost is estimated. `cost` is the geometric mean over 1, 2,
// 4 and 8 threads of the cost of idle threads; with fewer slots than threads each tile's gradient
// is computed twice.
struct Crew {
  int64_t lanes, slots;
  double cost;
};
constexpr Crew crews[] = {{8, 8, 1}, {8, 4, 1.02}, {4, 4, 1.19}, {2, 2, 1.68}, {1, 1, 2.83}};
constexpr int64_t full_crew = crews[0].lanes;

struct Choice {
  int64_t token_chunk;
  bool stored;
  Crew crew;
};

int64_t gradient_tasks(const LinearShape& shape, const LinearPlan& p) {
  return p.slots * most_gradient_parts(p.engine.b_panels(shape.hidden));
}

// At most as many threads as the pass with the most tasks can use; more would only take scratch.
// The parts of a slot compute the same logits again, which only pays if all slots have equally many
// parts.
int64_t useful_lanes(const LinearShape& shape, const LinearPlan& p, int64_t threads) {
  const int64_t forward = shape.forward ? p.vocab_tiles : 1;
  const int64_t backward = shape.gradients() ? gradient_tasks(shape, p) : 1;
  const int64_t lanes = std::clamp<int64_t>(threads, 1, std::max(forward, backward));
  const bool whole_slots = shape.gradients() && !p.stored && !shape.all_kept() && lanes > p.slots;
  return whole_slots ? lanes / p.slots * p.slots : lanes;
}

void set_lanes(int64_t lanes, LinearPlan* p) {
  p->lanes = lanes;
  p->bytes = p->lanes_at + lanes * p->lane_bytes;
}

// Measured at N 1024, D 768, V 50257 on Granite Rapids (docs/kernels/cpu.md): what forming the
// logits twice adds, and what each pass over the weight or its gradient adds to a chunk of one
// token. The bf16 dot is in between, not measured.
double expected_time(const LinearShape& shape, const LinearPlan& p, Crew crew) {
  struct Rates {
    double recompute, pass;
  };
  const Rates rates = p.engine.arithmetic == Arithmetic::amx        ? Rates{.06, 24}
                      : p.engine.arithmetic == Arithmetic::bf16_dot ? Rates{.25, 12}
                                                                    : Rates{.31, 7.8};
  const double vocab = static_cast<double>(std::max<int64_t>(shape.vocab, 1));
  const double again = p.stored ? 0 : 1 - static_cast<double>(shape.kept) / vocab;
  return crew.cost * (1 + again * rates.recompute +
                      (4 + again) * rates.pass / static_cast<double>(p.token_chunk));
}

// Places the rows of two heads: the losses of all tokens, and the other arrays of a chunk.
void place_rows_of_two(const LinearShape& shape, LinearPlan& p, Layout& whole) {
  const int64_t chunk = p.token_chunk;
  p.losses_at = whole.take(shape.forward ? shape.tokens * 4 : 0);
  p.states_at = whole.take(shape.forward ? 2 * chunk * sizeof(RowState) : 0);
  p.gradients_at = whole.take(chunk * sizeof(DivergenceRow));
  const int64_t sums = shape.forward ? bytes_of({p.vocab_tiles, chunk, sizeof(DivergenceSums)}) : 0;
  p.sums_at = whole.take(sums);
}

// Places the shared arrays and then, from lanes_at on, each lane's.
void place(const LinearShape& shape, LinearPlan& p) {
  const int64_t chunk = p.token_chunk;
  const bool rare = shape.sums.has(RareBlock::kinds);
  Layout whole;
  p.tokens_at = whole.take(tokens_bytes(shape.tokens, shape.places));
  if (shape.diverges) {
    place_rows_of_two(shape, p, whole);
  } else {
    p.states_at = whole.take(shape.tokens * sizeof(RowState));
    p.rare_at = whole.take(rare ? shape.tokens * sizeof(RareStatistics) : 0);
    p.gradients_at = whole.take(shape.gradients() ? chunk * sizeof(RowGradient) : 0);
    const int64_t chosen = shape.chosen_of_lists > 0 ? shape.chosen_of_lists : chunk * shape.chosen;
    p.chosen_at = whole.take(shape.chooses() ? ChosenColumns::bytes(chunk, chosen) : 0);
  }
  const int64_t heads = shape.diverges ? 2 : 1;
  p.logits_at = whole.take(p.stored ? bytes_of({heads, p.vocab_tiles, chunk, vocab_tile, 4}) : 0);
  // The input is packed twice: along the tokens for grad_weight, along the hidden axis for the
  // logits.
  const int64_t across = shape.grad_weight ? p.engine.b_bytes(shape.hidden, chunk) : 0;
  const int64_t along = shape.makes_logits() ? p.engine.a_bytes(chunk, shape.hidden) : 0;
  p.input_across_at = whole.take(across);
  if (!p.stored) p.input_along_at = whole.take(along);
  // The slots may reuse the forward pass's memory, which is free when they are written.
  const uint64_t forward_at = whole.at;
  if (p.stored) p.input_along_at = whole.take(along);
  p.teacher_along_at =
      whole.take(shape.forward ? p.engine.a_bytes(chunk, shape.teacher_hidden) : 0);
  const int64_t blocks =
      shape.forward ? bytes_of({heads, p.vocab_tiles, chunk, sizeof(BlockState)}) : 0;
  p.blocks_at = whole.take(blocks);
  p.rare_blocks_at = whole.take(rare ? p.vocab_tiles * chunk * sizeof(RareBlock) : 0);
  const uint64_t forward_end = whole.back_to(forward_at);
  p.slots_at = whole.take(shape.grad_input ? bytes_of({p.slots, chunk, p.padded_hidden_b, 4}) : 0);
  whole.at_least(forward_end);
  p.weight_sum_at = whole.take(p.weight_sum ? shape.vocab * shape.hidden * 4 : 0);
  p.bias_sum_at = whole.take(shape.grad_bias ? p.vocab_tiles * vocab_tile * 4 : 0);
  p.lanes_at = whole.at;

  Layout lane;
  // With one head, targets and chosen columns are packed too, up to vocab_tile whatever V is.
  const int64_t packed = shape.diverges ? std::min(shape.vocab, vocab_tile) : vocab_tile;
  const int64_t block = shape.makes_logits() ? p.engine.b_bytes(packed, p.depth_block) : 0;
  p.weight_block_at = lane.take(block);
  const int64_t targets =
      shape.sums.has(SumKind::above) ? std::min(target_group, chunk) * vocab_tile * 4 : 0;
  p.tile_at = lane.take(!shape.makes_logits() ? 0 : p.stored ? targets : chunk * vocab_tile * 4);
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
  p.listed_at = lane.take(shape.listed > 0 ? TopLists::bytes(chunk, shape.listed) : 0);
  p.lane_bytes = lane.at;
}

LinearPlan make_plan(const LinearShape& shape, Choice choice) {
  LinearPlan p;
  p.engine = shape.engine.has_value() ? *shape.engine : choose_engine(shape.dtype);
  p.stored = choice.stored;
  // Chunks have nearly equal sizes: 513 tokens are 264 and 249, not 512 and 1.
  const int64_t tokens = std::max<int64_t>(shape.tokens, 1);
  p.chunks = (tokens + choice.token_chunk - 1) / choice.token_chunk;
  p.token_chunk = round_up((tokens + p.chunks - 1) / p.chunks, p.engine.token_multiple());
  p.depth_block = std::min(std::max(shape.hidden, shape.teacher_hidden),
                           shape.tokens <= few_tokens ? few_tokens_depth : many_tokens_depth);
  p.vocab_tiles = (shape.vocab + vocab_tile - 1) / vocab_tile;
  p.padded_hidden_a = p.engine.padded_k(shape.hidden);
  p.padded_teacher = p.engine.padded_k(shape.teacher_hidden);
  p.padded_hidden_b = p.engine.b_panels(shape.hidden) * p.engine.b_columns;
  p.weight_sum = shape.grad_weight && !shape.direct_grad_weight && p.chunks > 1;
  const int64_t slot = bytes_of({p.token_chunk, p.padded_hidden_b, 4});
  // Without grad_input nothing is summed over the vocabulary, so each tile is a task. A power of
  // two divides evenly among 2, 4 and 8 threads.
  const int64_t affordable = std::bit_floor<uint64_t>(std::max<int64_t>(slot_bytes / slot, 1));
  const int64_t tiles = std::max<int64_t>(p.vocab_tiles, 1);
  p.slots = shape.grad_input ? std::min({choice.crew.slots, tiles, affordable}) : tiles;

  place(shape, p);
  set_lanes(useful_lanes(shape, p, choice.crew.lanes), &p);
  p.cost = expected_time(shape, p, choice.crew);
  return p;
}

// Calls use(plan) for every plan of the shape, large chunks first.
template <class Use>
void for_each_plan(const LinearShape& shape, const Use& use) {
  const int64_t tokens = std::max<int64_t>(shape.tokens, 1);
  int64_t chunks = 0;
  for (const int64_t step : chunk_steps) {
    const int64_t previous = std::exchange(chunks, (tokens + step - 1) / step);
    if (chunks == previous) continue;  // would give the same chunk again
    for (const bool stored : {true, false}) {
      // With two heads the rows of logits are read again once each lse is known.
      const bool must_store = shape.diverges && shape.forward;
      if (stored ? !must_store && !(shape.gradients() && shape.forward) : must_store) continue;
      for (const Crew crew : crews) {
        const LinearPlan p = make_plan(shape, {step, stored, crew});
        const bool recomputed = shape.gradients() && !stored && !shape.all_kept();
        if (recomputed && p.token_chunk > largest_recomputed) continue;
        if (shape.gradients() && p.lanes > gradient_tasks(shape, p)) continue;
        use(p);
      }
    }
  }
}

uint64_t default_limit(const LinearShape& shape, const LinearPlan& p) {
  if (!shape.gradients() && !shape.diverges) return loss_only_bytes;
  const uint64_t sum = p.weight_sum ? uint64_t(shape.vocab) * shape.hidden * 4 : 0;
  return uint64_t(shape.tokens) * shape.vocab * 2 + default_extra + sum;
}

// Returns the cheapest plan with a full crew below the limit, else the smallest plan.
LinearPlan default_plan(const LinearShape& shape) {
  LinearPlan best, smallest;
  for_each_plan(shape, [&](const LinearPlan& p) {
    if (p.lanes < useful_lanes(shape, p, full_crew)) return;
    if (smallest.bytes == 0 || p.bytes < smallest.bytes) smallest = p;
    if (p.bytes > default_limit(shape, p)) return;
    if (best.bytes == 0 || p.cost < best.cost) best = p;
  });
  return best.bytes > 0 ? best : smallest;
}

}  // namespace

LinearPlan plan_linear(const LinearShape& shape, uint64_t bytes, int64_t threads) {
  LinearPlan p = default_plan(shape);
  if (p.bytes > bytes) {
    const int64_t least_chunk = shape.diverges ? 1 : std::min(smallest_chunk, p.token_chunk);
    LinearPlan best, least = p;
    for_each_plan(shape, [&](const LinearPlan& other) {
      if (other.token_chunk < least_chunk) return;
      if (other.bytes < least.bytes) least = other;
      if (other.bytes <= bytes && (best.bytes == 0 || other.cost < best.cost)) best = other;
    });
    if (best.bytes == 0) return least;
    p = best;
  }
  if (p.lane_bytes > 0) {
    const auto room = static_cast<int64_t>(
        std::min<uint64_t>((bytes - p.lanes_at) / p.lane_bytes, std::max<int64_t>(threads, 1)));
    set_lanes(useful_lanes(shape, p, room), &p);
  }
  return p;
}

LinearPlan recommended_plan(const LinearShape& shape, int64_t threads) {
  LinearPlan p = default_plan(shape);
  set_lanes(useful_lanes(shape, p, std::max(threads, full_crew)), &p);
  return p;
}

}  // namespace logitless::cpu
