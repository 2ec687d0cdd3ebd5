// SPDX-License-Identifier: Apache-2.0
// Packs inputs, multiplies them to logits, and computes both gradient products of a tile.
#include "src/cpu/linear_products.h"

#include <cstring>

namespace logitless::cpu {
void store_rows(const float* from, int64_t from_stride, float scale, int64_t row0, int64_t rows,
                int64_t column0, int64_t columns, const TensorView& to, bool accumulate) {
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

Source source_of(const TensorView& view, const int64_t* row_index) {
  return {view.as<const char>(), view.dtype, view.stride[0], view.stride[1], row_index};
}

float element_as_f32(const TensorView& view, int64_t index) {
  float value;
  const int64_t offset = index * view.stride[0] * size_of(view.dtype);
  load_as_f32(view.as<const char>() + offset, view.dtype, 1, &value);
  return value;
}

void load_vector(const TensorView& view, int64_t first, int64_t count, float* to) {
  for (int64_t j = 0; j < count; ++j) to[j] = element_as_f32(view, first + j);
  std::fill(to + count, to + vocab_tile, 0.0f);
}

void add_rows(float* rows, int64_t count, int64_t width, float* sum) {
  for (int64_t step = 1; step < count; step *= 2) {
    for (int64_t r = 0; r + step < count; r += 2 * step) {
      add_scaled(rows + (r + step) * vocab_tile, 0, 1.0f, 1, width, false, rows + r * vocab_tile,
                 0);
    }
  }
  add_scaled(rows, 0, 1.0f, 1, width, false, sum, 0);
}

Lane LinearProducts::lane(int64_t index) const {
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

void LinearProducts::begin_chunk(const Tokens& tokens, int64_t first, int64_t count) {
  tokens_ = &tokens;
  first_ = first;
  count_ = count;
  padded_count_ = round_up(count, plan_.engine.token_multiple());
}

TileRows LinearProducts::kept_tile(int64_t tile) const {
  const int64_t first = tile * vocab_tile, size = size_of(call_.kept.dtype);
  const int64_t stride = std::min(vocab_tile, round_up(kept_ - first, kept_block)) * size;
  char* data = call_.kept.as<char>() + first * kept_rows_of(shape_.tokens) * size;
  if (tokens_->place != nullptr) return {data, stride, tokens_->place + first_};
  return {data + first_ * stride, stride, nullptr};
}

void LinearProducts::pack_along(const TensorView& input, const PackedInput& packed) {
  const Engine& engine = plan_.engine;
  const Source source = source_of(input, tokens_->row + first_);
  const int64_t group = std::max<int64_t>(engine.a_rows, 32);
  for_each_task(executor_, plan_.lanes, divide_up(count_, group), [&](int64_t task, int64_t) {
    const int64_t row = task * group;
    pack_a_along_columns(engine, source, row, std::min(group, count_ - row), 0, packed.hidden,
                         packed.data + row * packed.padded_hidden * engine.element);
  });
}

void LinearProducts::pack_across() {
  // A task is one hidden panel, with all tokens of the chunk.
  const Engine& engine = plan_.engine;
  const Source source = source_of(call_.input, tokens_->row + first_);
  const int64_t columns = engine.b_columns, hidden = shape_.hidden;
  char* across = at<char>(plan_.input_across_at);
  for_each_task(executor_, plan_.lanes, engine.b_panels(hidden), [&](int64_t panel, int64_t) {
    const int64_t column = panel * columns;
    char* to = across + panel * columns * padded_count_ * engine.element;
    pack_b_along_rows(engine, source, 0, count_, column, std::min(columns, hidden - column), to);
    // The depth is padded_count_, so rows after the packed ones must be zero.
    const int64_t packed = engine.padded_k(count_);
    std::memset(to + columns * packed * engine.element, 0,
                columns * (padded_count_ - packed) * engine.element);
  });
}

RowAccumulator LinearProducts::sum_of_tiles(int64_t n, const BlockState* blocks,
                                            const RareBlock* rare, SumSet wants) const {
  RowAccumulator row = RowAccumulator::begin();
  for (int64_t tile = 0; tile < plan_.vocab_tiles; ++tile) {
    const int64_t block = tile * plan_.token_chunk + n;
    row.add(blocks[block], tile * vocab_tile, wants, rare != nullptr ? &rare[block] : nullptr);
  }
  return row;
}

void LinearProducts::multiply_input(const PackedInput& input, int64_t row, int64_t rows,
                                    const Source& weight, int64_t first, int64_t width,
                                    const Lane& lane, float* c) const {
  const Engine& engine = plan_.engine;
  const int64_t hidden = input.hidden, row_bytes = input.padded_hidden * engine.element;
  const char* packed = input.data + row * row_bytes;
  const Product whole{.a = packed,
                      .a_panel_stride = engine.a_rows * row_bytes,
                      .a_panels = engine.a_panels(rows),
                      .k = engine.padded_k(hidden),
                      .c = c,
                      .c_stride = vocab_tile};
  if (multiply_unpacked(engine, weight, first, width, hidden, whole)) return;
  for (int64_t k = 0; k < hidden; k += plan_.depth_block) {
    const int64_t depth = std::min(plan_.depth_block, hidden - k), padded = engine.padded_k(depth);
    pack_b_along_columns(engine, weight, first, width, k, depth, lane.weight_block);
    multiply(engine, {.a = packed + k * engine.a_rows * engine.element,
                      .a_panel_stride = engine.a_rows * row_bytes,
                      .a_panels = engine.a_panels(rows),
                      .b = lane.weight_block,
                      .b_panel_stride = engine.b_columns * padded * engine.element,
                      .b_panels = engine.b_panels(width),
                      .k = padded,
                      .c = c,
                      .c_stride = vocab_tile,
                      .onto = k > 0 ? Onto::chain : Onto::nothing});
  }
}

// For some hidden panels: slot[n, columns] (+)= sum over the tile's v of G[n, v] weight[v,
// columns].
void LinearProducts::input_product(int64_t tile, const Lane& lane, Panels panels, float* slot,
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
                    .onto = accumulate ? Onto::sum : Onto::nothing});
}

// grad_weight[tile, columns] (+)= scale * sum over the chunk's n of G[n, v] input[n, columns].
void LinearProducts::weight_product(int64_t tile, const Lane& lane, Panels panels,
                                    bool first_chunk) const {
  const Engine& engine = plan_.engine;
  const int64_t first = tile * vocab_tile, width = tile_width(tile);
  const int64_t column = panels.first * engine.b_columns;
  const int64_t columns = std::min(panels.count * engine.b_columns, shape_.hidden - column);
  const int64_t panel_stride = engine.b_columns * padded_count_ * engine.element;
  const int64_t product_stride = panel_group * engine.b_columns;
  const float scale = tokens_->gradient_scale;
  const bool overwrite = first_chunk && !call_.accumulate;
  // The f32 sum is in the workspace, or in the output itself. A single chunk needs no sum and is
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
                    .c_stride = product_stride});
  if (sum != nullptr) {
    add_scaled(lane.product, product_stride, scale, width, columns,
               plan_.weight_sum ? first_chunk : overwrite, sum, stride);
  } else {
    store_rows(lane.product, product_stride, scale, first, width, column, columns,
               call_.grad_weight, call_.accumulate);
  }
}

// Adds the slots in order and rounds each row of grad_input once.
void LinearProducts::reduce_slots() {
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

void LinearProducts::finish(const Tokens& tokens, bool any_chunk) {
  const int64_t vocab = shape_.vocab, hidden = shape_.hidden;
  if (call_.grad_input) {
    // Writes zeros to the rows of tokens that do not count or are inactive.
    for_each_other(
        tokens, [&](int64_t n) { store_rows(nullptr, 0, 0, n, 1, 0, hidden, call_.grad_input); });
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

}  // namespace logitless::cpu
