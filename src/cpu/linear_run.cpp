// SPDX-License-Identifier: Apache-2.0
// This file runs the linear ops on the CPU: tokens are prepared once, then each chunk has its
// forward pass, coefficients and gradient pass. docs/semantics.md has the formulas,
// docs/kernels/cpu.md the schedule, tile sizes and measurements. Forward may keep what Backward
// then reads in place of logits, of compacted tokens:
//   kept  [tile][R][192]  the last tile as narrow as whole blocks of 64; of f32 the logits z, of
//                         bf16 E = exp(z - z_t)
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/backend.h"
#include "src/cpu/ops.h"
#include "src/cpu/plan.h"
#include "src/cpu/row_kernels.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"
#include "src/kept.h"
#include "src/rounding.h"

namespace logitless::cpu {
namespace {

// Each row of kept_rows says by one of these what the kept columns hold; 0 says that they hold
// nothing any more.
constexpr float logits_layout = 1, exponentials_layout = 2;
// E keeps its bits where the target's logit lies at most so far below the row's maximum, and not
// above its lse by more than rounding.
constexpr double most_below = 60, most_above = 0.5;

// The gradient pass reads a tile's rows like this.
struct TileRows {
  char* data;
  int64_t stride;        // it counts bytes
  bool exponentials;     // the rows hold E in bf16; else z in f32
  const int64_t* place;  // [count]  the rows' places; where it is null they lie one after the other
  char* at(int64_t n) const { return data + (place != nullptr ? place[n] : n) * stride; }
};

class LinearRun {
 public:
  LinearRun(const Call& call, const LinearShape& shape, const LinearPlan& plan, char* memory)
      : call_(call),
        shape_(shape),
        plan_(plan),
        memory_(memory),
        executor_(executor_of(call.execution)),
        map_(logit_map(call.options)),
        kept_(columns_kept(call)),
        wants_{call.sums()} {}

  // Begins the chunk of compacted tokens [first, first + count).
  void begin_chunk(const Tokens& tokens, int64_t first, int64_t count);
  // Packs the chunk's input for the products.
  void pack_input();
  // Makes logits tile by tile and from them the states (all but the coefficients); the logits stay
  // where the plan stores them or the call keeps them.
  void forward_pass();
  // Adds to grad_weight and grad_bias, and writes grad_input of the chunk's rows. `gradients` is
  // [count].
  void gradient_pass(bool first_chunk);
  // Runs once after the last chunk (or with none): it rounds sums and writes what no token reached.
  void finish(const Tokens& tokens, bool any_chunk);
  // Sets, in Backward, the state of every row whose kept state is not this call's to NaN, and
  // `fault`.
  void check_kept(const Tokens& tokens);
  // Says in every row, without a gradient or with one, that its kept state is used up.
  void consume_kept(const Tokens& tokens);

  RowState* states() const { return at<RowState>(plan_.states_at); }  // [N]
  // [N]  It returns null where none of them is asked for.
  RareStatistics* rare() const {
    return wants_.rare() ? at<RareStatistics>(plan_.rare_at) : nullptr;
  }
  RowGradient* gradients() const { return at<RowGradient>(plan_.gradients_at); }  // [chunk]

 private:
  struct Lane;
  struct Panels {
    int64_t first, count;
  };
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  Lane lane(int64_t index) const;
  int64_t tile_width(int64_t tile) const;
  bool exponentials() const { return call_.input.dtype != DType::f32; }
  bool keeps_exponentials() const { return call_.forward && kept_ > 0 && exponentials(); }
  // The chunk's n-th token has a map of its own where temperatures are given.
  LogitMap map_of(int64_t n) const { return cpu::map_of(map_, *tokens_, first_ + n); }
  KeptRow* kept_row(const Tokens& tokens, int64_t token) const {
    return call_.kept_rows.as<KeptRow>() + tokens.row[token];
  }
  TileRows kept_tile(int64_t tile) const;
  bool is_kept(int64_t tile) const { return tile * vocab_tile < kept_; }
  bool makes_logits() const { return shape_.forward || !reads_kept_ || kept_ < shape_.vocab; }
  void find_anchors();
  void keep_row(int64_t tile, int64_t n, const float* z) const;
  void keep_states();
  void multiply_input(int64_t row, int64_t rows, const Source& weight, int64_t first, int64_t width,
                      const Lane& lane, float* c) const;
  float* logits_of(int64_t tile, const Lane& lane) const;
  TileRows tile_rows(int64_t tile, const Lane& lane) const;
  void load_vectors(int64_t tile, const Lane& lane) const;
  void compute_tile(int64_t tile, const Lane& lane, float* logits, bool forward) const;
  void combine_blocks();
  void form_gradient(int64_t tile, const Lane& lane, const TileRows& rows, bool sum_bias) const;
  void input_product(int64_t tile, const Lane& lane, Panels panels, float* slot,
                     bool accumulate) const;
  void weight_product(int64_t tile, const Lane& lane, Panels panels, bool first_chunk) const;
  void reduce_slots();

