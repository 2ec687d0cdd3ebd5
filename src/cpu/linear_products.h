// SPDX-License-Identifier: Apache-2.0
// What the ops of one and of two heads share: to pack a chunk's input, multiply it by tiles of a
// head's weight to logits, and compute both gradient products from rows of dz, a tile at a time.
// docs/kernels/cpu.md has the schedule.
#pragma once

#include <algorithm>

#include "src/cpu/plan.h"
#include "src/cpu/row_kernels.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"
#include "src/kept.h"
#include "src/rounding.h"

namespace logitless::cpu {

// KeptRow::layout: what a row's kept columns hold. 0 means that they were consumed.
inline constexpr float logits_layout = 1, exponentials_layout = 2, divergence_layout = 3;

// Writes rows of a [rows, columns] f32 matrix, times scale, to a view of any dtype and stride.
// Writes zeros if `from` is null. `accumulate` adds to f32 rows.
void store_rows(const float* from, int64_t from_stride, float scale, int64_t row0, int64_t rows,
                int64_t column0, int64_t columns, const TensorView& to, bool accumulate = false);
Source source_of(const TensorView& view, const int64_t* row_index);
float element_as_f32(const TensorView& view, int64_t index);
// Loads `count` elements of a vector view as f32 and fills up to vocab_tile with zeros.
void load_vector(const TensorView& view, int64_t first, int64_t count, float* to);
// Adds rows [0, count) of `rows` [count, vocab_tile] to `sum` in pairs, which destroys them. Added
// one by one, the small terms of many tokens would be lost in rounding against a target's large
// term.
void add_rows(float* rows, int64_t count, int64_t width, float* sum);

// Rows of a tile in memory.
struct TileRows {
  char* data;
  int64_t stride;        // bytes
  const int64_t* place;  // [count]  the rows' indices; null: 0, 1, 2, ...
  char* at(int64_t n) const { return data + (place != nullptr ? place[n] : n) * stride; }
};

// A thread's scratch.
struct Lane {
  void* weight_block;   // [vocab_tile / b_columns][depth_block][b_columns]
  float* tile;          // [chunk][vocab_tile]
  void* along_vocab;    // G as A panels, with k along the vocabulary
  void* along_tokens;   // G^T as A panels, with k along the tokens
  void* weight_panels;  // [panel_group][vocab_tile][b_columns]
  float* product;       // [vocab_tile][panel_group * b_columns]
  float* rows;          // [gradient_group][vocab_tile]
  float* bias;          // [vocab_tile]
  float* class_weight;  // [vocab_tile]
};

// A chunk's input of one head, packed with k along the hidden axis.
struct PackedInput {
  char* data;
  int64_t hidden, padded_hidden;
};

class LinearProducts {
 public:
  // Runs once after the last chunk, or if there is none: rounds the sums and writes zeros where no
  // token contributed.
  void finish(const Tokens& tokens, bool any_chunk);

 protected:
  struct Panels {
    int64_t first, count;
  };
  LinearProducts(const Call& call, const LinearShape& shape, const LinearPlan& plan, char* memory)
      : call_(call),
        shape_(shape),
        plan_(plan),
        memory_(memory),
        executor_(executor_of(call.execution)),
        kept_(columns_kept(call)) {}

  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  Lane lane(int64_t index) const;
  int64_t tile_width(int64_t tile) const {
    return std::min(vocab_tile, shape_.vocab - tile * vocab_tile);
  }
  PackedInput packed_input() const {
    return {at<char>(plan_.input_along_at), shape_.hidden, plan_.padded_hidden_a};
  }
  KeptRow* kept_row(const Tokens& tokens, int64_t token) const {
    return call_.kept_rows.as<KeptRow>() + tokens.row[token];
  }
  TileRows kept_tile(int64_t tile) const;

