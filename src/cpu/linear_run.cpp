// SPDX-License-Identifier: Apache-2.0
// The linear ops on the CPU: tokens are prepared once; each chunk then has its forward pass,
// coefficients and gradient pass. docs/semantics.md has the formulas, docs/kernels/cpu.md the
// schedule, tile sizes and measurements. Forward may keep, for compacted tokens, what Backward
// reads in place of logits:
//   kept  [tile][rows][192]  the logits z of f32, E = exp(z - z_t) of bf16; the last tile as narrow
//                            as whole blocks of 64; rows as in kept.h
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "src/backend.h"
#include "src/cpu/chosen.h"
#include "src/cpu/linear_products.h"
#include "src/cpu/ops.h"
#include "src/cpu/top.h"

namespace logitless::cpu {
namespace {

// Kept E is precise enough if the target's logit is at most this far below the row's maximum, and
// above the row's lse only by rounding.
constexpr double most_below = 60, most_above = 0.5;

class LinearRun : public LinearProducts {
 public:
  LinearRun(const Call& call, const LinearShape& shape, const LinearPlan& plan, char* memory)
      : LinearProducts(call, shape, plan, memory),
        map_(logit_map(call.options)),
        wants_{call.sums()} {
    if (shape.chooses()) {
      chosen_ = ChosenColumns(plan.token_chunk, at<char>(plan.chosen_at));
    }
  }

  void begin_chunk(const Tokens& tokens, int64_t first, int64_t count);
  void pack_input();
  // Computes logits tile by tile, and from them the row states. The logits are left where the plan
  // stores them or the call keeps them.
  void forward_pass();
  // Adds to grad_weight and grad_bias, and writes the chunk's rows of grad_input.
  void gradient_pass(bool first_chunk);
  // In Backward: if a row's kept state is not of this call, sets its state to NaN and sets `fault`.
  void check_kept(const Tokens& tokens);
  // Marks the kept state of every token that counts as consumed, even without a gradient.
  void consume_kept(const Tokens& tokens);

  RowState* states() const { return at<RowState>(plan_.states_at); }  // [N]
  // [N], or null if no rare statistic is requested.
  RareStatistics* rare() const {
    return wants_.rare() ? at<RareStatistics>(plan_.rare_at) : nullptr;
  }
  RowGradient* gradients() const { return at<RowGradient>(plan_.gradients_at); }  // [chunk]

 private:
  bool exponentials() const { return call_.input.dtype != DType::f32; }
  bool keeps_exponentials() const { return call_.forward && kept_ > 0 && exponentials(); }
  // With temperatures each token has its own map.
  LogitMap map_of(int64_t n) const { return cpu::map_of(map_, *tokens_, first_ + n); }
  bool is_kept(int64_t tile) const { return tile * vocab_tile < kept_; }
  bool makes_logits() const { return shape_.forward || !reads_kept_ || kept_ < shape_.vocab; }
  // Whether the tile's gradients are computed from what an earlier Forward kept.
  bool reads_kept(int64_t tile) const { return !plan_.stored && reads_kept_ && is_kept(tile); }
  void find_anchors();
  void find_chosen();
  void add_chosen(const LogitMap& map, int64_t tile, int64_t n, const float* z,
                  const float* class_weight, float* row) const;
  void keep_row(int64_t tile, int64_t n, const float* z) const;
  void keep_states();
  float* logits_of(int64_t tile, const Lane& lane) const;
  TileRows tile_rows(int64_t tile, const Lane& lane) const;
  void load_vectors(int64_t tile, const Lane& lane) const;
  void compute_tile(int64_t tile, const Lane& lane, float* logits, bool forward) const;
  // The largest logits found by a thread so far.
  TopLists lists_of(int64_t index) const {
    char* const lane = at<char>(plan_.lanes_at) + index * plan_.lane_bytes;
    return {call_, plan_.token_chunk, lane + plan_.listed_at};
  }
  void list_tile(int64_t tile, int64_t index, const float* logits) const;
  void write_list(int64_t n) const;
  void combine_blocks();
  void form_row(int64_t tile, const Lane& lane, const TileRows& rows, int64_t n, float* row) const;

