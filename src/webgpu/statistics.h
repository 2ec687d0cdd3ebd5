// SPDX-License-Identifier: Apache-2.0
// Where the shaders keep each statistic of a token, and how it is written to outputs. The words are
// those of structs in common/token.wgsl, common/window.wgsl and fold.wgsl, which
// tests/webgpu/shared_names_test.py compares.
#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>

#include "src/row/statistics.h"
#include "src/webgpu/plan.h"

namespace logitless::webgpu {

constexpr uint32_t kStateWords = 16, kSlotWords = 8, kExtraWords = 8;
constexpr uint32_t kFoldWords = 14;  // in two slots of a token

// Words of a token's State from which outputs are written.
enum class StateWord : uint32_t { m = 4, log_sum, target_logit, weighted, entropy, argmax, loss };

// Words of a token's Extra.
enum class ExtraWord : uint32_t { sum_p_squared = 0, mean_logit, rank, max_logprob, mass_above };

struct Word {
  constexpr Word(StateWord word) : of(Role::rows), at(static_cast<uint32_t>(word)) {}    // NOLINT
  constexpr Word(ExtraWord word) : of(Role::extras), at(static_cast<uint32_t>(word)) {}  // NOLINT
  constexpr Word(Role role, StateWord word) : of(role), at(static_cast<uint32_t>(word)) {}
  Role of;
  uint32_t at;
};

// The values of `kind` in tokens.wgsl; index + 1 is an index of 64 bits.
enum class Emit : uint32_t { word = 0, lse, logprob, index, negative = 5 };

struct StatisticWord {
  std::string_view name;
  Word word;
  Emit emit = Emit::word;
};
inline constexpr StatisticWord kStatisticWords[] = {
    {"lse", StateWord::log_sum, Emit::lse},
    {"target_logit", StateWord::target_logit},
    {"entropy", StateWord::entropy},
    {"argmax", StateWord::argmax, Emit::index},
    {"row_reference", StateWord::m},
    {"row_log_sum", StateWord::log_sum},
    {"weighted_logit_sum", StateWord::weighted},
    {"logprob", StateWord::log_sum, Emit::logprob},
    {"sum_p_squared", ExtraWord::sum_p_squared},
    {"mean_logit", ExtraWord::mean_logit},
    {"rank", ExtraWord::rank, Emit::index},
    {"max_logprob", StateWord::log_sum, Emit::negative},
    {"mass_above", ExtraWord::mass_above}};
constexpr bool names_every_statistic() {
  size_t found = 0;
  for (const StatisticWord& word : kStatisticWords) {
    for (const Statistic& statistic : kStatistics) found += word.name == statistic.name ? 1 : 0;
  }
  return found == std::size(kStatistics) && found == std::size(kStatisticWords);
}
static_assert(names_every_statistic());

// Statistics that only divergences have.
inline constexpr StatisticWord kDivergenceWords[] = {
    {"teacher_entropy", Word(Role::teacher_rows, StateWord::entropy)},
    {"acceptance", StateWord::weighted}};

// Combine's inputs, in the order of a Fold's first words.
inline constexpr std::string_view kFoldInputs[] = {
    "shard_row_reference", "shard_row_log_sum",   "shard_target_logit", "shard_weighted_logit_sum",
    "shard_entropy",       "shard_sum_p_squared", "shard_mean_logit",   "shard_max_logprob"};

// Calls f(view, word, emit) for each requested statistic.
template <class F>
void for_each_asked(const Call& call, const F& f) {
  if (!call.forward) return;
  for (const auto& [name, word, emit] : kDivergenceWords) {
    if (const TensorView& view = call[name]) f(view, word, emit);
  }
  for (const auto& [name, word, emit] : kStatisticWords) {
    const TensorView& view = call[name];
    if (!view) continue;
    if (call.combines && emit == Emit::negative) {
      f(view, Word(ExtraWord::max_logprob), Emit::word);
    } else {
      f(view, word, emit);
    }
  }
}

// Returns whether the call requests a statistic that is kept in Extra.
inline bool asks_extras(const Call& call) {
  bool asks = false;
  for_each_asked(call,
                 [&](const TensorView&, Word word, Emit) { asks |= word.of == Role::extras; });
  return asks;
}

}  // namespace logitless::webgpu
