// SPDX-License-Identifier: Apache-2.0
// The gradients of logits_at alone ("Only chosen columns" of docs/semantics.md). No product over V:
//   a_ik = g_ik dz/draw of the column ids_ik
//   grad_input_i = sum_k a_ik W[ids_ik]
//   grad_weight_j = sum of a_ik x_i, grad_bias_j = sum of a_ik, over the places (i, k)
//   with id j, in order
// Tasks over tokens compute grad_input and all a; a counting sort groups the places by column;
// tasks over columns compute the rows of grad_weight. Each sum is computed by one thread, in f32.
#include <algorithm>
#include <numeric>

#include "src/cpu/chosen.h"
#include "src/cpu/linear_products.h"
#include "src/cpu/ops.h"

namespace logitless::cpu {
namespace {

constexpr int64_t recommended_lanes = 8, columns_of_task = 64;

struct Summand {
  int64_t row;
  float factor;
};

struct Layout {
  uint64_t first_at = 0, factors_at = 0, end_at = 0, summands_at = 0, lanes_at = 0;
  uint64_t lane_bytes = 0;
};

Layout layout_of(const Call& call) {
  const int64_t all = call.all_chosen();
  Layout layout;
  layout.first_at = tokens_bytes(call.tokens());
  layout.factors_at = layout.first_at + padded(call.tokens() * sizeof(int64_t));
  layout.end_at = layout.factors_at + padded(all * sizeof(float));
  layout.summands_at = layout.end_at + padded(call.vocab() * sizeof(int64_t));
  layout.lanes_at = layout.summands_at + padded(all * sizeof(Summand));
  layout.lane_bytes = 3 * padded(call.hidden() * sizeof(float));
  return layout;
}

// Returns row i of a matrix in f32: in place if possible, else converted into `copy`.
const float* row_in_f32(const TensorView& matrix, int64_t i, float* copy) {
  const int64_t hidden = matrix.shape[1], size = size_of(matrix.dtype);
  const char* row = matrix.as<const char>() + i * matrix.stride[0] * size;
  if (matrix.stride[1] == 1) {
    if (matrix.dtype == DType::f32) return reinterpret_cast<const float*>(row);
    load_as_f32(row, matrix.dtype, hidden, copy);
    return copy;
  }
  for (int64_t k = 0; k < hidden; ++k) {
    load_as_f32(row + k * matrix.stride[1] * size, matrix.dtype, 1, copy + k);
  }
  return copy;
}

float dot(const float* x, const float* w, int64_t count) {
  constexpr int64_t parts = 16;
  float sum[parts] = {};
  int64_t k = 0;
  for (; k + parts <= count; k += parts) {
    for (int64_t p = 0; p < parts; ++p) sum[p] += x[k + p] * w[k + p];
  }
  for (int64_t p = 0; k < count; ++k, ++p) sum[p] += x[k] * w[k];
  for (int64_t width = parts / 2; width > 0; width /= 2) {
    for (int64_t p = 0; p < width; ++p) sum[p] += sum[p + width];
  }
  return sum[0];
}

class OnlyChosen {
 public:
  OnlyChosen(const Call& call, char* memory, uint64_t bytes)
      : call_(call),
        layout_(layout_of(call)),
        memory_(memory),
        executor_(executor_of(call.execution)),
        map_(logit_map(call.options)) {
    const auto room = static_cast<int64_t>((bytes - layout_.lanes_at) / layout_.lane_bytes);
    lanes_ = std::clamp<int64_t>(executor_.num_threads, 1, room);
  }

  void run(const Tokens& tokens) {
    for (int64_t n = 0, first = 0; n < tokens.valid; ++n) {
      at<int64_t>(layout_.first_at)[n] = first;
      first += places_of(call_, tokens.row[n]).count;
    }
    for_each_task(executor_, lanes_, tokens.valid,
                  [&](int64_t n, int64_t lane) { pass_token(tokens, n, lane); });
    for_each_other(tokens, [&](int64_t i) {
      if (call_.grad_input) store_rows(nullptr, 0, 1, i, 1, 0, call_.hidden(), call_.grad_input);
    });
    if (!call_.grad_weight && !call_.grad_bias) return;
    sort(tokens);
    for_each_task(executor_, lanes_, divide_up(call_.vocab(), columns_of_task),
                  [&](int64_t task, int64_t lane) {
                    const int64_t end = std::min(call_.vocab(), (task + 1) * columns_of_task);
                    for (int64_t j = task * columns_of_task; j < end; ++j) pass_column(j, lane);
                  });
  }

 private:
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  // A lane has three rows [D]: the sum and the copies of two operands.
  float* row_of_lane(int64_t lane, int64_t row) const {
    return at<float>(layout_.lanes_at + lane * layout_.lane_bytes + row * layout_.lane_bytes / 3);
  }
  float* factors(int64_t n) const {
    return at<float>(layout_.factors_at) + at<int64_t>(layout_.first_at)[n];
  }