  LogitMap map_;
  BlockWants wants_;
  ChosenColumns chosen_;
  bool reads_kept_ = false;  // in Backward: the chunk's kept columns can be read
};

void LinearRun::begin_chunk(const Tokens& tokens, int64_t first, int64_t count) {
  LinearProducts::begin_chunk(tokens, first, count);
  if (shape_.chooses()) {
    chosen_.begin_chunk(call_, tokens.row + first, count);
    for_each_token([&](int64_t n) {
      chosen_.find(call_, n, tokens.row[first + n], tokens.inv_gradient_scale);
    });
  }
  reads_kept_ = !call_.forward && kept_ > 0;
  for (int64_t n = 0; reads_kept_ && exponentials() && n < count; ++n) {
    reads_kept_ = kept_row(tokens, first + n)->overwritten == 0;
  }
}

void LinearRun::pack_input() {
  if (makes_logits()) pack_along(call_.input, packed_input());
  if (call_.grad_weight) pack_across();
}

void LinearRun::load_vectors(int64_t tile, const Lane& lane) const {
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  if (call_.bias) load_vector(call_.bias, first, width, lane.bias);
  if (call_.vocab_weight)
    load_vector(call_.vocab_weight, call_.vocab_start() + first, width, lane.class_weight);
}

// Computes the logits [padded_count][vocab_tile] of a tile. If not `forward`, this is a second
// product, with known row states.
void LinearRun::compute_tile(int64_t tile, const Lane& lane, float* logits, bool forward) const {
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  multiply_input(packed_input(), 0, count_, source_of(call_.weight, nullptr), first, width, lane,
                 logits);
  const float* bias = call_.bias ? lane.bias : nullptr;
  const float* class_weight = call_.vocab_weight ? lane.class_weight : nullptr;
  BlockState unused;
  BlockWants wants = forward ? wants_ : BlockWants{};
  BlockState* blocks = at<BlockState>(plan_.blocks_at) + tile * plan_.token_chunk;
  RareBlock* rare_blocks = at<RareBlock>(plan_.rare_blocks_at) + tile * plan_.token_chunk;
  for (int64_t n = 0; n < count_; ++n) {
    const int64_t target = tokens_->target[first_ + n] - first;
    if (wants.sums.has(SumKind::above)) {
      wants.target_logit = rare()[first_ + n].rank_logit;
      wants.target = target;
    }
    float* row = logits + n * vocab_tile;
    forward_block(map_of(n), row, bias, class_weight, width, wants, forward ? &blocks[n] : &unused,
                  nullptr, wants.rare() ? &rare_blocks[n] : nullptr);
    if (forward && target >= 0 && target < width) states()[first_ + n].target_logit = row[target];
    if (call_.logits_at) {
      const ChosenPlaces places = places_of(call_, tokens_->row[first_ + n]);
      for (const ChosenColumn& c : chosen_.within(n, first, width)) {
        element_at(call_.logits_at, places, c.k) = row[c.column - first];
      }
    }
    if (forward && is_kept(tile)) keep_row(tile, n, row);
  }
}

// z_t must be known before any tile: E is relative to it, and rank compares with it. The product
// multiplies every token of a group with every token's target and uses the diagonal; its bits are
// those of the tile's logits.
void LinearRun::find_anchors() {
  constexpr int64_t group = target_group;
  const bool targets_only = call_.targets_only();
  for_each_task(executor_, plan_.lanes, divide_up(count_, group), [&](int64_t task, int64_t index) {
    const Lane lane = this->lane(index);
    const int64_t row = task * group, rows = std::min(group, count_ - row);
    int64_t columns[group];  // any column if the target is in another shard
    for (int64_t r = 0; r < rows; ++r) {
      columns[r] = std::max<int64_t>(tokens_->target[first_ + row + r], 0);
    }
    multiply_input(packed_input(), row, rows, source_of(call_.weight, columns), 0, rows, lane,
                   lane.tile);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = first_ + row + r;
      const bool here = tokens_->target[token] >= 0;
      float* z = lane.tile + r * vocab_tile + r;
      float bias = 0;
      if (call_.bias) bias = element_as_f32(call_.bias, columns[r]);
      map_block(map_of(row + r), z, call_.bias ? &bias : nullptr, 1);
      if (keeps_exponentials()) {
        kept_row(*tokens_, token)->target_logit =
            here ? *z : f32_at(call_.anchor, tokens_->row[token]);
      }
      if (wants_.sums.has(SumKind::above)) rare()[token].rank_logit = *z;
      if (targets_only && here) states()[token].target_logit = *z;
    }
  });
}

// If no tile is computed, the chosen columns of a panel's tokens are multiplied alone, as many as a
// tile has at once. Each has the bits that it has in a tile.
void LinearRun::find_chosen() {
  const int64_t group = plan_.engine.a_rows;
  for_each_task(executor_, plan_.lanes, divide_up(count_, group), [&](int64_t task, int64_t index) {
    const Lane lane = this->lane(index);
    const int64_t row = task * group, rows = std::min(group, count_ - row);
    struct Place {
      int64_t row;  // in the panel
      float* logit;
    } places[vocab_tile];
    int64_t columns[vocab_tile], count = 0;
    const auto make = [&] {
      if (count == 0) return;
      multiply_input(packed_input(), row, rows, source_of(call_.weight, columns), 0, count, lane,
                     lane.tile);
      for (int64_t c = 0; c < count; ++c) {
        const int64_t r = places[c].row;
        float z = lane.tile[r * vocab_tile + c];
        const float bias = call_.bias ? element_as_f32(call_.bias, columns[c]) : 0;
        map_block(map_of(row + r), &z, call_.bias ? &bias : nullptr, 1);
        *places[c].logit = z;
      }
      count = 0;
    };
    for (int64_t r = 0; r < rows; ++r) {
      const ChosenPlaces of_token = places_of(call_, tokens_->row[first_ + row + r]);
      for (int64_t k = 0; k < of_token.count; ++k) {
        const int64_t column = chosen_column(call_, id_at(call_.ids, of_token, k));
        if (column < 0) continue;
        columns[count] = column;
        places[count++] = {r, &element_at(call_.logits_at, of_token, k)};
        if (count == vocab_tile) make();
      }
    }
    make();
  });
}

void LinearRun::keep_row(int64_t tile, int64_t n, const float* z) const {
  const TileRows rows = kept_tile(tile);
  char* to = rows.at(n);
  if (exponentials()) {
    const float anchor = kept_row(*tokens_, first_ + n)->target_logit;
    store_exponentials(z, anchor, tile_width(tile), reinterpret_cast<uint16_t*>(to));
  } else {
    store_from_f32(z, tile_width(tile), DType::f32, to);
  }
}

// Writes the chunk's rows of kept_rows.
void LinearRun::keep_states() {
  for (int64_t n = 0; n < count_; ++n) {
    const RowState& state = states()[first_ + n];
    KeptRow* row = kept_row(*tokens_, first_ + n);
    const bool rounded = exponentials() && kept_ > 0;
    const float anchor = rounded ? row->target_logit : state.target_logit;
    const double above = static_cast<double>(anchor) - state.reference;
    // NaN does not fit. In a shard without the target, logits may be far below the anchor: such
    // exponentials are negligible compared with the target's.
    const bool elsewhere = tokens_->target[first_ + n] < 0;
    const bool fits = above >= -most_below && (elsewhere || above - state.log_sum <= most_above);
    *row = {.reference = state.reference,
            .log_sum = state.log_sum,
            .target_logit = anchor,
            .rest = static_cast<float>(-std::expm1(std::min(above - state.log_sum, 0.0))),
            .overwritten = rounded && !fits ? 1.0f : 0.0f,
            .layout = exponentials() ? exponentials_layout : logits_layout,
            .columns = static_cast<float>(kept_),
            .unused = 0};
  }
}

// Where the forward pass writes a tile's logits; a product writes whole tiles.
float* LinearRun::logits_of(int64_t tile, const Lane& lane) const {
  if (plan_.stored) {
    return at<float>(plan_.logits_at) + tile * plan_.token_chunk * vocab_tile;
  }
  if (!is_kept(tile) || exponentials() || tile_width(tile) < vocab_tile) return lane.tile;
  return reinterpret_cast<float*>(kept_tile(tile).data);
}

void LinearRun::forward_pass() {
  for (int64_t n = 0; n < count_; ++n) {
    states()[first_ + n].target_logit = -std::numeric_limits<float>::infinity();
  }
  const bool counts_above = wants_.sums.has(SumKind::above), targets_only = call_.targets_only();
  const bool needs_targets = targets_only && call_.target_logit;
  if (counts_above || keeps_exponentials() || needs_targets) find_anchors();
  if (targets_only && call_.logits_at) find_chosen();
  if (targets_only) return;
  for (int64_t lane = 0; shape_.listed > 0 && lane < plan_.lanes; ++lane) {
    lists_of(lane).clear(count_);
  }
  for_each_task(executor_, plan_.lanes, plan_.vocab_tiles, [&](int64_t tile, int64_t index) {
    const Lane lane = this->lane(index);
    load_vectors(tile, lane);
    compute_tile(tile, lane, logits_of(tile, lane), true);
    if (shape_.listed > 0) list_tile(tile, index, logits_of(tile, lane));
  });
  combine_blocks();
  if (call_.forward && call_.kept_rows) keep_states();
}

void LinearRun::list_tile(int64_t tile, int64_t index, const float* logits) const {
  const TopLists lists = lists_of(index);
  const int64_t first = tile * vocab_tile;
  for (int64_t n = 0; n < count_; ++n) {
    lists.add(n, logits + n * vocab_tile, tile_width(tile), call_.vocab_start() + first);
  }
}

// A token's columns are totally ordered, so its list does not depend on which thread had which
// tile.
void LinearRun::write_list(int64_t n) const {
  const int64_t i = tokens_->row[first_ + n];
  if (std::isnan(states()[first_ + n].reference)) return write_without_order(call_, i);
  const TopLists all = lists_of(0);
  for (int64_t lane = 1; lane < plan_.lanes; ++lane) all.add(n, lists_of(lane));
  all.write(call_, n, i);
}

void LinearRun::combine_blocks() {
  const BlockState* blocks = at<BlockState>(plan_.blocks_at);
  const RareBlock* rare_blocks = wants_.rare() ? at<RareBlock>(plan_.rare_blocks_at) : nullptr;
  for_each_token([&](int64_t n) {
    const RowAccumulator row = sum_of_tiles(n, blocks, rare_blocks, wants_.sums);
    RowState& state = states()[first_ + n];
    const float target_logit = state.target_logit;
    state = row.finish(wants_.sums);
    state.target_logit = target_logit;
    if (wants_.rare()) rare()[first_ + n] = row.finish_rare(call_.vocab_total());
    if (shape_.listed > 0) write_list(n);
  });
}

void LinearRun::form_row(int64_t tile, const Lane& lane, const TileRows& rows, int64_t n,
                         float* row) const {
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  const float* class_weight = call_.vocab_weight ? lane.class_weight : nullptr;
  const bool rounded = reads_kept(tile) && exponentials();
  const char* held = rows.at(n);
  const float* z = reinterpret_cast<const float*>(held);
  const RowGradient& g = gradients()[n];
  const LogitMap map = map_of(n);
  float anchor = 0;
  if (rounded) {
    anchor = kept_row(*tokens_, first_ + n)->target_logit;
    load_as_f32(held, DType::bf16, width, row);
    exponentials_gradient(map, g, row, anchor, class_weight, width, row);
  } else {
    gradient_block(map, g, z, class_weight, width, row);
  }
  const int64_t target = tokens_->target[first_ + n] - first;
  if (tokens_->target[first_ + n] >= 0 && target >= 0 && target < width) {
    row[target] = target_gradient(map, g, rounded ? anchor : z[target],
                                  class_weight != nullptr ? class_weight[target] : 1.0f);
  }
  if (shape_.chooses()) add_chosen(map, tile, n, rounded ? nullptr : z, class_weight, row);
}

// Adds the gradients of the chosen columns to a row. The target's part is computed from p and 1 -
// p, and the chosen gradients are added to the subtracted part, so that nothing cancels where p is
// near 1. A rounded exponential gives p too coarsely for that; then z is null, and there is no
// softcap.
void LinearRun::add_chosen(const LogitMap& map, int64_t tile, int64_t n, const float* z,
                           const float* class_weight, float* row) const {
  const int64_t first = tile * vocab_tile;
  const auto chosen = chosen_.within(n, first, tile_width(tile));
  for (size_t next = 0; next < chosen.size();) {
    const int64_t column = chosen[next].column, j = column - first;
    float sum = 0;
    for (; next < chosen.size() && chosen[next].column == column; ++next) {
      sum += chosen[next].gradient;
    }
    if (z == nullptr) {
      row[j] += static_cast<float>(sum * slope_at(map, 0));
      continue;
    }
    RowGradient g = gradients()[n];
    g.onehot = (column == tokens_->target[first_ + n] ? g.onehot : 0) - sum;
    row[j] = target_gradient(map, g, z[j], class_weight != nullptr ? class_weight[j] : 1.0f);
  }
}

// The rows from which a tile's gradients are computed: stored, kept, or computed again.
TileRows LinearRun::tile_rows(int64_t tile, const Lane& lane) const {
  constexpr int64_t stride = vocab_tile * sizeof(float);
  if (plan_.stored)
    return {at<char>(plan_.logits_at) + tile * plan_.token_chunk * stride, stride, nullptr};
  if (reads_kept(tile)) return kept_tile(tile);
  compute_tile(tile, lane, lane.tile, false);
  return {reinterpret_cast<char*>(lane.tile), stride, nullptr};
}

void LinearRun::gradient_pass(bool first_chunk) {
  LinearProducts::gradient_pass(first_chunk, [&](int64_t tile, const Lane& lane, bool) {
    load_vectors(tile, lane);
    const TileRows rows = tile_rows(tile, lane);
    return [this, tile, rows, &lane](int64_t n, float* row) { form_row(tile, lane, rows, n, row); };
  });
}

void LinearRun::check_kept(const Tokens& tokens) {
  const float layout = exponentials() ? exponentials_layout : logits_layout;
  const auto same = [](float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
  };
  for (int64_t i = 0; i < tokens.valid; ++i) {
    const KeptRow& row = *kept_row(tokens, i);
    RowState& state = states()[i];
    // A shard gets the state of the whole vocabulary, whose lse is at least the shard's own, up to
    // rounding.
    const bool is_its =
        call_.shard()
            ? !((row.reference - state.reference) + (row.log_sum - state.log_sum) > kept_tolerance)
            : same(row.reference, state.reference) && same(row.log_sum, state.log_sum);
    if (is_its && row.layout == layout && row.columns == static_cast<float>(kept_)) {
      continue;
    }
    state.reference = std::numeric_limits<float>::quiet_NaN();
    if (call_.fault) *call_.fault.as<int32_t>() |= 2;
  }
}

void LinearRun::consume_kept(const Tokens& tokens) {
  KeptRow* rows = call_.kept_rows.as<KeptRow>();
  for (int64_t i = 0; i < tokens.total; ++i) {
    const int64_t target = int_at(call_.target, i);
    const bool inside = target >= 0 && target < call_.vocab_total();
    if (inside && target != call_.options.ignore_index) rows[i].layout = 0;
  }
}

// Loads the row states that Forward wrote.
void load_states(const Call& call, const Tokens& tokens, RowState* states) {
  for (int64_t i = 0; i < tokens.valid; ++i) {
    const int64_t row = tokens.row[i];
    states[i] = {.reference = f32_at(call.row_reference, row),
                 .log_sum = f32_at(call.row_log_sum, row)};
  }
}

}  // namespace