  const Call& call_;
  const LinearShape& shape_;
  const LinearPlan& plan_;
  char* memory_;
  const Executor& executor_;
  LogitMap map_;
  int64_t kept_;  // so many columns are kept, or were
  BlockWants wants_;
  const Tokens* tokens_ = nullptr;
  int64_t first_ = 0, count_ = 0;
  int64_t padded_count_ = 0;  // it is a multiple of the engine's token_multiple
  bool reads_kept_ = false;   // Backward finds the chunk's kept columns fit to be read
};

Source source_of(const TensorView& view, const int64_t* row_index) {
  return {view.as<const char>(), view.dtype, view.stride[0], view.stride[1], row_index};
}

float element_as_f32(const TensorView& view, int64_t index) {
  float value;
  const int64_t offset = index * view.stride[0] * size_of(view.dtype);
  load_as_f32(view.as<const char>() + offset, view.dtype, 1, &value);
  return value;
}

// Loads count elements of a vector view as f32, followed by zeros up to vocab_tile.
void load_vector(const TensorView& view, int64_t first, int64_t count, float* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = element_as_f32(view, first + j);
  std::fill(to + count, to + vocab_tile, 0.0f);
}

// Adds the rows [count, vocab_tile] to sum, in pairs, and destroys them. Beside one large term, a
// target's, the small ones of many tokens must not be added one by one.
void add_rows(float* rows, int64_t count, int64_t width, float* sum) {
  for (int64_t step = 1; step < count; step *= 2) {
    for (int64_t r = 0; r + step < count; r += 2 * step) {
      add_scaled(rows + (r + step) * vocab_tile, 0, 1.0f, 1, width, false, rows + r * vocab_tile,
                 0);
    }
  }
  add_scaled(rows, 0, 1.0f, 1, width, false, sum, 0);
}

// Writes rows of a [rows, columns] f32 matrix, times scale, to a view of any dtype and stride. A
// null `from` writes zeros. `accumulate` adds to what f32 rows hold.
void store_rows(const float* from, int64_t from_stride, float scale, int64_t row0, int64_t rows,
                int64_t column0, int64_t columns, const TensorView& to, bool accumulate = false) {
  constexpr int64_t step = 256;
  alignas(64) float scaled[step] = {};
  const int64_t size = size_of(to.dtype);
  for (int64_t r = 0; r < rows; ++r) {
    char* row = to.as<char>() + (row0 + r) * to.stride[0] * size;
    for (int64_t j = 0; j < columns; j += step) {
      const int64_t count = std::min(step, columns - j);
      if (from != nullptr)
        add_scaled(from + r * from_stride + j, 0, scale, 1, count, true, scaled, 0);
      char* out = row + (column0 + j) * to.stride[1] * size;
      if (accumulate) {
        const float* old = reinterpret_cast<const float*>(out);
        for (int64_t i = 0; i < count; ++i) scaled[i] += old[i * to.stride[1]];
      }
      if (to.stride[1] == 1) {
        store_from_f32(scaled, count, to.dtype, out);
      } else {
        for (int64_t i = 0; i < count; ++i)
          store_from_f32(scaled + i, 1, to.dtype, out + i * to.stride[1] * size);
      }
    }
  }
}

// A thread has this scratch.
struct LinearRun::Lane {
  void* weight_block;   // [vocab_tile / b_columns][depth_block][b_columns]
  float* tile;          // [chunk][vocab_tile]
  void* along_vocab;    // it is G as A panels, with k along the vocabulary
  void* along_tokens;   // it is G^T as A panels, with k along the tokens
  void* weight_panels;  // [panel_group][vocab_tile][b_columns]
  float* product;       // [vocab_tile][panel_group * b_columns]
  float* rows;          // [gradient_group][vocab_tile]
  float* bias;          // [vocab_tile]
  float* class_weight;  // [vocab_tile]
};

LinearRun::Lane LinearRun::lane(int64_t index) const {
  char* base = memory_ + plan_.lanes_at + index * plan_.lane_bytes;
  return {base + plan_.weight_block_at,
          reinterpret_cast<float*>(base + plan_.tile_at),
          base + plan_.along_vocab_at,
          base + plan_.along_tokens_at,
          base + plan_.weight_panels_at,
          reinterpret_cast<float*>(base + plan_.product_at),
          reinterpret_cast<float*>(base + plan_.rows_at),
          reinterpret_cast<float*>(base + plan_.bias_at),
          reinterpret_cast<float*>(base + plan_.class_weight_at)};
}

int64_t LinearRun::tile_width(int64_t tile) const {
  return std::min(vocab_tile, shape_.vocab - tile * vocab_tile);
}

void LinearRun::begin_chunk(const Tokens& tokens, int64_t first, int64_t count) {
  tokens_ = &tokens;
  first_ = first;
  count_ = count;
  const int64_t multiple = plan_.engine.token_multiple();
  padded_count_ = (count + multiple - 1) / multiple * multiple;
  reads_kept_ = !call_.forward && kept_ > 0;
  for (int64_t n = 0; reads_kept_ && exponentials() && n < count; ++n) {
    reads_kept_ = kept_row(tokens, first + n)->overwritten == 0;
  }
}

TileRows LinearRun::kept_tile(int64_t tile) const {
  const int64_t first = tile * vocab_tile, size = size_of(call_.kept.dtype);
  const int64_t stride = std::min(vocab_tile, round_up(kept_ - first, kept_block)) * size;
  char* data = call_.kept.as<char>() + first * kept_rows_of(shape_.tokens) * size;
  if (tokens_->place != nullptr) return {data, stride, exponentials(), tokens_->place + first_};
  return {data + first_ * stride, stride, exponentials(), nullptr};
}

void LinearRun::pack_input() {
  const Engine& engine = plan_.engine;
  const Source source = source_of(call_.input, tokens_->row + first_);
  const int64_t group = std::max<int64_t>(engine.a_rows, 32), hidden = shape_.hidden;
  char* along = at<char>(plan_.input_along_at);
  const int64_t groups = makes_logits() ? (count_ + group - 1) / group : 0;
  for_each_task(executor_, plan_.lanes, groups, [&](int64_t task, int64_t) {
    const int64_t row = task * group;
    pack_a_along_columns(engine, source, row, std::min(group, count_ - row), 0, hidden,
                         along + row * plan_.padded_hidden_a * engine.element);
  });
  if (!call_.grad_weight) return;
  // A task takes a group of hidden panels and all tokens of the chunk, with k along the tokens.
  const int64_t columns = engine.b_columns;
  char* across = at<char>(plan_.input_across_at);
  for_each_task(executor_, plan_.lanes, engine.b_panels(hidden), [&](int64_t panel, int64_t) {
    const int64_t column = panel * columns;
    char* to = across + panel * columns * padded_count_ * engine.element;
    pack_b_along_rows(engine, source, 0, count_, column, std::min(columns, hidden - column), to);
    // The depth is padded_count_, so rows beyond the packed ones must be zero.
    const int64_t packed = engine.padded_k(count_);
    std::memset(to + columns * packed * engine.element, 0,
                columns * (padded_count_ - packed) * engine.element);
  });
}

void LinearRun::load_vectors(int64_t tile, const Lane& lane) const {
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  if (call_.bias) load_vector(call_.bias, first, width, lane.bias);
  if (call_.vocab_weight)
    load_vector(call_.vocab_weight, call_.vocab_start() + first, width, lane.class_weight);
}

// Makes c [rows, vocab_tile] = the chunk's rows from `row` on, in whole panels, times `width` rows
// of weight.
void LinearRun::multiply_input(int64_t row, int64_t rows, const Source& weight, int64_t first,
                               int64_t width, const Lane& lane, float* c) const {
  const Engine& engine = plan_.engine;
  const int64_t hidden = shape_.hidden, row_bytes = plan_.padded_hidden_a * engine.element;
  const char* input = at<char>(plan_.input_along_at) + row * row_bytes;
  const Product whole{.a = input,
                      .a_panel_stride = engine.a_rows * row_bytes,
                      .a_panels = engine.a_panels(rows),
                      .k = engine.padded_k(hidden),
                      .c = c,
                      .c_stride = vocab_tile};
  if (multiply_unpacked(engine, weight, first, width, hidden, whole)) return;
  for (int64_t k = 0; k < hidden; k += plan_.depth_block) {
    const int64_t depth = std::min(plan_.depth_block, hidden - k), padded = engine.padded_k(depth);
    pack_b_along_columns(engine, weight, first, width, k, depth, lane.weight_block);
    multiply(engine, {.a = input + k * engine.a_rows * engine.element,
                      .a_panel_stride = engine.a_rows * row_bytes,
                      .a_panels = engine.a_panels(rows),
                      .b = lane.weight_block,
                      .b_panel_stride = engine.b_columns * padded * engine.element,
                      .b_panels = engine.b_panels(width),
                      .k = padded,
                      .c = c,
                      .c_stride = vocab_tile,
                      .accumulate = k > 0});
  }
}

// Makes the logits [padded_count][vocab_tile] of a tile. Without `forward` this is a second
// product, whose states are known.
void LinearRun::compute_tile(int64_t tile, const Lane& lane, float* logits, bool forward) const {
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  multiply_input(0, count_, source_of(call_.weight, nullptr), first, width, lane, logits);
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
    if (forward && is_kept(tile)) keep_row(tile, n, row);
  }
}

// z_t must be known before any tile is, because E is relative to it and a rank is counted with it.
// It comes of the same sums as in its tile: a token's target is one of as many columns as there are
// tokens in the product.
void LinearRun::find_anchors() {
  constexpr int64_t group = target_group;
  const bool targets_only = call_.targets_only();
  for_each_task(executor_, plan_.lanes, divide_up(count_, group), [&](int64_t task, int64_t index) {
    const Lane lane = this->lane(index);
    const int64_t row = task * group, rows = std::min(group, count_ - row);
    int64_t columns[group];  // of a target that another shard has any column stands in
    for (int64_t r = 0; r < rows; ++r) {
      columns[r] = std::max<int64_t>(tokens_->target[first_ + row + r], 0);
    }
    multiply_input(row, rows, source_of(call_.weight, columns), 0, rows, lane, lane.tile);
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

void LinearRun::keep_row(int64_t tile, int64_t n, const float* z) const {
  const TileRows rows = kept_tile(tile);
  char* to = rows.at(n);
  if (rows.exponentials) {
    const float anchor = kept_row(*tokens_, first_ + n)->target_logit;
    store_exponentials(z, anchor, tile_width(tile), reinterpret_cast<uint16_t*>(to));
  } else {
    store_from_f32(z, tile_width(tile), DType::f32, to);
  }
}

// Completes the chunk's rows of kept_rows.
void LinearRun::keep_states() {
  for (int64_t n = 0; n < count_; ++n) {
    const RowState& state = states()[first_ + n];
    KeptRow* row = kept_row(*tokens_, first_ + n);
    const bool rounded = exponentials() && kept_ > 0;
    const float anchor = rounded ? row->target_logit : state.target_logit;
    const double above = static_cast<double>(anchor) - state.reference;
    // A NaN does not fit. A shard without the target may lie far below its anchor: beside the
    // target such exponentials are nothing.
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

// Returns where the forward pass makes a tile's logits; a product writes whole tiles.
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
  if (counts_above || keeps_exponentials() || targets_only) find_anchors();
  if (targets_only) return;
  for_each_task(executor_, plan_.lanes, plan_.vocab_tiles, [&](int64_t tile, int64_t index) {
    const Lane lane = this->lane(index);
    load_vectors(tile, lane);
    compute_tile(tile, lane, logits_of(tile, lane), true);
  });
  combine_blocks();
  if (call_.forward && call_.kept_rows) keep_states();
}

void LinearRun::combine_blocks() {
  constexpr int64_t group = 16;
  const BlockState* blocks = at<BlockState>(plan_.blocks_at);
  const RareBlock* rare_blocks = at<RareBlock>(plan_.rare_blocks_at);
  for_each_task(executor_, plan_.lanes, (count_ + group - 1) / group, [&](int64_t task, int64_t) {
    for (int64_t n = task * group; n < std::min(count_, (task + 1) * group); ++n) {
      RowAccumulator row = RowAccumulator::begin();
      for (int64_t tile = 0; tile < plan_.vocab_tiles; ++tile) {
        const int64_t block = tile * plan_.token_chunk + n;
        row.add(blocks[block], tile * vocab_tile, wants_.sums,
                wants_.rare() ? &rare_blocks[block] : nullptr);
      }
      RowState& state = states()[first_ + n];
      const float target_logit = state.target_logit;
      state = row.finish(wants_.sums);
      state.target_logit = target_logit;
      if (wants_.rare()) rare()[first_ + n] = row.finish_rare(call_.vocab_total());
    }
  });
}

// Forms G of a tile, row group by row group, packed both ways.
void LinearRun::form_gradient(int64_t tile, const Lane& lane, const TileRows& rows,
                              bool sum_bias) const {
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  const float* class_weight = call_.vocab_weight ? lane.class_weight : nullptr;
  float* bias_sum = at<float>(plan_.bias_sum_at) + first;
  for (int64_t n0 = 0; n0 < padded_count_; n0 += gradient_group) {
    const int64_t group = std::min(gradient_group, padded_count_ - n0);
    for (int64_t r = 0; r < group; ++r) {
      float* row = lane.rows + r * vocab_tile;
      const int64_t n = n0 + r;
      if (n >= count_) {
        std::fill(row, row + vocab_tile, 0.0f);
        continue;
      }
      const char* held = rows.at(n);
      const float* z = reinterpret_cast<const float*>(held);
      const RowGradient& g = gradients()[n];
      const LogitMap map = map_of(n);
      float anchor = 0;
      if (rows.exponentials) {
        anchor = kept_row(*tokens_, first_ + n)->target_logit;
        load_as_f32(held, DType::bf16, width, row);
        exponentials_gradient(map, g, row, anchor, class_weight, width, row);
      } else {
        gradient_block(map, g, z, class_weight, width, row);
      }
      std::fill(row + width, row + vocab_tile, 0.0f);
      const int64_t target = tokens_->target[first_ + n] - first;
      if (tokens_->target[first_ + n] >= 0 && target >= 0 && target < width) {
        row[target] = target_gradient(map, g, rows.exponentials ? anchor : z[target],
                                      class_weight != nullptr ? class_weight[target] : 1.0f);
      }
    }
    pack_gradient(plan_.engine, lane.rows, n0, group, padded_count_,
                  call_.grad_input ? lane.along_vocab : nullptr,
                  call_.grad_weight ? lane.along_tokens : nullptr);
    if (sum_bias) add_rows(lane.rows, group, width, bias_sum);
  }
}

// Makes slot[n, columns] (+)= sum over the tile's columns of G[n, v] weight[v, columns], for some
// hidden panels.
void LinearRun::input_product(int64_t tile, const Lane& lane, Panels panels, float* slot,
                              bool accumulate) const {
  const Engine& engine = plan_.engine;
  const int64_t width = tile_width(tile), column = panels.first * engine.b_columns;
  pack_b_along_rows(engine, source_of(call_.weight, nullptr), tile * vocab_tile, width, column,
                    std::min(panels.count * engine.b_columns, shape_.hidden - column),
                    lane.weight_panels);
  multiply(engine, {.a = lane.along_vocab,
                    .a_panel_stride = engine.a_rows * vocab_tile * engine.element,
                    .a_panels = padded_count_ / engine.a_rows,
                    .b = lane.weight_panels,
                    .b_panel_stride = engine.b_columns * engine.padded_k(width) * engine.element,
                    .b_panels = panels.count,
                    .k = engine.padded_k(width),
                    .c = slot + column,
                    .c_stride = plan_.padded_hidden_b,
                    .accumulate = accumulate});
}

// Makes grad_weight[tile, columns] (+)= scale sum over the chunk's tokens of G[n, v] input[n,
// columns].
void LinearRun::weight_product(int64_t tile, const Lane& lane, Panels panels,
                               bool first_chunk) const {
  const Engine& engine = plan_.engine;
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  const int64_t column = panels.first * engine.b_columns;
  const int64_t columns = std::min(panels.count * engine.b_columns, shape_.hidden - column);
  const int64_t panel_stride = engine.b_columns * padded_count_ * engine.element;
  const int64_t product_stride = panel_group * engine.b_columns;
  const float scale = tokens_->gradient_scale;
  const bool overwrite = first_chunk && !call_.accumulate;
  // The f32 sum lies in the workspace or in the output itself, or nowhere if a single chunk is
  // rounded at once.
  float* sum = nullptr;
  int64_t stride = 0;
  if (plan_.weight_sum) {
    stride = shape_.hidden;
    sum = at<float>(plan_.weight_sum_at) + first * stride + column;
  } else if (shape_.direct_grad_weight) {
    stride = call_.grad_weight.stride[0];
    sum = call_.grad_weight.as<float>() + first * stride + column;
  }
  multiply(engine, {.a = lane.along_tokens,
                    .a_panel_stride = engine.a_rows * padded_count_ * engine.element,
                    .a_panels = engine.a_panels(width),
                    .b = at<char>(plan_.input_across_at) + panels.first * panel_stride,
                    .b_panel_stride = panel_stride,
                    .b_panels = panels.count,
                    .k = padded_count_,
                    .c = lane.product,
                    .c_stride = product_stride,
                    .accumulate = false});
  if (sum != nullptr) {
    add_scaled(lane.product, product_stride, scale, width, columns,
               plan_.weight_sum ? first_chunk : overwrite, sum, stride);
  } else {
    store_rows(lane.product, product_stride, scale, first, width, column, columns,
               call_.grad_weight, call_.accumulate);
  }
}

// A tile's gradients are formed of these rows, made again where they are neither stored nor kept.
TileRows LinearRun::tile_rows(int64_t tile, const Lane& lane) const {
  constexpr int64_t stride = vocab_tile * sizeof(float);
  if (plan_.stored)
    return {at<char>(plan_.logits_at) + tile * plan_.token_chunk * stride, stride, false, nullptr};
  if (reads_kept_ && is_kept(tile)) return kept_tile(tile);
  compute_tile(tile, lane, lane.tile, false);
  return {reinterpret_cast<char*>(lane.tile), stride, false, nullptr};
}

void LinearRun::gradient_pass(bool first_chunk) {
  const int64_t panels = plan_.engine.b_panels(shape_.hidden);
  // More threads than slots share the hidden axis, which changes no bit; each part forms G anew.
  const int64_t parts = std::clamp<int64_t>((plan_.lanes + plan_.slots - 1) / plan_.slots, 1,
                                            most_gradient_parts(panels));
  float* slots = at<float>(plan_.slots_at);
  if (first_chunk && call_.grad_bias) {
    std::fill_n(at<float>(plan_.bias_sum_at), plan_.vocab_tiles * vocab_tile, 0.0f);
  }
  for_each_task(executor_, plan_.lanes, plan_.slots * parts, [&](int64_t task, int64_t index) {
    const Lane lane = this->lane(index);
    const int64_t slot = task / parts, part = task % parts;
    const int64_t begin = slot * plan_.vocab_tiles / plan_.slots,
                  end = (slot + 1) * plan_.vocab_tiles / plan_.slots;
    float* slot_sum = slots + slot * plan_.token_chunk * plan_.padded_hidden_b;
    for (int64_t tile = begin; tile < end; ++tile) {
      load_vectors(tile, lane);
      form_gradient(tile, lane, tile_rows(tile, lane), call_.grad_bias && part == 0);
      const int64_t last = (part + 1) * panels / parts;
      for (int64_t panel = part * panels / parts; panel < last; panel += panel_group) {
        const Panels group{panel, std::min(panel_group, last - panel)};
        if (call_.grad_input) input_product(tile, lane, group, slot_sum, tile > begin);
        if (call_.grad_weight) weight_product(tile, lane, group, first_chunk);
      }
    }
  });
  if (call_.grad_input) reduce_slots();
}

// Adds the slots in order and rounds each row once.
void LinearRun::reduce_slots() {
  constexpr int64_t group = 4;
  const int64_t stride = plan_.padded_hidden_b, hidden = shape_.hidden;
  float* slots = at<float>(plan_.slots_at);
  for_each_task(executor_, plan_.lanes, (count_ + group - 1) / group, [&](int64_t task, int64_t) {
    for (int64_t n = task * group; n < std::min(count_, (task + 1) * group); ++n) {
      float* sum = slots + n * stride;
      for (int64_t slot = 1; slot < plan_.slots; ++slot) {
        add_scaled(sum + slot * plan_.token_chunk * stride, 0, 1.0f, 1, hidden, false, sum, 0);
      }
      store_rows(sum, 0, tokens_->gradient_scale, tokens_->row[first_ + n], 1, 0, hidden,
                 call_.grad_input);
    }
  });
}

void LinearRun::finish(const Tokens& tokens, bool any_chunk) {
  const int64_t vocab = shape_.vocab, hidden = shape_.hidden;
  if (call_.grad_input) {
    // These are the rows of tokens that do not count.
    int64_t next = 0;
    for (int64_t n = 0; n < shape_.tokens; ++n) {
      if (next < tokens.valid && tokens.row[next] == n) {
        ++next;
      } else {
        store_rows(nullptr, 0, 0, n, 1, 0, hidden, call_.grad_input);
      }
    }
  }
  if (call_.grad_weight && (plan_.weight_sum || !any_chunk) && !(call_.accumulate && !any_chunk)) {
    const float* sum = any_chunk ? at<float>(plan_.weight_sum_at) : nullptr;
    for_each_task(executor_, plan_.lanes, plan_.vocab_tiles, [&](int64_t tile, int64_t) {
      const int64_t first = tile * vocab_tile, width = tile_width(tile);
      store_rows(sum != nullptr ? sum + first * hidden : nullptr, hidden, 1, first, width, 0,
                 hidden, call_.grad_weight, call_.accumulate);
    });
  }
  if (!call_.grad_bias || (call_.accumulate && !any_chunk)) return;
  TensorView column = call_.grad_bias;  // [V, 1]
  column.rank = 2;
  column.shape = {vocab, 1};
  column.stride = {call_.grad_bias.stride[0], 1};
  float* sum = any_chunk ? at<float>(plan_.bias_sum_at) : nullptr;
  if (call_.accumulate) {
    add_scaled(sum, 1, tokens.gradient_scale, vocab, 1, false, column.as<float>(),
               column.stride[0]);
  } else {
    store_rows(sum, 1, tokens.gradient_scale, 0, vocab, 0, 1, column);
  }
}

void LinearRun::check_kept(const Tokens& tokens) {
  const float layout = exponentials() ? exponentials_layout : logits_layout;
  const auto same = [](float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
  };
  for (int64_t i = 0; i < tokens.valid; ++i) {
    const KeptRow& row = *kept_row(tokens, i);
    RowState& state = states()[i];
    // Of a shard the state is that of the whole vocabulary, whose lse is no less than the shard's
    // own but for rounding.
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

// Loads row states as Forward wrote them.
void load_states(const Call& call, const Tokens& tokens, RowState* states) {
  for (int64_t i = 0; i < tokens.valid; ++i) {
    const int64_t row = tokens.row[i];
    states[i] = {.reference = f32_at(call.row_reference, row),
                 .log_sum = f32_at(call.row_log_sum, row)};
  }
}

}  // namespace

int64_t columns_kept(const Call& call) {
  return cpu_keeps(call.input.dtype, call.options) ? kept_columns(call) : 0;
}

LinearShape shape_of(const Call& call) {
  return {.tokens = call.tokens(),
          .vocab = call.vocab(),
          .hidden = call.hidden(),
          .dtype = call.input.dtype,
          .forward = !call.state_given(),
          .grad_input = static_cast<bool>(call.grad_input),
          .grad_weight = static_cast<bool>(call.grad_weight),
          .grad_bias = static_cast<bool>(call.grad_bias),
          .direct_grad_weight = !call.grad_weight || (call.grad_weight.dtype == DType::f32 &&
                                                      call.grad_weight.stride[1] == 1),
          .bias = static_cast<bool>(call.bias),
          .class_weight = static_cast<bool>(call.vocab_weight),
          .kept = call.gradients ? columns_kept(call) : 0,
          .places = places(call),
          .sums = call.sums()};
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

// A rounded exponential tells the slope of a softcap too coarsely.
bool logitless::cpu_keeps(DType dtype, const LossOptions& options) {
  return dtype == DType::f32 || (dtype == DType::bf16 && options.softcap == 0);
}
