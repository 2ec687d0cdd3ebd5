// SPDX-License-Identifier: Apache-2.0
// Vector kernels over a block of one row of logits, f32 in memory, one per instruction set,
// dispatched at run time. The logits ops walk a row in blocks of `row_block` columns; the linear
// ops call the kernels on rows of a product tile that are in the cache.
#pragma once

#include <cstdint>

#include "src/row/gradient.h"
#include "src/row/map.h"
#include "src/row/state.h"
#include "src/row/sums.h"

namespace logitless::cpu {

// The sums of one block of columns; blocks are combined in column order. argmax is relative to the
// block's first column.
struct BlockState : UsualSums<Narrow> {
  float maximum;  // max_j z_j; NaN if a logit is NaN, -inf if all are
  float sum;      // sum_j exp(z_j - maximum)
};
using RareBlock = RareSums<Narrow>;

struct BlockWants {
  SumSet sums{};
  // For the rank: the target's logit, and its column in the block, which is not counted; outside of
  // the block if it is elsewhere.
  float target_logit = 0;
  int64_t target = -1;
  bool rare() const { return sums.has(RareBlock::kinds); }
};

// Changes logits in place: raw[j] (+ bias[j], unless bias is null) becomes z[j] for j in [0,
// count). Without a bias the identity map writes nothing, so constant logits may be passed. Sums
// are formed lane by lane and then across lanes, in an order set by count and the vectors' length.
// class_weight is [count], or null where all are 1; a class of weight 0 adds exactly 0, even where
// its logit is -inf. exponentials [count] gets exp(z[j] - maximum), unless null; it may be
// `logits`. `rare` is null where no rare sum is wanted.
void forward_block(const LogitMap& map, float* logits, const float* bias, const float* class_weight,
                   int64_t count, const BlockWants& wants, BlockState* state,
                   float* exponentials = nullptr, RareBlock* rare = nullptr);

// Adds the bias and applies the map as forward_block does, without the sums.
void map_block(const LogitMap& map, float* logits, const float* bias, int64_t count);

// draw[j] = dz_j dz/draw for j in [0, count), from z[j] as forward_block left it, WITHOUT the
// onehot term (see target_gradient). draw may be z. exp of a -inf logit is 0 and adds 0 to the
// entropy term.
void gradient_block(const LogitMap& map, const RowGradient& g, const float* z,
                    const float* class_weight, int64_t count, float* draw);

// The same from what forward_block wrote, the exponentials and the block's maximum; without softcap
// and entropy term. draw may be `exponentials`.
void scale_block(const LogitMap& map, const RowGradient& g, const float* exponentials,
                 float maximum, const float* class_weight, int64_t count, float* draw);

// exponentials[j] = exp(z[j] - reference) in bf16; inf above exp(88), 0 below 2^-126.
void store_exponentials(const float* z, float reference, int64_t count, uint16_t* exponentials);

// gradient_block from exponentials [count] that were rounded to bf16 and widened, without a
// softcap; the entropy's term takes log p from them. draw may be `exponentials`.
void exponentials_gradient(const LogitMap& map, const RowGradient& g, const float* exponentials,
                           float reference, const float* class_weight, int64_t count, float* draw);

// Returns the first index in [from, count) whose logit is `least` or more, else count;
// never a NaN.
int64_t find_at_least(const float* z, int64_t from, int64_t count, float least);

// dz/draw at a column.
double slope_at(const LogitMap& map, float z);

// draw at the target's column, including the one-hot term.
float target_gradient(const LogitMap& map, const RowGradient& g, float z, float class_weight);

// Convert contiguous f32, f16 or bf16, rounding to nearest even. NaN stays NaN.
void load_as_f32(const void* source, DType dtype, int64_t count, float* destination);
void store_from_f32(const float* source, int64_t count, DType dtype, void* destination);

// Accumulates blocks of one row in column order.
struct RowAccumulator : UsualSums<Wide>, RareSums<Wide> {
  float maximum;
  double sum;
  // The state before any block. Not a constructor: arrays of accumulators may be used only in part.
  static RowAccumulator begin();
  void add(const BlockState& block, int64_t first_column, SumSet wants,
           const RareBlock* rare = nullptr);
  // Returns the row's state without target_logit; NaN for a row of -inf.
  RowState finish(SumSet wants) const;
  // `whole` is V of the whole vocabulary.
  RareStatistics finish_rare(int64_t whole) const;
};

}  // namespace logitless::cpu