int64_t columns_kept(const Call& call) {
  return call.diverges || cpu_keeps(call.input.dtype, call.options) ? kept_columns(call) : 0;
}

LinearShape shape_of(const Call& call) {
  const int64_t kept = call.gradients ? columns_kept(call) : 0;
  return {.tokens = call.tokens(),
          .vocab = call.vocab(),
          .hidden = call.hidden(),
          .teacher_hidden = call.teacher_is_head() ? call.teacher_input.shape[1] : 0,
          .dtype = call.input.dtype,
          .diverges = call.diverges,
          .forward = call.diverges ? kept == 0 : !call.state_given(),
          .grad_input = static_cast<bool>(call.grad_input),
          .grad_weight = static_cast<bool>(call.grad_weight),
          .grad_bias = static_cast<bool>(call.grad_bias),
          .direct_grad_weight = !call.grad_weight || (call.grad_weight.dtype == DType::f32 &&
                                                      call.grad_weight.stride[1] == 1),
          .bias = call.bias || call.teacher_bias,
          .class_weight = static_cast<bool>(call.vocab_weight),
          .kept = kept,
          .places = places(call),
          .sums = call.sums(),
          .chosen = call.targets_only() ? 0 : call.chosen(),
          .chosen_of_lists = call.targets_only() || !call.lists() ? 0 : call.all_chosen(),
          .listed = call.listed()};
}

