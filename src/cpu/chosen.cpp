// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/chosen.h"

#include <algorithm>
#include <cmath>

#include "src/message.h"

namespace logitless::cpu {

void fill(const TensorView& view, float value) {
  const int64_t columns = view.rank == 2 ? view.shape[1] : 1;
  for (int64_t i = 0; i < view.shape[0]; ++i) {
    for (int64_t k = 0; k < columns; ++k) element_at(view, {i, 1, columns}, k) = value;
  }
}

Status check_id_offsets(const Call& call) {
  if (!call.lists()) return {};
  const int64_t tokens = call.tokens(), all = call.all_chosen();
  for (int64_t i = 0, before = 0; i <= tokens; ++i) {
    const int64_t offset = int_at(call.id_offsets, i);
    const int64_t least = i == 0 ? 0 : i == tokens ? all : before, most = i == 0 ? 0 : all;
    if (offset < least || offset > most) {
      return error(StatusCode::invalid_argument, "id_offsets[%lld] is %lld; allowed: %lld to %lld",
                   static_cast<long long>(i), static_cast<long long>(offset),
                   static_cast<long long>(least), static_cast<long long>(most));
    }
    before = offset;
  }
  return {};
}

int64_t chosen_column(const Call& call, int64_t id) {
  const int64_t column = id - call.vocab_start();
  return is_column(call, id) && column >= 0 && column < call.vocab() ? column : -1;
}

bool has_chosen_gradient(const Call& call, int64_t i) {
  if (!call.ids) return false;
  const ChosenPlaces places = places_of(call, i);
  for (int64_t k = 0; k < places.count; ++k) {
    if (is_column(call, id_at(call.ids, places, k)) &&
        element_at(call.grad_logits_at, places, k) != 0) {
      return true;
    }
  }
  return false;
}

double size_of_chosen_gradients(const Call& call, int64_t i) {
  double sum = 0;
  const ChosenPlaces places = places_of(call, i);
  for (int64_t k = 0; k < places.count; ++k) {
    if (!is_column(call, id_at(call.ids, places, k))) continue;
    const double gradient = element_at(call.grad_logits_at, places, k);
    if (std::isfinite(gradient)) sum += std::fabs(gradient);
  }
  return sum;
}

void ChosenColumns::begin_chunk(const Call& call, const int64_t* rows, int64_t count) const {
  for (int64_t n = 0, first = 0; n < count; ++n) {
    first_[n] = first;
    first += places_of(call, rows[n]).count;
  }
}

void ChosenColumns::find(const Call& call, int64_t n, int64_t row, float inv_gradient_scale) const {
  ChosenColumn* found = column_ + first_[n];
  int64_t count = 0;
  const ChosenPlaces places = places_of(call, row);
  for (int64_t k = 0; k < places.count; ++k) {
    const int64_t column = chosen_column(call, id_at(call.ids, places, k));
    if (column < 0) continue;
    const float gradient =
        call.grad_logits_at ? element_at(call.grad_logits_at, places, k) * inv_gradient_scale : 0;
    found[count++] = {column, k, gradient};
  }
  std::sort(found, found + count, [](const ChosenColumn& a, const ChosenColumn& b) {
    return a.column != b.column ? a.column < b.column : a.k < b.k;
  });
  count_[n] = count;
}

std::span<const ChosenColumn> ChosenColumns::within(int64_t n, int64_t first, int64_t width) const {
  if (first_ == nullptr) return {};
  const ChosenColumn* begin = column_ + first_[n];
  const ChosenColumn* end = begin + count_[n];
  const auto before = [](const ChosenColumn& c, int64_t column) { return c.column < column; };
  begin = std::lower_bound(begin, end, first, before);
  return {begin, std::lower_bound(begin, end, first + width, before)};
}

}  // namespace logitless::cpu
