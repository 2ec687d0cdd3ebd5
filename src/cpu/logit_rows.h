// SPDX-License-Identifier: Apache-2.0
// Rows of given logits [N, V] are walked a block of columns at a time: forward makes a row's state,
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

// A block has so many columns that one f32 block and its output stay in the first cache, while
// combining blocks costs 2 % of a row.
inline constexpr int64_t row_block = 2048;
inline constexpr int64_t most_rows = 32;

// This is a group of rows of the views.
struct RowGroup {
  const int64_t* row;  // [count]  they are indices in the views
  // [count]  columns, -1 where not here; it is null where there are no targets at all
  const int64_t* target;
  int64_t count;                   // it is at most LogitRows::group()
  const Tokens* tokens = nullptr;  // the rows may have temperatures of these
  int64_t first = 0;               // the group begins at this compacted index
};

// Forward leaves what it knows of a group's rows here.
struct RowResults {
  RowState* states;                // [count]  target_logit is among them
  RareStatistics* rare = nullptr;  // [count]  it is null where none of them is asked for
  int64_t whole = 0;               // the whole vocabulary has so many columns, for the mean
};

// A caller says here what it makes a LogitRows for.
struct RowsPurpose {
  bool forward = true;        // forward runs before gradient
  bool needs_logits = false;  // gradients have an entropy term
  bool maps = false;          // each row has a map of its own
};

class LogitRows {
 public:
  // `output` is absent, or the [N, V] view that gradient writes, which may be `logits` itself.
  LogitRows(const TensorView& logits, const TensorView& output, const LogitMap& map,
            RowsPurpose purpose);

  int64_t group() const { return group_; }
  // Returns the scratch of one thread in bytes, a multiple of 64.
  uint64_t lane_bytes() const { return lane_bytes_; }
  // Returns how many rows one task takes, a multiple of group(): enough work to be worth handing
  // out.
  int64_t task_rows() const;

  // Makes the rows' states. If the purpose has gradients, `gradient` must follow on the same rows
  // with the same scratch, since output rows may hold what is kept for it.
  void forward(const RowGroup& rows, const float* class_weight, BlockWants wants, float* scratch,
               const RowResults& results) const;
  // Makes output rows from coefficients [count] and, where forward ran before, its states.
  void gradient(const RowGroup& rows, const float* class_weight, const RowGradient* coefficients,
                const RowState* states, float* scratch) const;
  // Writes an output row of zeros.
  void clear(int64_t row) const;

 private:
  // gradient starts from one of these, which a row keeps from forward where there is room.
  enum class Basis { logits, exponentials };

  LogitMap map_of(const RowGroup& rows, int64_t r) const {
    return maps_ ? cpu::map_of(map_, *rows.tokens, rows.first + r) : map_;
  }
  float* row_of_output(const RowGroup& rows) const;
  // Returns the target's logit before its block is walked.
  float target_logit_of(const RowGroup& rows, int64_t r) const;
  // Returns the kept row, or the scratch of a block where nothing is kept.
  float* held(const RowGroup& rows, float* scratch) const;

  TensorView logits_, output_;
  LogitMap map_;
  bool maps_;  // each row has a map of its own
  int64_t columns_;
  int64_t group_;           // so many rows are walked together
  int64_t pitch_;           // so many floats lie from row to row of the scratch
  bool direct_ = false;     // forward reads the view's memory
  bool to_output_ = false;  // an output row is f32 and contiguous: kernels write it
  Basis basis_ = Basis::logits;
  bool kept_ = false;   // a row is kept from forward to gradient
  int64_t maxima_ = 0;  // the scratch begins with so many floats: the maxima of one row's blocks
  uint64_t lane_bytes_;
};

inline int64_t tasks_of(const LogitRows& rows, int64_t count) {
  return (count + rows.task_rows() - 1) / rows.task_rows();
}

// Returns how many threads have room in `bytes` of scratch.
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