  void begin_chunk(const Tokens& tokens, int64_t first, int64_t count);
  // Packs the chunk's rows of a head's input for the logits.
  void pack_along(const TensorView& input, const PackedInput& packed);
  // Packs the chunk's input for grad_weight.
  void pack_across();
  // c [rows, vocab_tile] = `rows` of the chunk's rows from `row` on, in whole panels, times `width`
  // rows of the weight, transposed.
  void multiply_input(const PackedInput& input, int64_t row, int64_t rows, const Source& weight,
                      int64_t first, int64_t width, const Lane& lane, float* c) const;
  // Calls f(n) for each token of the chunk, on all threads.
  template <class F>
  void for_each_token(const F& f) const {
    constexpr int64_t group = 16;
    for_each_task(executor_, plan_.lanes, divide_up(count_, group), [&](int64_t task, int64_t) {
      const int64_t end = std::min(count_, (task + 1) * group);
      for (int64_t n = task * group; n < end; ++n) f(n);
    });
  }
  // Combines a row's sums of all tiles from `blocks` and `rare`, [vocab_tiles][token_chunk]; `rare`
  // may be null.
  RowAccumulator sum_of_tiles(int64_t n, const BlockState* blocks, const RareBlock* rare,
                              SumSet wants) const;
  // Adds to grad_weight and grad_bias, and writes the chunk's rows of grad_input. rows_of(tile,
  // lane, is_first) returns a function that computes row n of the tile's dz, [width]; is_first is
  // true once per tile.
  template <class RowsOf>
  void gradient_pass(bool first_chunk, const RowsOf& rows_of);

  const Call& call_;
  const LinearShape& shape_;
  const LinearPlan& plan_;
  char* memory_;
  const Executor& executor_;
  int64_t kept_;  // columns that this Forward keeps, or that Backward's Forward kept
  const Tokens* tokens_ = nullptr;
  int64_t first_ = 0, count_ = 0;
  int64_t padded_count_ = 0;  // a multiple of the engine's token_multiple

 private:
  template <class RowOf>
  void form_gradient(int64_t tile, const Lane& lane, const RowOf& row_of, bool sum_bias) const;
  void input_product(int64_t tile, const Lane& lane, Panels panels, float* slot,
                     bool accumulate) const;
  void weight_product(int64_t tile, const Lane& lane, Panels panels, bool first_chunk) const;
  void reduce_slots();
};

// Computes G, the tile's rows of dz, group by group, and packs it for both products.
template <class RowOf>
void LinearProducts::form_gradient(int64_t tile, const Lane& lane, const RowOf& row_of,
                                   bool sum_bias) const {
  const int64_t width = tile_width(tile);
  float* bias_sum = at<float>(plan_.bias_sum_at) + tile * vocab_tile;
  for (int64_t n0 = 0; n0 < padded_count_; n0 += gradient_group) {
    const int64_t group = std::min(gradient_group, padded_count_ - n0);
    for (int64_t r = 0; r < group; ++r) {
      float* row = lane.rows + r * vocab_tile;
      if (n0 + r < count_) {
        row_of(n0 + r, row);
        std::fill(row + width, row + vocab_tile, 0.0f);
      } else {
        std::fill(row, row + vocab_tile, 0.0f);
      }
    }
    pack_gradient(plan_.engine, lane.rows, n0, group, padded_count_,
                  call_.grad_input ? lane.along_vocab : nullptr,
                  call_.grad_weight ? lane.along_tokens : nullptr);
    if (sum_bias) add_rows(lane.rows, group, width, bias_sum);
  }
}

template <class RowsOf>
void LinearProducts::gradient_pass(bool first_chunk, const RowsOf& rows_of) {
  const int64_t panels = plan_.engine.b_panels(shape_.hidden);
  // If there are more threads than slots, several share a slot, each with a part of the hidden
  // axis. That changes no bit, but each thread computes G again.
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
      form_gradient(tile, lane, rows_of(tile, lane, part == 0), call_.grad_bias && part == 0);
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

}  // namespace logitless::cpu
