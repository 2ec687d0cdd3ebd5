// SPDX-License-Identifier: Apache-2.0
// These are vector kernels over a block of one row of logits, f32 in memory, one per instruction
// set, dispatched at run time. The logits ops walk a row in blocks of `row_block` columns; the
// linear ops call them on the hot rows of a product tile.
#pragma once

#include <cstdint>

#include "src/row/gradient.h"
#include "src/row/map.h"
#include "src/row/state.h"
#include "src/row/sums.h"

namespace logitless::cpu {

// Holds what one block of columns adds to its row; blocks are combined in column order. Columns are
// counted from the block's first one.
struct BlockState : UsualSums<Narrow> {
  float maximum;  // it is max_j z_j; NaN if a logit is NaN, -inf if all are
  float sum;      // it is sum_j exp(z_j - maximum)
};
using RareBlock = RareSums<Narrow>;

struct BlockWants {
  SumSet sums{};
  // A row whose rank is wanted gives the target's logit, and its column in the block, which is not
  // counted, or one outside.
  float target_logit = 0;
  int64_t target = -1;
  bool rare() const { return sums.has(RareBlock::kinds); }
};

// Changes logits in place: raw[j] (+ bias[j], where bias is not null) becomes z[j] for j in [0,
// count); without a bias the identity map writes nothing, so constant logits may be given. Sums are
// formed lane by lane and then across lanes, in one order that depends on count alone. class_weight
// is [count], or null where all are 1; a class of weight 0 adds exactly 0, even where its logit is
// -inf. exponentials [count] gets exp(z[j] - maximum), unless it is null; it may be `logits`.
// `rare` is null where none of them is wanted.
void forward_block(const LogitMap& map, float* logits, const float* bias, const float* class_weight,
                   int64_t count, const BlockWants& wants, BlockState* state,
                   float* exponentials = nullptr, RareBlock* rare = nullptr);

// Applies the map alone.
void map_block(const LogitMap& map, float* logits, const float* bias, int64_t count);

// Makes draw[j] = dz_j dz/draw for j in [0, count), from z[j] as forward_block left it. The onehot
// term is NOT included (see target_gradient). draw may be z. exp of a -inf logit is 0 and adds 0 to
// the entropy term.
void gradient_block(const LogitMap& map, const RowGradient& g, const float* z,
                    const float* class_weight, int64_t count, float* draw);

// Makes the same from what forward_block stored, the exponentials and the maximum of the block,
// where there is no softcap and no entropy term. draw may be `exponentials`.
void scale_block(const LogitMap& map, const RowGradient& g, const float* exponentials,
                 float maximum, const float* class_weight, int64_t count, float* draw);

// Makes exponentials[j] = exp(z[j] - reference) in bf16. Above 2^127 it becomes inf, below 2^-126
// it becomes 0.
void store_exponentials(const float* z, float reference, int64_t count, uint16_t* exponentials);

// Makes draw as gradient_block does, from exponentials [count] that were rounded to bf16 and
// widened; draw may be `exponentials`. There is no softcap. The entropy's term takes log p from
// them.
void exponentials_gradient(const LogitMap& map, const RowGradient& g, const float* exponentials,
                           float reference, const float* class_weight, int64_t count, float* draw);

// Returns the first place of [from, count) whose logit is `least` or more, or count. A NaN is not.
int64_t find_at_least(const float* z, int64_t from, int64_t count, float least);

// Returns dz/draw at a column.
double slope_at(const LogitMap& map, float z);

// Returns draw at the target's column, onehot included.
float target_gradient(const LogitMap& map, const RowGradient& g, float z, float class_weight);

// Widen and narrow contiguous elements of f32, f16 or bf16. A NaN stays NaN; rounding is to nearest
// even.
void load_as_f32(const void* source, DType dtype, int64_t count, float* destination);
void store_from_f32(const float* source, int64_t count, DType dtype, void* destination);

// Accumulates blocks of one row in column order.
struct RowAccumulator : UsualSums<Wide>, RareSums<Wide> {
  float maximum;
  double sum;
  // Returns the state of no block yet. An accumulator made otherwise is not initialized, because of
  // an array few may be used.
  static RowAccumulator begin();
  void add(const BlockState& block, int64_t first_column, SumSet wants,
           const RareBlock* rare = nullptr);
  // Returns every field that the contract lists but target_logit, which is left for the caller; a
  // row of -inf gives NaN.
  RowState finish(SumSet wants) const;
  // The whole vocabulary has `whole` columns.
  RareStatistics finish_rare(int64_t whole) const;
};

}  // namespace logitless::cpu
