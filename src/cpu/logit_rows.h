// SPDX-License-Identifier: Apache-2.0
// Walks rows of given logits [N, V] a block of columns at a time: forward() computes a row's state,
// gradient() its output row. Rows that are interleaved in memory (column-major views) are walked in
// groups, so that whole cache lines are used. A row's blocks, and so its bits, are the same either
// way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/cpu/row_kernels.h"
#include "src/cpu/thread_pool.h"
#include "src/cpu/tokens.h"

namespace logitless::cpu {

// Columns of a block: an f32 block and its output stay in L1, and combining blocks costs 2 % of a
// row.
inline constexpr int64_t row_block = 2048;
inline constexpr int64_t most_rows = 32;

struct RowGroup {
  const int64_t* row;  // [count]  indices in the views
  // [count] columns, -1 if in another shard; null if there are no targets
  const int64_t* target;
  int64_t count;                   // at most LogitRows::group()
  const Tokens* tokens = nullptr;  // for the rows' temperatures, if any
  int64_t first = 0;               // the group's first compacted index
};

// What forward() computes for a group's rows.
struct RowResults {
  RowState* states;                // [count]  with target_logit
  RareStatistics* rare = nullptr;  // [count]  null if none is requested
  int64_t whole = 0;               // V of the whole vocabulary, for mean_logit
};

struct RowsPurpose {
  bool forward = true;        // forward runs before gradient
  bool needs_logits = false;  // gradients have an entropy term
  bool maps = false;          // each row has its own map
};

class LogitRows {
 public:
  // `output` is absent, or the [N, V] view that gradient writes, which may be `logits` itself.
  LogitRows(const TensorView& logits, const TensorView& output, const LogitMap& map,
            RowsPurpose purpose);

  int64_t group() const { return group_; }
  // Bytes of one thread's scratch, a multiple of 64.
  uint64_t lane_bytes() const { return lane_bytes_; }
  // Rows of one task, a multiple of group().
  int64_t task_rows() const;

  // Computes the rows' states. If the purpose has gradients, gradient() must follow on the same
  // rows with the same scratch: output rows may hold what is kept for it.
  void forward(const RowGroup& rows, const float* class_weight, BlockWants wants, float* scratch,
               const RowResults& results) const;
  // Computes output rows from coefficients [count] and, if forward() ran before, its states.
  void gradient(const RowGroup& rows, const float* class_weight, const RowGradient* coefficients,
                const RowState* states, float* scratch) const;
  void clear(int64_t row) const;

 private:
  // What gradient() starts from; kept by forward() if there is room.
  enum class Basis { logits, exponentials };

  LogitMap map_of(const RowGroup& rows, int64_t r) const {
    return maps_ ? cpu::map_of(map_, *rows.tokens, rows.first + r) : map_;
  }
  float* row_of_output(const RowGroup& rows) const;
  // The target's logit, read before its block is walked.
  float target_logit_of(const RowGroup& rows, int64_t r) const;
  // The kept row, or a block's scratch if nothing is kept.
  float* held(const RowGroup& rows, float* scratch) const;

  TensorView logits_, output_;
  LogitMap map_;
  bool maps_;  // each row has its own map
  int64_t columns_;
  int64_t group_;           // rows walked together
  int64_t pitch_;           // floats between rows of the scratch
  bool direct_ = false;     // forward reads the view's memory
  bool to_output_ = false;  // an output row is f32 and contiguous: kernels write it
  Basis basis_ = Basis::logits;
  bool kept_ = false;   // a row is kept from forward to gradient
  int64_t maxima_ = 0;  // floats at the scratch's start: the maxima of one row's blocks
  uint64_t lane_bytes_;
};

inline int64_t tasks_of(const LogitRows& rows, int64_t count) {
  return (count + rows.task_rows() - 1) / rows.task_rows();
}

// The number of threads that `bytes` of scratch suffice for.
inline int64_t lanes_of(const LogitRows& rows, const Executor& executor, uint64_t bytes) {
  const int64_t threads = executor.num_threads;
  if (rows.lane_bytes() == 0) return threads;
  return std::clamp<int64_t>(bytes / rows.lane_bytes(), 1, threads);
}

// Copy a block between a view's rows and f32 rows `pitch` apart.
void load_group(const TensorView& view, const RowGroup& rows, int64_t column, int64_t count,
                float* to, int64_t pitch);
void store_group(const float* from, int64_t pitch, const RowGroup& rows, int64_t column,
                 int64_t count, const TensorView& view);

}  // namespace logitless::cpu
