// SPDX-License-Identifier: Apache-2.0
#include "src/cpu/chosen.h"

#include <algorithm>
#include <cmath>

namespace logitless::cpu {

void fill(const TensorView& matrix, float value) {
  for (int64_t i = 0; i < matrix.shape[0]; ++i) {
    for (int64_t k = 0; k < matrix.shape[1]; ++k) element_at(matrix, i, k) = value;
  }
}

int64_t chosen_column(const Call& call, int64_t i, int64_t k) {
  const int64_t id = id_at(call.ids, i, k), column = id - call.vocab_start();
  return is_column(call, id) && column >= 0 && column < call.vocab() ? column : -1;
}

bool has_chosen_gradient(const Call& call, int64_t i) {
  for (int64_t k = 0; k < call.chosen(); ++k) {
    if (is_column(call, id_at(call.ids, i, k)) && element_at(call.grad_logits_at, i, k) != 0) {
      return true;
    }
  }
  return false;
}

double size_of_chosen_gradients(const Call& call, int64_t i) {
  double sum = 0;
  for (int64_t k = 0; k < call.chosen(); ++k) {
    if (!is_column(call, id_at(call.ids, i, k))) continue;
    const double gradient = element_at(call.grad_logits_at, i, k);
    if (std::isfinite(gradient)) sum += std::fabs(gradient);
  }
  return sum;
}

void ChosenColumns::find(const Call& call, int64_t n, int64_t row, float inv_gradient_scale) const {
  ChosenColumn* found = column_ + n * most_;
  int64_t count = 0;
  for (int64_t k = 0; k < most_; ++k) {
    const int64_t column = chosen_column(call, row, k);
    if (column < 0) continue;
    const float gradient =
        call.grad_logits_at ? element_at(call.grad_logits_at, row, k) * inv_gradient_scale : 0;
    found[count++] = {column, static_cast<int32_t>(k), gradient};
  }
  std::sort(found, found + count, [](const ChosenColumn& a, const ChosenColumn& b) {
    return a.column != b.column ? a.column < b.column : a.k < b.k;
  });
  count_[n] = count;
}

std::span<const ChosenColumn> ChosenColumns::within(int64_t n, int64_t first, int64_t width) const {
  if (most_ == 0) return {};
  const ChosenColumn* begin = column_ + n * most_;
  const ChosenColumn* end = begin + count_[n];
  const auto before = [](const ChosenColumn& c, int64_t column) { return c.column < column; };
  begin = std::lower_bound(begin, end, first, before);
  return {begin, std::lower_bound(begin, end, first + width, before)};
}

}  // namespace logitless::cpu
