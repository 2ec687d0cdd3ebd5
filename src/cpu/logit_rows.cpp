// SPDX-License-Identifier: Apache-2.0
// Walks rows of given logits: chooses the memory in which kernels work, and copies strided views.
#include "src/cpu/logit_rows.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace logitless::cpu {
namespace {

// Rows up to this length keep z for the gradient. Longer ones leave the L2 cache, and computing z
// again is cheaper than reading it back.
constexpr int64_t most_kept_columns = 1 << 18;
// Elements per task, about 10 us of work.
constexpr int64_t task_elements = 1 << 15;
// Strided columns copied at a time: their cache lines stay in L1 even if they share a set.
constexpr int64_t strip = 8;

bool rows_adjoin(const TensorView& v) {
  return v && v.shape[0] > 1 && std::abs(v.stride[0]) < std::abs(v.stride[1]);
}

// Rows at any distance; a null `row` means rows 0, 1, 2, ...
template <class T>
struct Strided {
  T* base;
  const int64_t* row;
  int64_t row_stride, column_stride;
  T* at(int64_t r, int64_t j) const {
    return base + (row != nullptr ? row[r] : r) * row_stride + j * column_stride;
  }
};

template <class T>
Strided<T> strided(const TensorView& v, const RowGroup& rows, int64_t column) {
  return {v.as<T>() + column * v.stride[1], rows.row, v.stride[0], v.stride[1]};
}

template <class T>
void move_strided(int64_t rows, int64_t count, const Strided<const T>& from, const Strided<T>& to) {
  const int64_t from_step = from.column_stride, to_step = to.column_stride;
  for (int64_t j = 0; j < count; j += strip) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* source = from.at(r, j);
      T* destination = to.at(r, j);
      if (count - j >= strip) {
        for (int64_t k = 0; k < strip; ++k) destination[k * to_step] = source[k * from_step];
      } else {
        for (int64_t k = 0; k < count - j; ++k) destination[k * to_step] = source[k * from_step];
      }
    }
  }
}

char* address(const TensorView& v, int64_t row, int64_t column) {
  return v.as<char>() + (row * v.stride[0] + column * v.stride[1]) * size_of(v.dtype);
}

}  // namespace

void load_group(const TensorView& view, const RowGroup& rows, int64_t column, int64_t count,
                float* to, int64_t pitch) {
  if (view.stride[1] == 1) {
    for (int64_t r = 0; r < rows.count; ++r) {
      load_as_f32(address(view, rows.row[r], column), view.dtype, count, to + r * pitch);
    }
    return;
  }
  if (view.dtype == DType::f32) {
    move_strided<float>(rows.count, count, strided<const float>(view, rows, column),
                        {to, nullptr, pitch, 1});
    return;
  }
  constexpr int64_t width = 64;
  uint16_t narrow[most_rows][width];
  for (int64_t j = 0; j < count; j += width) {
    const int64_t part = std::min(width, count - j);
    move_strided<uint16_t>(rows.count, part, strided<const uint16_t>(view, rows, column + j),
                           {narrow[0], nullptr, width, 1});
    for (int64_t r = 0; r < rows.count; ++r) {
      load_as_f32(narrow[r], view.dtype, part, to + r * pitch + j);
    }
  }
}

void store_group(const float* from, int64_t pitch, const RowGroup& rows, int64_t column,
                 int64_t count, const TensorView& view) {
  if (view.stride[1] == 1) {
    for (int64_t r = 0; r < rows.count; ++r) {
      store_from_f32(from + r * pitch, count, view.dtype, address(view, rows.row[r], column));
    }
    return;
  }
  if (view.dtype == DType::f32) {
    move_strided<float>(rows.count, count, {from, nullptr, pitch, 1},
                        strided<float>(view, rows, column));
    return;
  }
  constexpr int64_t width = 64;
  uint16_t narrow[most_rows][width];
  for (int64_t j = 0; j < count; j += width) {
    const int64_t part = std::min(width, count - j);
    for (int64_t r = 0; r < rows.count; ++r) {
      store_from_f32(from + r * pitch + j, part, view.dtype, narrow[r]);
    }
    move_strided<uint16_t>(rows.count, part, {narrow[0], nullptr, width, 1},
                           strided<uint16_t>(view, rows, column + j));
  }
}

LogitRows::LogitRows(const TensorView& logits, const TensorView& output, const LogitMap& map,
                     RowsPurpose purpose)
    : logits_(logits), output_(output), map_(map), maps_(purpose.maps), columns_(logits.shape[1]) {
  const bool grouped = rows_adjoin(logits) || rows_adjoin(output);
  const int64_t element = std::min(size_of(logits.dtype), output ? size_of(output.dtype) : 4);
  group_ = grouped ? 64 / element : 1;  // a group is a cache line of rows
  const bool identity = map.identity() && !maps_;
  direct_ = !grouped && logits.dtype == DType::f32 && logits.stride[1] == 1 && identity;
  to_output_ = !grouped && output && output.dtype == DType::f32 && output.stride[1] == 1;
  kept_ = !grouped && purpose.forward && output && (to_output_ || columns_ <= most_kept_columns);
  // Chosen in the same way for every layout, so that all have the same bits.
  if (purpose.forward && output && map.softcap == 0 && !purpose.needs_logits) {
    basis_ = Basis::exponentials;
    const int64_t blocks = (columns_ + row_block - 1) / row_block;
    maxima_ = kept_ ? static_cast<int64_t>(padded(blocks * sizeof(float)) / sizeof(float)) : 0;
  }
  int64_t width = std::min(columns_, row_block);
  if (kept_) width = to_output_ ? 0 : columns_;
  if (direct_ && basis_ == Basis::logits && !kept_ && (!output || to_output_)) width = 0;
  // A pitch that puts the rows of a group into different sets of L1.
  pitch_ = grouped ? width + 16 : width;
  lane_bytes_ = maxima_ * sizeof(float) + padded(group_ * pitch_ * sizeof(float));
}