  void pass_token(const Tokens& tokens, int64_t n, int64_t lane) const;
  void sort(const Tokens& tokens) const;
  void pass_column(int64_t j, int64_t lane) const;

  const Call& call_;
  const Layout layout_;
  char* memory_;
  const Executor& executor_;
  const LogitMap map_;
  int64_t lanes_ = 1;
};

void OnlyChosen::pass_token(const Tokens& tokens, int64_t n, int64_t lane) const {
  const int64_t i = tokens.row[n], hidden = call_.hidden();
  const ChosenPlaces places = places_of(call_, i);
  const LogitMap map = map_of(map_, tokens, n);
  float* sum = row_of_lane(lane, 0);
  const bool capped = map.softcap > 0;
  const float* x = capped ? row_in_f32(call_.input, i, row_of_lane(lane, 1)) : nullptr;
  std::fill_n(sum, hidden, 0.0f);
  for (int64_t k = 0; k < places.count; ++k) {
    const int64_t column = chosen_column(call_, id_at(call_.ids, places, k));
    if (column < 0) continue;
    const float* w = nullptr;
    if (capped || call_.grad_input) w = row_in_f32(call_.weight, column, row_of_lane(lane, 2));
    float z = 0;
    if (capped) {
      z = dot(x, w, hidden);
      const float bias = call_.bias ? element_as_f32(call_.bias, column) : 0;
      map_block(map, &z, call_.bias ? &bias : nullptr, 1);
    }
    const double gradient = element_at(call_.grad_logits_at, places, k);
    const auto factor = static_cast<float>(gradient * slope_at(map, z));
    factors(n)[k] = factor;
    if (call_.grad_input) add_scaled(w, 0, factor, 1, hidden, false, sum, 0);
  }
  if (call_.grad_input) store_rows(sum, 0, 1, i, 1, 0, hidden, call_.grad_input);
}

// Sorts the places by column: the summands of a column become adjacent, in the order of the places.
void OnlyChosen::sort(const Tokens& tokens) const {
  int64_t* end = at<int64_t>(layout_.end_at);
  Summand* summands = at<Summand>(layout_.summands_at);
  const auto for_places = [&](const auto& use) {
    for (int64_t n = 0; n < tokens.valid; ++n) {
      const ChosenPlaces places = places_of(call_, tokens.row[n]);
      for (int64_t k = 0; k < places.count; ++k) {
        const int64_t column = chosen_column(call_, id_at(call_.ids, places, k));
        if (column >= 0) use(column, Summand{tokens.row[n], factors(n)[k]});
      }
    }
  };
  std::fill_n(end, call_.vocab(), int64_t{0});
  for_places([&](int64_t column, const Summand&) { ++end[column]; });
  std::exclusive_scan(end, end + call_.vocab(), end, int64_t{0});
  // end[column] is where the column begins, and moves to its end as summands are placed.
  for_places([&](int64_t column, const Summand& summand) { summands[end[column]++] = summand; });
}

void OnlyChosen::pass_column(int64_t j, int64_t lane) const {
  const int64_t* end = at<int64_t>(layout_.end_at);
  const Summand* first = at<Summand>(layout_.summands_at) + (j == 0 ? 0 : end[j - 1]);
  const Summand* last = at<Summand>(layout_.summands_at) + end[j];
  if (first == last && call_.accumulate) return;
  if (call_.grad_bias) {
    float sum = 0;
    for (const Summand* s = first; s != last; ++s) sum += s->factor;
    TensorView column = call_.grad_bias;
    column.shape[1] = 1, column.stride[1] = 1;
    store_rows(&sum, 0, 1, j, 1, 0, 1, column, call_.accumulate);
  }
  if (!call_.grad_weight) return;
  float* sum = row_of_lane(lane, 0);
  const int64_t hidden = call_.hidden();
  for (const Summand* s = first; s != last; ++s) {
    const float* x = row_in_f32(call_.input, s->row, row_of_lane(lane, 1));
    add_scaled(x, 0, s->factor, 1, hidden, s == first, sum, 0);
  }
  store_rows(first == last ? nullptr : sum, 0, 1, j, 1, 0, hidden, call_.grad_weight,
             call_.accumulate);
}

}  // namespace

Status only_chosen_workspace(const Call& call, WorkspaceSize* size) {
  const Layout layout = layout_of(call);
  const int64_t threads = executor_of(call.execution).num_threads;
  const auto lanes = static_cast<uint64_t>(std::max<int64_t>(threads, recommended_lanes));
  *size = {layout.lanes_at + layout.lane_bytes, layout.lanes_at + lanes * layout.lane_bytes, 64};
  return {};
}

Status run_only_chosen(const Call& call, const Workspace& workspace) {
  char* memory = static_cast<char*>(workspace.data) + workspace.byte_offset;
  Tokens tokens;
  const Status status = prepare_tokens(call, call.vocab(), memory, &tokens);
  if (status.ok()) OnlyChosen(call, memory, workspace.bytes).run(tokens);
  return status;
}

}  // namespace logitless::cpu