Status linear_workspace(const Call& call, uint64_t given, WorkspaceSize* size) {
  const LinearShape shape = shape_of(call);
  const int64_t threads = executor_of(call.execution).num_threads;
  size->minimum = plan_linear(shape, 0, 1).bytes;
  size->alignment = 64;
  if (given >= size->minimum) return {};
  size->recommended = std::max(size->minimum, recommended_plan(shape, threads).bytes);
  return {};
}

LinearPlan linear_plan(const Call& call, uint64_t bytes) {
  return plan_linear(shape_of(call), bytes, executor_of(call.execution).num_threads);
}

Status run_linear(const Call& call, const LinearPlan& plan, const Workspace& workspace) {
  const LinearShape shape = shape_of(call);
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  Status status = prepare_tokens(call, shape.vocab, memory + plan.tokens_at, &tokens);
  if (!status.ok()) return status;

  if (call.logits_at) fill(call.logits_at, -std::numeric_limits<float>::infinity());
  if (call.top_logits) clear_lists(call);
  LinearRun linear(call, shape, plan, memory);
  if (!shape.forward) load_states(call, tokens, linear.states());
  if (!call.forward && call.kept) linear.check_kept(tokens);
  for (int64_t first = 0; first < tokens.valid; first += plan.token_chunk) {
    const int64_t count = std::min(plan.token_chunk, tokens.valid - first);
    linear.begin_chunk(tokens, first, count);
    linear.pack_input();
    if (shape.forward) linear.forward_pass();
    if (call.gradients) {
      for (int64_t k = first; k < first + count; ++k) {
        RowState& state = linear.states()[k];
        if (!call.forward && call.entropy) state.entropy = f32_at(call.entropy, tokens.row[k]);
        linear.gradients()[k - first] = token_gradient(call, tokens, k, state);
      }
      linear.gradient_pass(first == 0);
    }
  }
  if (call.gradients) linear.finish(tokens, tokens.valid > 0);
  if (call.consume_kept) linear.consume_kept(tokens);
  if (call.forward) write_tokens(call, tokens, linear.states(), linear.rare());
  return {};
}

}  // namespace logitless::cpu

// A rounded exponential gives a softcap's slope too coarsely.
bool logitless::cpu_keeps(DType dtype, const LossOptions& options) {
  return dtype == DType::f32 || (dtype == DType::bf16 && options.softcap == 0);
}