int64_t LogitRows::task_rows() const {
  const int64_t columns = std::max<int64_t>(1, columns_);  // V may be 0 if N is 0
  return std::max<int64_t>(1, task_elements / (columns * group_)) * group_;
}

float* LogitRows::row_of_output(const RowGroup& rows) const {
  return reinterpret_cast<float*>(address(output_, rows.row[0], 0));
}

float LogitRows::target_logit_of(const RowGroup& rows, int64_t r) const {
  float z;
  load_group(logits_, {rows.row + r, nullptr, 1}, rows.target[r], 1, &z, 1);
  map_block(map_of(rows, r), &z, nullptr, 1);
  return z;
}

float* LogitRows::held(const RowGroup& rows, float* scratch) const {
  return kept_ && to_output_ ? row_of_output(rows) : scratch + maxima_;
}

void LogitRows::forward(const RowGroup& rows, const float* class_weight, BlockWants wants,
                        float* scratch, const RowResults& results) const {
  RowAccumulator sums[most_rows];
  float target_logit[most_rows];
  for (int64_t r = 0; r < rows.count; ++r) {
    sums[r] = RowAccumulator::begin();
    target_logit[r] = -std::numeric_limits<float>::infinity();
    if (wants.sums.has(SumKind::above)) target_logit[r] = target_logit_of(rows, r);
  }
  float* const row = held(rows, scratch);
  for (int64_t column = 0; column < columns_; column += row_block) {
    const int64_t count = std::min(row_block, columns_ - column);
    float* const block = kept_ ? row + column : row;
    float* logits = block;
    // Kernels may work in the view itself: the identity map writes nothing.
    if (direct_) logits = reinterpret_cast<float*>(address(logits_, rows.row[0], column));
    if (!direct_) load_group(logits_, rows, column, count, block, pitch_);
    const float* weight = class_weight != nullptr ? class_weight + column : nullptr;
    for (int64_t r = 0; r < rows.count; ++r) {
      const LogitMap map = map_of(rows, r);
      float* z = logits + r * pitch_;
      const int64_t target = rows.target != nullptr ? rows.target[r] - column : -1;
      const bool here = target >= 0 && target < count;
      float raw = here ? z[target] : 0;
      if (here) map_block(map, &raw, nullptr, 1);
      if (here) target_logit[r] = raw;
      BlockState state;
      RareBlock rare_block, *rare = results.rare != nullptr ? &rare_block : nullptr;
      wants.target_logit = target_logit[r];
      wants.target = target;
      forward_block(map, z, nullptr, weight, count, wants, &state, maxima_ > 0 ? block : nullptr,
                    rare);
      sums[r].add(state, column, wants.sums, rare);
      if (maxima_ > 0) scratch[column / row_block] = state.maximum;
    }
    if (kept_ && basis_ == Basis::logits && direct_) {
      std::memmove(block, logits, count * sizeof(float));
    }
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    results.states[r] = sums[r].finish(wants.sums);
    results.states[r].target_logit = target_logit[r];
    if (results.rare != nullptr) results.rare[r] = sums[r].finish_rare(results.whole);
  }
}

void LogitRows::gradient(const RowGroup& rows, const float* class_weight,
                         const RowGradient* coefficients, const RowState* states,
                         float* scratch) const {
  const bool exponentials = basis_ == Basis::exponentials;
  float* const row = held(rows, scratch);
  for (int64_t column = 0; column < columns_; column += row_block) {
    const int64_t count = std::min(row_block, columns_ - column);
    float* const block = kept_ ? row + column : row;
    float* from = block;
    if (!kept_ && direct_ && !exponentials) {
      from = reinterpret_cast<float*>(address(logits_, rows.row[0], column));
    } else if (!kept_) {
      load_group(logits_, rows, column, count, block, pitch_);
    }
    const float* weight = class_weight != nullptr ? class_weight + column : nullptr;
    float* const out = to_output_ ? row_of_output(rows) + column : block;
    for (int64_t r = 0; r < rows.count; ++r, from += pitch_) {
      const RowGradient& g = coefficients[r];
      const LogitMap map = map_of(rows, r);
      float* draw = out + r * pitch_;
      const int64_t target = rows.target != nullptr ? rows.target[r] - column : -1;
      const bool here = target >= 0 && target < count;
      BlockState again;
      if (!kept_ && exponentials) {
        forward_block(map, from, nullptr, nullptr, count, {}, &again, from);
      } else if (!kept_) {
        map_block(map, from, nullptr, count);
      }
      float at_target = 0;
      if (here) {
        at_target = target_gradient(map, g, exponentials ? states[r].target_logit : from[target],
                                    weight != nullptr ? weight[target] : 1);
      }
      if (exponentials) {
        const float maximum = kept_ ? scratch[column / row_block] : again.maximum;
        scale_block(map, g, from, maximum, weight, count, draw);
      } else {
        gradient_block(map, g, from, weight, count, draw);
      }
      if (here) draw[target] = at_target;
    }
    if (!to_output_) store_group(out, pitch_, rows, column, count, output_);
  }
}

void LogitRows::clear(int64_t row) const {
  const int64_t size = size_of(output_.dtype);
  if (output_.stride[1] == 1) {
    std::memset(address(output_, row, 0), 0, columns_ * size);
    return;
  }
  for (int64_t j = 0; j < columns_; ++j) std::memset(address(output_, row, j), 0, size);
}

}  // namespace logitless::cpu
