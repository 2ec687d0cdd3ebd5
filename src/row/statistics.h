// SPDX-License-Identifier: Apache-2.0
// The statistics of a token: name, tensor, the sums of its row that it needs, its value from the
// row's state, and the input from which Combine computes it. docs/semantics.md defines each.
#pragma once

#include <cmath>
#include <iterator>
#include <string_view>
#include <utility>

#include "src/call.h"
#include "src/row/state.h"
#include "src/row/sums.h"

namespace logitless {

using TensorOfCall = Tensor Call::*;
using ViewOfStatistics = TensorView TokenStatistics::*;

struct Statistic {
  std::string_view name;  // a string literal, so NUL-terminated
  TensorOfCall tensor;
  ViewOfStatistics view;
  SumSet needs;
  // One of the two is set. An ignored token gets the number 0 or the index -1.
  float (*number)(const RowStatistics&);
  int64_t (*index)(const RowStatistics&);
  // The input that Combine folds; empty if others suffice, or Combine lacks the statistic.
  std::string_view of_shards = "";
  bool of_whole_rows = false;  // not available for shards or Combine
};

inline constexpr Statistic kStatistics[] = {
    {"lse", &Call::lse, &TokenStatistics::lse, SumKind::exponentials,
     [](auto& s) { return s.lse(); }, nullptr},
    {"target_logit",
     &Call::target_logit,
     &TokenStatistics::target_logit,
     {},
     [](auto& s) { return s.target_logit; },
     nullptr},
    {"entropy", &Call::entropy, &TokenStatistics::entropy,
     SumKind::exponentials | SumKind::maximum | SumKind::shifted, [](auto& s) { return s.entropy; },
     nullptr, "shard_entropy"},
    {"argmax", &Call::argmax, &TokenStatistics::argmax, SumKind::maximum | SumKind::argmax, nullptr,
     [](auto& s) { return s.argmax; }, "shard_argmax"},
    {"row_reference", &Call::row_reference, &TokenStatistics::row_reference, SumKind::exponentials,
     [](auto& s) { return s.reference; }, nullptr},
    {"row_log_sum", &Call::row_log_sum, &TokenStatistics::row_log_sum, SumKind::exponentials,
     [](auto& s) { return s.log_sum; }, nullptr},
    {"weighted_logit_sum", &Call::weighted_logit_sum, &TokenStatistics::weighted_logit_sum,
     SumKind::weighted, [](auto& s) { return s.weighted_logit_sum; }, nullptr,
     "shard_weighted_logit_sum"},
    // A target in another shard has no probability here, even if the row has NaN.
    {"logprob", &Call::logprob, &TokenStatistics::logprob, SumKind::exponentials,
     [](auto& s) { return s.target_elsewhere ? -INFINITY : s.logprob(); }, nullptr},
    {"rank", &Call::rank, &TokenStatistics::rank, SumKind::above, nullptr,
     [](auto& s) { return s.rank; }, "", true},
    {"sum_p_squared", &Call::sum_p_squared, &TokenStatistics::sum_p_squared,
     SumKind::exponentials | SumKind::squares, [](auto& s) { return s.sum_p_squared; }, nullptr,
     "shard_sum_p_squared"},
    {"mean_logit", &Call::mean_logit, &TokenStatistics::mean_logit, SumKind::logits,
     [](auto& s) { return s.mean_logit; }, nullptr, "shard_mean_logit"},
    {"max_logprob", &Call::max_logprob, &TokenStatistics::max_logprob,
     SumKind::exponentials | SumKind::maximum,
     [](auto& s) { return s.of_shards ? s.shards_max_logprob : s.max_logprob(); }, nullptr,
     "shard_max_logprob"},
    {"mass_above", &Call::mass_above, &TokenStatistics::mass_above,
     SumKind::exponentials | SumKind::above | SumKind::mass,
     [](auto& s) { return s.mass_above > 1 ? 1 : s.mass_above; }, nullptr, "", true},
};

// Calls f(I) for each index I of kStatistics, as a constant, so that the table's functions are
// inlined into a loop over tokens.
template <class F>
LOGITLESS_HOST_DEVICE constexpr void with_each_statistic(const F& f) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    (f(std::integral_constant<size_t, I>()), ...);
  }(std::make_index_sequence<std::size(kStatistics)>());
}

}  // namespace logitless
