// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/linear/plan.h"

#include <algorithm>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/plan_time.h"
#include "src/cuda/linear/sm90/forward.h"
#include "src/cuda/linear/sm90/units.h"

namespace logitless::cuda {
namespace {

// Chunks of one size: 513 tokens in chunks of 512 are 2 x 264.
int64_t even_chunk(int64_t tokens, int64_t most, bool fused) {
  const int64_t chunks = divide_up(std::max<int64_t>(tokens, 1), most);
  // The fused kernel takes 512 tokens at a time.
  return round_up(divide_up(std::max<int64_t>(tokens, 1), chunks), fused && most >= 512 ? 512 : 8);
}

uint64_t slot_bytes(const LinearPlan& p) {
  return static_cast<uint64_t>(slot_rows(p)) * sm90::sum_columns * sizeof(float);
}
constexpr int64_t least_chunk = 128, most_block_rows = 8192;

// The rest of a plan but its time; with slots where they fit into `bytes`.
LinearPlan finish(const LinearShape& s, const DeviceSpeed& speed, uint64_t bytes, LinearPlan p) {
  p.stored_columns = std::min(p.stored_columns, s.vocab);
  p.lent_columns = s.gradients() ? most_lent_columns(s, p) : 0;
  p.remade_columns = s.gradients() && p.stored_columns < s.vocab
                         ? std::min(p.remade_columns, round_up(s.vocab, 64))
                         : 0;
  p.kind = !s.gradients()              ? PlanKind::loss_only
           : kept_columns(p) == 0      ? PlanKind::frugal
           : kept_columns(p) < s.vocab ? PlanKind::mixed
           : p.chunks > 1              ? PlanKind::chunks
                                       : PlanKind::whole;
  p.grad_weight_sum =
      s.grad_weight && (!s.direct_grad_weight || (p.chunks > 1 && !s.grad_weight_f32));
  // In its own memory, of half as many bytes, as many rows as it holds; a row at least can leave it
  // by way of E's.
  const bool lends_sum = p.grad_weight_sum && p.kind == PlanKind::chunks && s.fused &&
                         s.lends_grad_weight && rows_in_place_of_e(s, p) > 0;
  p.lent_sum_rows = lends_sum ? std::min(s.vocab / 2, s.rows_of_weight()) : 0;
  p.grad_input_sum = s.grad_input && p.stored_columns < s.vocab && !writes_input_first(s, p);
  p.sum_rows = 0;
  if (s.grad_input && !p.grad_input_sum && !s.direct_grad_input) {
    p.sum_rows = std::clamp<int64_t>(p.block_rows * p.block_columns / p.hidden_pitch / 128 * 128,
                                     std::min<int64_t>(p.token_chunk, 128), p.token_chunk);
  }
  const auto place = [&] {
    Arena arena;
    place_linear(s, p, &arena);
    p.bytes = arena.used();
  };
  p.input_clusters = p.slots = 0;
  place();
  if (s.fused && s.gradients() && p.bytes <= bytes) {
    const uint64_t room = (bytes - p.bytes) / slot_bytes(p);
    p.slots = slots_of(s, p, speed);
    place();
    if (p.bytes > bytes) {
      p.slots = static_cast<int32_t>(std::min<uint64_t>(p.slots, room));
      place();
    }
  }
  return p;
}

// What it takes: of the plans that may be chosen alone, for it takes longer to say than the rest.
void set_time(const LinearShape& s, const DeviceSpeed& speed, LinearPlan* p) {
  if (runs_both(s, *p)) p->input_clusters = input_clusters_of(s, *p, speed);
  p->seconds = predicted_time(s, *p, speed);
}

// How many partial sums a row has.
void place_sums(const LinearShape& s, const DeviceSpeed& speed, LinearPlan* p) {
  const int64_t tiles = divide_up(s.vocab, sm90::sum_columns);
  p->segments = s.fused ? tiles : divide_up(s.vocab, segment_columns);
  if (!s.plain) return;
  p->unit_width = s.gradients() ? 1 : sm90::unit_tiles;
  if (s.gradients()) return;
  const auto rows = static_cast<int>(divide_up(p->token_chunk, 512));
  const int teams = teams_of(*p, speed.clusters());
  const sm90::Units all = sm90::Units::make(rows, static_cast<int>(tiles), p->unit_width, teams);
  p->segments = all.whole > 0 ? all.columns() : 0;
  p->single_tiles = sm90::most_singles(rows, static_cast<int>(tiles), teams);
}

// Chunks of at most `most` tokens.
LinearPlan chunked(const LinearShape& s, const DeviceSpeed& speed, int64_t most) {
  const int64_t tokens = std::max<int64_t>(s.tokens, 1);
  LinearPlan p;
  p.token_chunk = std::min(even_chunk(tokens, most, s.fused), round_up(tokens, 8));
  p.chunks = divide_up(tokens, p.token_chunk);
  p.hidden_pitch = round_up(s.hidden, 16 / size_of(s.dtype));
  place_sums(s, speed, &p);
  return p;
}

// Logits in f32, so many bytes at a time.
void set_block(const LinearShape& s, int64_t bytes, LinearPlan* p) {
  p->block_rows = std::min({p->token_chunk, most_block_rows,
                            std::max<int64_t>(bytes / (4 * segment_columns) / 128 * 128, 128)});
  p->block_columns = std::clamp(bytes / (4 * p->block_rows) / segment_columns * segment_columns,
                                segment_columns, round_up(s.vocab, segment_columns));
}

// use(plan) with each way to keep E in grad_weight's memory: as much as fits if it is copied, or if
// nothing is; and of all of it, with grad_input written at once or through its sums in f32, which
// leave the compacted input in its memory.
template <class F>
void each_lending(const LinearShape& s, LinearPlan p, F&& use) {
  use(p);
  if (!s.fused || !s.lends_grad_weight || !s.can_store || p.chunks > 1) return;
  p.copies_lent = false;
  use(p);
  p.copies_lent = true, p.input_first = false;
  if (s.direct_grad_input) use(p);
}

// The largest share of E that fits beside panels of p's width; without bytes: none does. What holds
// E on Hopper holds the panels made again once E is used.
LinearPlan largest_share(const LinearShape& s, const DeviceSpeed& speed, uint64_t bytes,
                         LinearPlan p) {
  const int64_t step = s.fused ? sm90::sum_columns : segment_columns;
  p.stored_columns = s.fused ? p.remade_columns : segment_columns;
  const LinearPlan smallest = finish(s, speed, bytes, p);
  if (smallest.bytes > bytes) return {};
  const int64_t column_bytes =
      panel_rows(s, p) * size_of(s.dtype) +
      (s.grad_bias && !s.fused ? divide_up(panel_rows(s, p), bias_slab_rows) * 4 : 0);
  const int64_t more = static_cast<int64_t>(
      std::min<uint64_t>((bytes - smallest.bytes) / static_cast<uint64_t>(column_bytes),
                         static_cast<uint64_t>(s.vocab)));
  p.stored_columns =
      std::min(p.stored_columns + (more / step + 2) * step, (s.vocab - 1) / step * step);
  // From a little too many down: other arrays may shrink or grow with it, or no longer find a
  // place in grad_weight's memory.
  for (int tries = 0; tries < 6 && p.stored_columns > 0; ++tries) {
    if (s.fused) p.remade_columns = p.stored_columns;
    const LinearPlan mixed = finish(s, speed, bytes, p);
    if (mixed.bytes <= bytes) return mixed;
    const auto over = static_cast<int64_t>(mixed.bytes - bytes);
    p.stored_columns -= round_up(divide_up(over, column_bytes), step);
  }
  return {};
}

// Those of a chunk and block in which columns are made again, by the width of their panels.
template <class F>
void each_width(const LinearShape& s, const DeviceSpeed& speed, uint64_t bytes, LinearPlan p,
                F&& use) {
  // Narrow panels send the sum of grad_input to memory and back too often: 22 % of the products'
  // time at 4 of the fused kernel's tiles, 7 % at 12; the more tokens, the more a tile takes. The
  // minimum is not made of them; beyond it they may leave room for slices.
  const int64_t least = !s.fused ? 0 : p.token_chunk > 8192 ? 8 : 12;
  const int64_t narrowest = s.fused && bytes > 0 ? 4 : least;
  for (const int64_t width : {66, 33, 24, 20, 16, 12, 10, 8, 7, 6, 5, 4, 2, 1}) {
    if (width < narrowest) return;
    p.stored_columns = 0;
    p.remade_columns = width * (s.fused ? sm90::sum_columns : p.block_columns);
    each_lending(s, p, [&](const LinearPlan& lending) { use(finish(s, speed, bytes, lending)); });
    if (!s.can_store || (s.fused && width != least)) continue;
    each_lending(s, p, [&](const LinearPlan& lending) {
      const LinearPlan mixed = largest_share(s, speed, bytes, lending);
      if (mixed.bytes > 0) use(mixed);
    });
  }
}

// Calls use(plan) with every plan that is considered for `bytes`.
template <class F>
void each_plan(const LinearShape& s, const DeviceSpeed& speed, uint64_t bytes, F&& consider) {
  const auto use = [&](const LinearPlan& p) {
    if (s.weight_rows == 0 || p.kind == PlanKind::chunks) consider(p);
  };
  const int64_t least = s.fused ? 512 : least_chunk;
  // Without logits in memory their size decides nothing.
  const int shrink = !s.fused || (s.grad_input && !s.direct_grad_input) ? 2 : 64;
  for (int64_t most = round_up(std::max<int64_t>(s.tokens, 1), 8);;
       most = std::max(most / 2, least)) {
    // Tiles are counted in 32 bits.
    const int64_t most_tiles = int64_t{1} << 30;
    if (s.fused && most > least &&
        divide_up(most, 512) * divide_up(s.vocab, sm90::sum_columns) > most_tiles) {
      continue;
    }
    LinearPlan p = chunked(s, speed, most);
    for (int64_t block = int64_t{32} << 20; block >= int64_t{1} << 20; block /= shrink) {
      set_block(s, block, &p);
      p.stored_columns = s.gradients() && s.can_store ? s.vocab : 0;
      p.copies_input = true;
      if (!s.gradients() || s.can_store) use(finish(s, speed, bytes, p));
      if (s.reads_input) {
        p.copies_input = false;
        use(finish(s, speed, bytes, p));
      }
      if (s.gradients()) each_width(s, speed, bytes, p, use);
    }
    if (most <= least) break;
  }
  if (!s.fused || !s.gradients() || !s.can_store || bytes == 0) return;
  // E of chunks of three quarters; and, where that of a tile's rows has no room, of fewer rows,
  // which take as long.
  const auto whole = [&](int64_t rows) {
    LinearPlan p = chunked(s, speed, rows);
    set_block(s, int64_t{1} << 20, &p);
    p.stored_columns = s.vocab;
    p = finish(s, speed, bytes, p);
    if (p.bytes <= bytes) use(p);
    return p.bytes <= bytes;
  };
  for (int64_t rows = s.tokens / 8 * 6; rows > least; rows /= 2) whole(round_up(rows, least));
  for (int64_t rows = least; rows >= 256 && rows < s.tokens; rows -= 64) {
    if (whole(rows)) return;
  }
}

// The last few answers of each thread: planning takes longer than enqueuing a small call.
struct Question {
  int kind = -1;
  LinearShape shape;
  DeviceSpeed speed;
  uint64_t bytes = 0;
  bool operator==(const Question&) const = default;
};
template <class F>
LinearPlan remembered(const Question& question, F&& plan) {
  constexpr int most = 24;
  thread_local Question questions[most];
  thread_local LinearPlan answers[most];
  thread_local int next = 0;
  for (int i = 0; i < most; ++i) {
    if (questions[i] == question) return answers[i];
  }
  const LinearPlan answer = plan();
  questions[next] = question;
  answers[next] = answer;
  next = (next + 1) % most;
  return answer;
}

// Nothing of E outlives its chunk of tokens, and the second pass writes each row once.
bool takes_two_passes(const LinearShape& s) {
  return s.fused && s.forward && s.can_store && s.grad_input && s.grad_weight &&
         s.lends_grad_weight && !s.grad_weight_f32 && !s.copies_weight && s.weight_rows == 0;
}
// Half of grad_weight, whose sums its own memory holds: adding to them takes less than making their
// columns again. None where the second pass makes the whole of grad_bias.
int64_t rows_of_first_pass(const LinearShape& s) {
  return s.grad_bias ? 0 : s.vocab / 2 / 512 * 512;
}
LinearPlan two_passes(const LinearShape& s, const DeviceSpeed& speed, uint64_t bytes) {
  const int64_t first_rows = rows_of_first_pass(s);
  LinearPlan p;
  p.bytes = UINT64_MAX;
  const uint64_t state = state_bytes(s);
  if (bytes <= state) return p;
  const LinearPlan first = plan_linear(first_pass(s, first_rows), speed, bytes - state);
  const LinearPlan second = plan_linear(second_pass(s, first_rows), speed, bytes - state);
  const uint64_t most = std::max(first.bytes, second.bytes);
  if (first.bytes == 0 || most > bytes - state) return p;
  p.kind = PlanKind::two_passes;
  p.token_chunk = first.token_chunk;
  p.chunks = first.chunks;
  p.hidden_pitch = first.hidden_pitch;
  p.first_rows = first_rows;
  p.bytes = state + most;
  p.seconds = first.seconds + second.seconds;
  return p;
}

LinearPlan find_smallest(const LinearShape& shape, const DeviceSpeed& speed) {
  LinearPlan least;
  each_plan(shape, speed, 0, [&](LinearPlan p) {
    if (least.bytes > 0 && p.bytes > least.bytes) return;
    set_time(shape, speed, &p);
    if (least.bytes == 0 || p.bytes < least.bytes || p.seconds < least.seconds) least = p;
  });
  if (!takes_two_passes(shape)) return least;
  // Two passes if that is less and hardly slower, with slots for half of the clusters or for all.
  const int64_t first_rows = rows_of_first_pass(shape);
  const uint64_t passes = std::max(smallest_plan(first_pass(shape, first_rows), speed).bytes,
                                   smallest_plan(second_pass(shape, first_rows), speed).bytes);
  for (const int half : {0, 1, 2}) {
    const uint64_t slots = static_cast<uint64_t>(speed.clusters() * half / 2) * slot_bytes(least);
    const LinearPlan p = two_passes(shape, speed, state_bytes(shape) + passes + slots);
    if (p.bytes < least.bytes && p.seconds <= 1.1 * least.seconds) return p;
  }
  return least;
}

LinearPlan find_fastest(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes) {
  // What would do with less than the minimum is not what the minimum was made for.
  const uint64_t minimum = smallest_plan(shape, speed).bytes;
  LinearPlan best;
  const auto may_be_chosen = [&](const LinearPlan& p) {
    return p.bytes <= bytes && p.bytes >= minimum;
  };
  const auto choose = [&](const LinearPlan& p) {
    const bool better =
        p.seconds < best.seconds || (p.seconds == best.seconds && p.bytes < best.bytes);
    if (best.bytes == 0 || better) best = p;
  };
  each_plan(shape, speed, bytes, [&](LinearPlan p) {
    if (!may_be_chosen(p)) return;
    set_time(shape, speed, &p);
    choose(p);
  });
  if (best.bytes == 0) return find_smallest(shape, speed);
  if (best.kind == PlanKind::whole || !takes_two_passes(shape)) return best;
  const LinearPlan both = two_passes(shape, speed, bytes);
  if (may_be_chosen(both)) choose(both);
  return best;
}

}  // namespace

const char* name_of(PlanKind kind) {
  constexpr const char* names[] = {
      "loss only", "whole", "token chunks", "stored and recomputed", "frugal", "two passes"};
  return names[static_cast<int>(kind)];
}

LinearShape first_pass(const LinearShape& shape, int64_t first_rows) {
  LinearShape s = shape;
  s.grad_bias = false;
  s.grad_weight = first_rows > 0;
  s.weight_rows = first_rows;
  return s;
}

// As of Backward on a shard of the vocabulary, with the rows' states given.
LinearShape second_pass(const LinearShape& shape, int64_t first_rows) {
  LinearShape s = shape;
  s.vocab -= first_rows;
  s.forward = s.grad_input = s.can_store = s.forms_dz = false;
  s.direct_grad_input = s.lends_grad_input = false;
  s.entropy = s.weighted_sum = s.argmax = false;
  s.class_weights &= s.smoothing;
  return s;
}

uint64_t state_bytes(const LinearShape& shape) {
  Arena arena;
  place_states(shape, &arena);
  return arena.used();
}

LinearPlan smallest_plan(const LinearShape& shape, const DeviceSpeed& speed) {
  return remembered({0, shape, speed, 0}, [&] { return find_smallest(shape, speed); });
}

LinearPlan plan_linear(const LinearShape& shape, const DeviceSpeed& speed, uint64_t bytes) {
  return remembered({1, shape, speed, bytes}, [&] { return find_fastest(shape, speed, bytes); });
}

LinearPlan recommended_plan(const LinearShape& shape, const DeviceSpeed& speed) {
  const uint64_t logits = uint64_t(shape.tokens) * shape.vocab;  // a quarter of them in f32
  uint64_t sums = 0;
  if (shape.grad_input) sums += uint64_t(shape.tokens) * shape.hidden * 4;
  if (shape.grad_weight && !(shape.direct_grad_weight && shape.grad_weight_f32)) {
    sums += uint64_t(shape.vocab) * shape.hidden * 4;
  }
  if (shape.copies_weight) sums += uint64_t(shape.vocab) * (shape.hidden + 8) * 4;
  LinearPlan plan = plan_linear(shape, speed, logits + sums + (uint64_t{16} << 20));
  // Whoever brings exactly these bytes gets this plan, or one as quick.
  for (int tries = 0; tries < 4; ++tries) {
    const LinearPlan again = plan_linear(shape, speed, plan.bytes);
    if (again.seconds <= plan.seconds) break;
    plan = again;
  }
  return plan;
}

}  // namespace logitless::cuda
