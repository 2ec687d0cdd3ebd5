// SPDX-License-Identifier: Apache-2.0
// Rows of given logits [N, V], walked a block of columns at a time: forward makes a row's state,
// gradient its output row. Rows that lie side by side in memory (column-major views) are walked in
// groups, so that cache lines are used whole. The blocks of a row are the same either way, and so
// are its bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/cpu/row_kernels.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"

namespace logitless::cpu {

// Columns of a block: one f32 block and its output stay in the first cache, and combining blocks
// costs 2 % of a row.
inline constexpr int64_t row_block = 2048;
inline constexpr int64_t most_rows = 32;

// A group of rows of the views.
struct RowGroup {
  const int64_t* row;              // [count]  index in the views
  const int64_t* target;           // [count]  column, -1: not here; null: no targets at all
  int64_t count;                   // <= LogitRows::group()
  const Tokens* tokens = nullptr;  // whose temperatures the rows may have
  int64_t first = 0;               // the group's compacted index among them
};

// Forward leaves what it knows of a group's rows here.
struct RowResults {
  RowState* states;                // [count], target_logit included
  MoreStatistics* more = nullptr;  // [count]; null: none is asked for
  int64_t whole = 0;               // columns of the whole vocabulary, for those
};

// Says what LogitRows is made for.
struct RowsPurpose {
  bool forward = true;        // forward runs before gradient
  bool needs_logits = false;  // gradients have an entropy term
  bool maps = false;          // each row has its own
};

class LogitRows {
 public:
  // output: absent, or the [N, V] view that gradient writes; may be `logits` itself.
  LogitRows(const TensorView& logits, const TensorView& output, const LogitMap& map,
            RowsPurpose purpose);

  int64_t group() const { return group_; }
  // Scratch of one thread, a multiple of 64.
  uint64_t lane_bytes() const { return lane_bytes_; }
  // Rows that one task takes, a multiple of group(): enough work to be worth handing out.
  int64_t task_rows() const;

  // A purpose with gradients wants `gradient` to follow on the same rows with the same scratch:
  // output rows may hold what is kept for it.
  void forward(const RowGroup& rows, const float* class_weight, BlockWants wants, float* scratch,
               const RowResults& results) const;
  // Output rows from coefficients [count] and, where forward ran before, its states.
  void gradient(const RowGroup& rows, const float* class_weight, const RowGradient* coefficients,
                const RowState* states, float* scratch) const;
  // An output row of zeros.
  void clear(int64_t row) const;

 private:
  // Holds what gradient starts from, and a row keeps from forward where there is room.
  enum class Basis { logits, exponentials };

  LogitMap map_of(const RowGroup& rows, int64_t r) const {
    return maps_ ? cpu::map_of(map_, *rows.tokens, rows.first + r) : map_;
  }
  float* row_of_output(const RowGroup& rows) const;
  // Before its block is walked.
  float target_logit_of(const RowGroup& rows, int64_t r) const;
  // The kept row; the scratch of a block where nothing is kept.
  float* held(const RowGroup& rows, float* scratch) const;

  TensorView logits_, output_;
  LogitMap map_;
  bool maps_;  // each row has its own
  int64_t columns_;
  int64_t group_;           // rows walked together
  int64_t pitch_;           // floats from row to row of the scratch
  bool direct_ = false;     // forward reads the view's memory
  bool to_output_ = false;  // an output row is f32 and contiguous: kernels write it
  Basis basis_ = Basis::logits;
  bool kept_ = false;   // from forward to gradient
  int64_t maxima_ = 0;  // floats at the head of the scratch: the blocks' maxima, one row's
  uint64_t lane_bytes_;
};

inline int64_t tasks_of(const LogitRows& rows, int64_t count) {
  return (count + rows.task_rows() - 1) / rows.task_rows();
}

// Returns how many threads `bytes` of scratch give room to.
inline int64_t lanes_of(const LogitRows& rows, const Executor& executor, uint64_t bytes) {
  const int64_t threads = executor.num_threads;
  if (rows.lane_bytes() == 0) return threads;
  return std::clamp<int64_t>(bytes / rows.lane_bytes(), 1, threads);
}

// Copies a block between a view's rows and f32 rows `pitch` apart.
void load_group(const TensorView& view, const RowGroup& rows, int64_t column, int64_t count,
                float* to, int64_t pitch);
void store_group(const float* from, int64_t pitch, const RowGroup& rows, int64_t column,
                 int64_t count, const TensorView& view);

}  // namespace logitless::cpu
