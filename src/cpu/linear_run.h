// SPDX-License-Identifier: Apache-2.0
// One linear cross-entropy on the CPU: the passes over a chunk of tokens that
// linear_cross_entropy.cpp strings together.
#pragma once

#include "src/cpu/plan.h"
#include "src/cpu/row_kernels.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"

namespace logitless::cpu {

// Holds what the three linear ops have in common.
struct LinearCall {
  const TensorView& input;   // [N, D]
  const TensorView& weight;  // [V, D]
  const TensorView& bias;    // [V] or absent
  const LossOptions& options;
  const TensorView& class_weight;  // [V], [vocab_total] for a shard, or absent
  TensorView grad_input{};         // [N, D] or absent
  TensorView grad_weight{};        // [V, D] or absent
  TensorView grad_bias{};          // [V] or absent
  bool accumulate = false;
  BlockWants wants{};
  LinearShape shape{};
};

class LinearRun {
 public:
  LinearRun(const LinearCall& call, const LinearPlan& plan, char* memory, const Executor& executor)
      : call_(call),
        plan_(plan),
        memory_(memory),
        executor_(executor),
        map_(logit_map(call.options)) {}

  // Tokens [first, first + count) of the compacted rows.
  void begin_chunk(const Tokens& tokens, int64_t first, int64_t count);
  // Packs the chunk's input for the logits product.
  void pack_input();
  // Logits tile by tile -> states (all but the coefficients); keeps the logits where the plan
  // stores them.
  void forward_pass();
  // grad_weight and grad_bias added up, grad_input of the chunk's rows written. `gradients`:
  // [count].
  void gradient_pass(bool first_chunk);
  // Once after the last chunk (or with none): rounds sums, writes what no token reached.
  void finish(const Tokens& tokens, bool any_chunk);

  RowState* states() const { return at<RowState>(plan_.states_at); }              // [N]
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
  void load_vectors(int64_t tile, const Lane& lane) const;
  void compute_tile(int64_t tile, const Lane& lane, float* logits, BlockState* blocks) const;
  void combine_blocks();
  void form_gradient(int64_t tile, const Lane& lane, const float* logits, bool sum_bias) const;
  void input_product(int64_t tile, const Lane& lane, Panels panels, float* slot,
                     bool accumulate) const;
  void weight_product(int64_t tile, const Lane& lane, Panels panels, bool first_chunk) const;
  void reduce_slots();

  const LinearCall& call_;
  const LinearPlan& plan_;
  char* memory_;
  const Executor& executor_;
  LogitMap map_;
  const Tokens* tokens_ = nullptr;
  int64_t first_ = 0, count_ = 0;
  int64_t padded_count_ = 0;  // a multiple of the engine's token_multiple
};

// Rows of a [rows, columns] f32 matrix to a view of any dtype and stride, times scale.
void store_rows(const float* from, int64_t from_stride, float scale, int64_t row0, int64_t rows,
                int64_t column0, int64_t columns, const TensorView& to, bool accumulate = false);

}  // namespace logitless::cpu
